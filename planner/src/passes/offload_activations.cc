// SPDX-License-Identifier: Apache-2.0
#include "passes/offload_activations.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <variant>

#include "passes/checkpoint_regions.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/program.h"

namespace shardplan {
namespace {

constexpr char kModules[] = "/activation_offload/modules";

// One call of a module of the rule.
struct Stretch {
  ModuleId module = -1;  // canonical
  UnitId unit = -1;      // whose hooks it runs between
  std::size_t enter = 0, exit = 0;
};

class UnitFinder {
 public:
  UnitFinder(const Trace& trace, const ModelIndex& index, const Partition& partition,
             const ActivationOffload& rule)
      : trace_(trace), index_(index), partition_(partition), rule_(rule) {}

  Result<std::vector<OffloadedUnit>> Run() {
    if (Status s = Match(); !s) return std::unexpected(s.error());
    for (const Pass& pass : trace_.forwards) FindStretches(pass);
    Choose();
    if (Status s = CheckUnits(); !s) return std::unexpected(s.error());
    std::vector<OffloadedUnit> found;
    for (std::size_t f = 0; f < trace_.forwards.size(); ++f) {
      if (!trace_.forwards[f].grad_enabled) continue;
      const std::vector<OffloadedUnit> here = InForward(static_cast<std::int32_t>(f));
      found.insert(found.end(), here.begin(), here.end());
    }
    return found;
  }

 private:
  Status Match() {
    for (std::size_t e = 0; e < rule_.modules.size(); ++e) {
      const std::string pointer = fmt::format("{}/{}", kModules, e);
      Result<std::vector<std::string>> names = MatchModules(trace_, rule_.modules[e]);
      if (!names) {
        names.error().pointer = pointer;
        return std::unexpected(std::move(names.error()));
      }
      for (const std::string& name : *names) {
        const ModuleId module = index_.canonical[index_.by_fqn.at(name)];
        const UnitId unit = UnitAround(index_, partition_, module);
        if (unit < 0 || partition_.units[unit].is_root) {
          return MakeInputError(pointer,
                                "activations are offloaded of a module that is in no unit but the root", name,
                                "modules of which units are made, or in them");
        }
        matched_.insert(module);
      }
    }
    return {};
  }

  void FindStretches(const Pass& pass) {
    std::vector<Stretch>& stretches = stretches_.emplace_back();
    std::int32_t depth = 0, inside = -1;  // of a module of the rule: those in it are part of it
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      if (const auto* enter = std::get_if<EnterEvent>(&pass.events[i])) {
        const ModuleId module = index_.canonical[enter->module];
        if (inside < 0 && matched_.contains(module)) {
          inside = depth;
          stretches.push_back({.module = module, .unit = UnitAround(index_, partition_, module), .enter = i});
        }
        ++depth;
      } else if (std::holds_alternative<ExitEvent>(pass.events[i]) && --depth == inside) {
        stretches.back().exit = i;
        inside = -1;
      }
    }
  }

  // Chooses every so many-th unit, in the order of their forwards.
  void Choose() {
    std::vector<UnitId> units;
    for (const std::vector<Stretch>& stretches : stretches_) {
      for (const Stretch& stretch : stretches) {
        if (std::ranges::find(units, stretch.unit) == units.end()) units.push_back(stretch.unit);
      }
    }
    std::set<UnitId> chosen;
    for (std::size_t u = 0; u < units.size(); u += static_cast<std::size_t>(rule_.every)) {
      chosen.insert(units[u]);
    }
    for (std::vector<Stretch>& stretches : stretches_) {
      std::erase_if(stretches, [&](const Stretch& stretch) { return !chosen.contains(stretch.unit); });
    }
  }

  Status CheckUnits() const {
    for (const std::vector<Stretch>& stretches : stretches_) {
      std::set<ModuleId> seen;
      for (const Stretch& stretch : stretches) {
        if (seen.insert(stretch.module).second) continue;
        return MakeInputError(kModules, "activations are offloaded of a module that runs twice in a forward",
                              trace_.modules[stretch.module].fqn, "modules that run once");
      }
    }
    std::set<ModuleId> again;
    for (const Pass& pass : trace_.backwards) {
      for (const TraceEvent& event : pass.events) {
        if (const auto* enter = std::get_if<RecomputeEnterEvent>(&event)) again.insert(enter->module);
      }
    }
    for (const ModuleId recomputed : again) {
      for (const std::vector<Stretch>& stretches : stretches_) {
        for (const Stretch& stretch : stretches) {
          if (!IsUnder(index_, recomputed, stretch.module) && !IsUnder(index_, stretch.module, recomputed))
            continue;
          return MakeInputError(kModules, "activations are offloaded and recomputed, too",
                                fmt::format("{}, and {} runs again", trace_.modules[stretch.module].fqn,
                                            DisplayName(trace_.modules[recomputed].fqn)),
                                "one or the other");
        }
      }
    }
    return {};
  }

  std::vector<OffloadedUnit> InForward(std::int32_t f) const {
    const Pass& pass = trace_.forwards[f];
    const std::set<StorageId> in_backward = FreedInBackward(f);
    std::set<StorageId> gone = MadeByOthers(f);
    bool says_releases = false;
    for (const TraceEvent& event : pass.events) {
      if (const auto* free = std::get_if<FreeEvent>(&event)) gone.insert(free->storage);
      says_releases = says_releases || std::holds_alternative<ReleaseEvent>(event);
    }
    std::vector<OffloadedUnit> found;
    for (const Stretch& stretch : stretches_[f]) {
      std::set<StorageId> held;  // by Python, when the module is left
      std::vector<const AllocateEvent*> made;
      for (std::size_t i = stretch.enter; i <= stretch.exit; ++i) {
        if (const auto* born = std::get_if<AllocateEvent>(&pass.events[i])) {
          made.push_back(born);
          if (says_releases || born->role == StorageRole::kOutput) held.insert(born->storage);
        } else if (const auto* release = std::get_if<ReleaseEvent>(&pass.events[i])) {
          held.erase(release->storage);
        }
      }
      for (const TensorId tensor : std::get<ExitEvent>(pass.events[stretch.exit]).outputs)
        held.insert(pass.tensors[tensor].storage);
      for (const AllocateEvent* born : made) {
        const bool autograds = in_backward.contains(born->storage) && !gone.contains(born->storage);
        if (!autograds || held.contains(born->storage) || born->size_bytes < rule_.min_bytes) continue;
        auto of_unit = std::ranges::find(found, stretch.unit, &OffloadedUnit::unit);
        if (of_unit == found.end())
          of_unit =
              found.insert(found.end(), {.unit = stretch.unit, .forward = f, .storages = {}, .bytes = {}});
        of_unit->storages.push_back(born->storage);
        of_unit->bytes.push_back(born->size_bytes);
      }
    }
    return found;
  }

  // Storages that other forwards make, too: which of them is meant, no segment says.
  std::set<StorageId> MadeByOthers(std::int32_t f) const {
    std::set<StorageId> made;
    for (std::size_t other = 0; other < trace_.forwards.size(); ++other) {
      if (other == static_cast<std::size_t>(f)) continue;
      for (const TraceEvent& event : trace_.forwards[other].events) {
        if (const auto* born = std::get_if<AllocateEvent>(&event)) made.insert(born->storage);
      }
    }
    return made;
  }

  // By the backward that covers the forward, before the engine ends.
  std::set<StorageId> FreedInBackward(std::int32_t f) const {
    std::set<StorageId> freed;
    for (const Pass& backward : trace_.backwards) {
      if (std::ranges::find(backward.forwards, f) == backward.forwards.end()) continue;
      for (const TraceEvent& event : backward.events) {
        if (std::holds_alternative<BackwardEndEvent>(event)) break;
        if (const auto* free = std::get_if<FreeEvent>(&event)) freed.insert(free->storage);
      }
    }
    return freed;
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  const ActivationOffload& rule_;
  std::set<ModuleId> matched_;
  std::vector<std::vector<Stretch>> stretches_;  // by forward
};

// One forward and its backward in a recorded step.
class PointFinder {
 public:
  PointFinder(const std::vector<OffloadedUnit>& units, const RecordedStep& step)
      : units_(units), events_(step.events) {}

  Result<std::vector<OffloadPoint>> Run() {
    for (std::size_t e = 0; e < events_.size(); ++e) {
      if (events_[e].kind != HookPointKind::kForwardBegin || !events_[e].grad_enabled) continue;
      if (Status s = OfForward(e); !s) return std::unexpected(s.error());
    }
    std::ranges::stable_sort(points_, {},
                             [](const OffloadPoint& point) { return std::pair(point.behind, point.kind); });
    return std::move(points_);
  }

 private:
  // An offloaded unit's own points.
  struct Places {
    std::int32_t unit = -1;  // index into units_
    std::size_t post_forward = 0, pre_backward = 0;
  };

  std::size_t Find(std::size_t from, HookPointKind kind, std::int32_t microbatch) const {
    for (; from < events_.size(); ++from) {
      if (events_[from].kind == kind && events_[from].microbatch == microbatch) break;
    }
    return from;
  }

  // The pass of the trace that a forward or backward runs; -1: of none that computes.
  std::int32_t PassOf(std::size_t begin, bool backward) const {
    for (std::size_t e = begin + 1; e < events_.size(); ++e) {
      if (events_[e].kind == HookPointKind::kForwardBegin || events_[e].kind == HookPointKind::kBackwardBegin)
        break;
      if (events_[e].kind == HookPointKind::kSegment && events_[e].range.backward == backward)
        return events_[e].range.pass;
    }
    return -1;
  }

  Status OfForward(std::size_t begin) {
    const std::int32_t microbatch = events_[begin].microbatch;
    const std::int32_t forward = PassOf(begin, false);
    const std::size_t end = Find(begin, HookPointKind::kForwardEnd, microbatch);
    std::vector<Places> places;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (units_[u].forward != forward) continue;
      Places of{.unit = static_cast<std::int32_t>(u)};
      for (std::size_t e = begin; e < end; ++e) {
        const bool leaves = events_[e].kind == HookPointKind::kPostForward;
        if (leaves && events_[e].unit == units_[u].unit) of.post_forward = e;
      }
      if (of.post_forward > 0) places.push_back(of);
    }
    std::ranges::sort(places, {}, &Places::post_forward);
    // Behind the last unit of all the copy has no time, and the backward begins with it.
    while (!places.empty() && Count(HookPointKind::kPostForward, places.back().post_forward, end - 1) == 0) {
      places.pop_back();
    }
    if (places.empty()) return {};
    const Result<std::size_t> backward = BackwardOf(begin, forward);
    if (!backward) return std::unexpected(backward.error());
    for (Places& of : places) {
      of.pre_backward = *backward;
      const UnitId unit = units_[of.unit].unit;
      do {
        of.pre_backward = Find(of.pre_backward + 1, HookPointKind::kPreBackward, microbatch);
      } while (of.pre_backward < events_.size() && events_[of.pre_backward].unit != unit);
      if (of.pre_backward == events_.size()) {
        return MakeInputError(kModules, "activations are offloaded of a unit that does not run backward",
                              fmt::format("unit {}", unit), "units that train or pass gradients on");
      }
    }
    AddForward(places, end, microbatch);
    AddBackward(places, *backward, microbatch);
    return {};
  }

  Result<std::size_t> BackwardOf(std::size_t begin, std::int32_t forward) const {
    const std::int32_t microbatch = events_[begin].microbatch;
    for (std::size_t e = begin + 1; e < events_.size(); ++e) {
      if (events_[e].kind == HookPointKind::kForwardBegin && PassOf(e, false) == forward) {
        return MakeInputError(
            "/activation_offload",
            "activations of one micro-batch at a time are in host memory, and another one "
            "runs forward before the backward",
            fmt::format("micro-batch {} behind micro-batch {}", events_[e].microbatch, microbatch),
            "each micro-batch's backward behind its forward");
      }
      if (events_[e].kind != HookPointKind::kBackwardBegin) continue;
      const std::vector<std::int32_t>& covered = events_[e].microbatches;
      if (std::ranges::find(covered, microbatch) == covered.end()) continue;
      if (covered.size() == 1) return e;
      return MakeInputError("/activation_offload", "a backward covers several micro-batches",
                            fmt::format("{} of them", covered.size()), "a backward for each");
    }
    return MakeInputError("/activation_offload", "a forward with gradients has no backward in its step",
                          fmt::format("micro-batch {}", microbatch), "a backward behind it");
  }

  // How many points of the kind there are in (from, to].
  std::size_t Count(HookPointKind kind, std::size_t from, std::size_t to) const {
    return static_cast<std::size_t>(
        std::count_if(events_.begin() + static_cast<std::ptrdiff_t>(from) + 1,
                      events_.begin() + static_cast<std::ptrdiff_t>(to) + 1,
                      [&](const HookPoint& point) { return point.kind == kind; }));
  }

  void Add(OffloadPoint::Kind kind, const Places& of, std::size_t behind, std::int32_t microbatch) {
    points_.push_back({.behind = behind, .kind = kind, .unit = of.unit, .microbatch = microbatch});
  }

  void AddForward(const std::vector<Places>& places, std::size_t end, std::int32_t microbatch) {
    std::size_t distance = 1;  // in units that are left
    for (std::size_t p = 0; p < places.size(); ++p) {
      const Places& of = places[p];
      Add(OffloadPoint::Kind::kOut, of, of.post_forward, microbatch);
      std::size_t release = of.post_forward;
      if (p + 1 < places.size()) {
        release = places[p + 1].post_forward;
        distance = std::max<std::size_t>(1, Count(HookPointKind::kPostForward, of.post_forward, release));
      } else {
        std::size_t left = distance;
        for (std::size_t e = of.post_forward + 1; e < end && left > 0; ++e) {
          if (events_[e].kind != HookPointKind::kPostForward) continue;
          release = e;
          --left;
        }
      }
      Add(OffloadPoint::Kind::kRelease, of, release, microbatch);
    }
  }

  void AddBackward(const std::vector<Places>& places, std::size_t begin, std::int32_t microbatch) {
    std::size_t distance = 1;
    for (std::size_t p = 0; p < places.size(); ++p) {
      const Places& of = places[p];
      Add(OffloadPoint::Kind::kAwait, of, of.pre_backward, microbatch);
      if (p + 1 == places.size()) continue;
      const std::size_t back = std::min(places[p + 1].pre_backward, of.pre_backward);
      Add(OffloadPoint::Kind::kBack, of, back, microbatch);
      if (p + 2 == places.size())
        distance = std::max<std::size_t>(1, Count(HookPointKind::kPreBackward, back, of.pre_backward));
    }
    const Places& last = places.back();
    std::size_t back = last.pre_backward;
    for (std::size_t e = last.pre_backward; e-- > begin + 1 && distance > 0;) {
      if (events_[e].kind != HookPointKind::kPreBackward) continue;
      back = e;
      --distance;
    }
    Add(OffloadPoint::Kind::kBack, last, back, microbatch);
  }

  const std::vector<OffloadedUnit>& units_;
  const std::vector<HookPoint>& events_;
  std::vector<OffloadPoint> points_;
};

}  // namespace

Result<ActivationOffloads> OffloadActivations(const Trace& trace, const ModelIndex& index,
                                              const Partition& partition, const Strategy& strategy,
                                              const std::vector<RecordedStep>& steps) {
  ActivationOffloads offloads;
  offloads.steps.resize(steps.size());
  if (!strategy.activation_offload) return offloads;
  Result<std::vector<OffloadedUnit>> units =
      UnitFinder(trace, index, partition, *strategy.activation_offload).Run();
  if (!units) return std::unexpected(std::move(units.error()));
  offloads.units = *std::move(units);
  for (std::size_t s = 0; s < steps.size(); ++s) {
    Result<std::vector<OffloadPoint>> points = PointFinder(offloads.units, steps[s]).Run();
    if (!points) return std::unexpected(std::move(points.error()));
    offloads.steps[s] = *std::move(points);
  }
  return offloads;
}

void EmitOffload(const OffloadedUnit& offloaded, const OffloadPoint& point, ProgramBuilder& builder) {
  const UnitId unit_before = builder.unit();
  const std::string reason_before = builder.reason();
  builder.SetReason("offload_activations");
  builder.SetUnit(offloaded.unit);
  const std::string name = DisplayName(builder.plan().units[offloaded.unit].fqn) +
                           (offloaded.forward > 0 ? fmt::format(".f{}", offloaded.forward) : "");
  const auto buffer = [&](BufferRole role, MemoryKind memory, bool persistent) {
    return builder.AddBuffer({.name = fmt::format("{}.{}", name, Name(role)),
                              .role = role,
                              .unit = offloaded.unit,
                              .dtype = DType::kUInt8,
                              .parts_bytes = offloaded.bytes,
                              .storages = offloaded.storages,
                              .memory = memory,
                              .persistent = persistent});
  };
  const BufferId made = buffer(BufferRole::kActivation, MemoryKind::kDevice, false);
  const BufferId host = buffer(BufferRole::kActivationHost, MemoryKind::kPinnedHost, true);
  const StreamId to_host = builder.Stream("activations_to_host");
  const StreamId to_device = builder.Stream("activations_to_device");
  const auto event = [&](std::string_view what) {
    return builder.Event(fmt::format("{}.activation.{}", name, what));
  };
  switch (point.kind) {
    case OffloadPoint::Kind::kOut:
      builder.WaitStream(to_host, kCompute, name + ".activation.made");
      builder.Move(InstructionKind::kCopyToHost, made, host, to_host);
      builder.Record(event("copied"), to_host);
      break;
    case OffloadPoint::Kind::kRelease:
      builder.Wait(event("copied"), kCompute);
      builder.Free(made, kCompute);
      break;
    case OffloadPoint::Kind::kBack:
      builder.Allocate(made, kCompute);
      builder.WaitStream(to_device, kCompute, name + ".activation.allocated");
      builder.Move(InstructionKind::kCopyToDevice, host, made, to_device);
      builder.Record(event("back"), to_device);
      break;
    case OffloadPoint::Kind::kAwait:
      builder.Wait(event("back"), kCompute);
      break;
  }
  builder.SetUnit(unit_before);
  builder.SetReason(reason_before);
}

std::string OffloadText(const Partition& partition, const ActivationOffloads& offloads) {
  std::string text;
  for (const OffloadedUnit& offloaded : offloads.units) {
    const Bytes bytes = std::accumulate(offloaded.bytes.begin(), offloaded.bytes.end(), Bytes{0});
    text += fmt::format("offloaded of {} in forward {}: {} bytes in {} tensors\n",
                        DisplayName(partition.units[offloaded.unit].unit.fqn), offloaded.forward, bytes.value,
                        offloaded.storages.size());
  }
  return text;
}

}  // namespace shardplan

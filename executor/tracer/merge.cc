// SPDX-License-Identifier: Apache-2.0
#include "tracer/merge.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace shardplan::executor {
namespace {

bool IsSum(const TraceEvent& event) {
  const auto* op = std::get_if<OperatorEvent>(&event);
  return op != nullptr && (op->name == "aten.add" || op->name == "aten.add_");
}

// Operators are compared without the storages that they read and write, whose numbers differ.
OperatorEvent WithoutStorages(OperatorEvent op) {
  op.reads.clear();
  op.writes.clear();
  op.parameters.clear();
  return op;
}

// The part that is the same with and without marks: anything but storages, sums and the moments themselves.
std::optional<TraceEvent> AnchorOf(const TraceEvent& event) {
  if (const auto* op = std::get_if<OperatorEvent>(&event)) {
    if (IsSum(event)) return std::nullopt;
    return WithoutStorages(*op);
  }
  if (const auto* gradient = std::get_if<ParameterGradEvent>(&event)) {
    return ParameterGradEvent{gradient->parameter, -1};
  }
  if (std::holds_alternative<OutputGradReadyEvent>(event)) return event;
  return std::nullopt;
}

struct AnchoredEvents {
  std::vector<TraceEvent> keys;  // of the anchors
  std::vector<const TraceEvent*> anchors;
  std::vector<std::vector<const TraceEvent*>> gaps;  // before the first, between each two, after the last
};

AnchoredEvents SplitAtAnchors(const std::vector<TraceEvent>& events) {
  AnchoredEvents split;
  split.gaps.emplace_back();
  for (const TraceEvent& event : events) {
    if (std::optional<TraceEvent> key = AnchorOf(event)) {
      split.keys.push_back(std::move(*key));
      split.anchors.push_back(&event);
      split.gaps.emplace_back();
    } else {
      split.gaps.back().push_back(&event);
    }
  }
  return split;
}

// The moments of a gap after as many sums, and after the frees that follow those.
void MergeGap(const std::vector<const TraceEvent*>& plain, const std::vector<const TraceEvent*>& marked,
              std::vector<TraceEvent>& result) {
  std::size_t position = 0;
  int sums = 0, wanted = 0;
  for (const TraceEvent* event : marked) {
    if (IsSum(*event)) {
      ++wanted;
    } else if (std::holds_alternative<InputsGradDoneEvent>(*event)) {
      while (position < plain.size() &&
             (std::holds_alternative<FreeEvent>(*plain[position]) || sums < wanted)) {
        sums += IsSum(*plain[position]) ? 1 : 0;
        result.push_back(*plain[position++]);
      }
      result.push_back(*event);
    }
  }
  for (; position < plain.size(); ++position) result.push_back(*plain[position]);
}

// A forward without deaths, and the deaths before the first event, between each two and behind the last.
struct Lives {
  std::vector<const TraceEvent*> events;
  std::vector<std::vector<StorageId>> deaths;
};

Lives SplitAtDeaths(const std::vector<TraceEvent>& events) {
  Lives lives;
  lives.deaths.emplace_back();
  for (const TraceEvent& event : events) {
    if (const auto* death = std::get_if<FreeEvent>(&event)) {
      lives.deaths.back().push_back(death->storage);
    } else {
      lives.events.push_back(&event);
      lives.deaths.emplace_back();
    }
  }
  return lives;
}

// The part that is the same with nothing kept: anything but the numbers of storages and tensors, and the
// roles that follow from deaths.
TraceEvent ShapeOfEvent(const TraceEvent& event) {
  if (const auto* birth = std::get_if<AllocateEvent>(&event)) {
    return AllocateEvent{-1, birth->size_bytes, StorageRole::kForwardTemp, birth->module, -1};
  }
  if (const auto* op = std::get_if<OperatorEvent>(&event)) return WithoutStorages(*op);
  if (const auto* enter = std::get_if<EnterEvent>(&event)) return EnterEvent{enter->module, {}};
  if (const auto* exit = std::get_if<ExitEvent>(&event)) return ExitEvent{exit->module, {}};
  return event;
}

template <class Values>
bool Holds(const Values& values, StorageId storage) {
  return std::ranges::find(values, storage) != values.end();
}

// `same`: storages of `unkept`, as `events` call them.
std::optional<std::vector<TraceEvent>> WithReleases(const std::vector<TraceEvent>& events,
                                                    const std::vector<TraceEvent>& unkept,
                                                    std::unordered_map<StorageId, StorageId>& same) {
  const Lives kept = SplitAtDeaths(events), other = SplitAtDeaths(unkept);
  const auto is_alike = [](const TraceEvent* a, const TraceEvent* b) {
    return ShapeOfEvent(*a) == ShapeOfEvent(*b);
  };
  if (!std::ranges::equal(kept.events, other.events, is_alike)) return std::nullopt;
  std::unordered_set<StorageId> born;
  for (const TraceEvent* event : kept.events) {
    if (const auto* birth = std::get_if<AllocateEvent>(event)) born.insert(birth->storage);
  }
  std::vector<TraceEvent> result;
  for (std::size_t i = 0; i < kept.deaths.size(); ++i) {
    std::vector<StorageId> here;
    for (const StorageId storage : other.deaths[i]) {
      if (const auto found = same.find(storage); found != same.end()) here.push_back(found->second);
    }
    for (const StorageId storage : kept.deaths[i]) {
      if (!Holds(here, storage)) return std::nullopt;
    }
    for (const StorageId storage : here) {
      if (Holds(kept.deaths[i], storage)) {
        result.emplace_back(FreeEvent{storage});
      } else if (born.contains(storage)) {
        result.emplace_back(ReleaseEvent{storage});
      }
    }
    if (i == kept.events.size()) continue;
    if (const auto* birth = std::get_if<AllocateEvent>(kept.events[i])) {
      same[std::get<AllocateEvent>(*other.events[i]).storage] = birth->storage;
    }
    result.push_back(*kept.events[i]);
  }
  return result;
}

// Outputs of modules that need a gradient, by forward and tensor: whether they get one. Forwards without a
// backward are not in it.
std::map<std::pair<std::size_t, TensorId>, bool> TensorsInLoss(const std::vector<Pass>& forwards,
                                                               const std::vector<Pass>& backwards) {
  struct Output {
    std::size_t forward;
    OutputGradReadyEvent ready;
    TensorId tensor;
  };
  std::vector<Output> outputs;
  for (std::size_t number = 0; number < forwards.size(); ++number) {
    std::unordered_map<ModuleId, std::int32_t> calls;
    std::vector<std::int32_t> open;
    for (const TraceEvent& event : forwards[number].events) {
      if (const auto* enter = std::get_if<EnterEvent>(&event)) {
        open.push_back(calls[enter->module]++);
      } else if (const auto* exit = std::get_if<ExitEvent>(&event)) {
        const std::int32_t occurrence = open.back();
        open.pop_back();
        for (std::size_t i = 0; i < exit->outputs.size(); ++i) {
          const TensorId tensor = exit->outputs[i];
          if (!forwards[number].tensors[static_cast<std::size_t>(tensor)].requires_grad) continue;
          outputs.push_back({number, {exit->module, static_cast<std::int32_t>(i), occurrence, 0}, tensor});
        }
      }
    }
  }
  std::map<std::pair<std::size_t, TensorId>, bool> used;
  for (const Pass& backward : backwards) {
    for (const Output& output : outputs) {
      const auto covered = std::ranges::find(backward.forwards, static_cast<std::int32_t>(output.forward));
      if (covered == backward.forwards.end()) continue;
      OutputGradReadyEvent ready = output.ready;
      ready.forward = static_cast<std::int32_t>(covered - backward.forwards.begin());
      const bool is_ready = std::ranges::find(backward.events, TraceEvent(ready)) != backward.events.end();
      bool& is_used = used[{output.forward, output.tensor}];
      is_used = is_used || is_ready;
    }
  }
  return used;
}

}  // namespace

std::optional<std::vector<TraceEvent>> WithInputsDone(const std::vector<TraceEvent>& plain,
                                                      const std::vector<TraceEvent>& marked) {
  const AnchoredEvents own = SplitAtAnchors(plain), other = SplitAtAnchors(marked);
  if (own.keys != other.keys) return std::nullopt;
  std::vector<TraceEvent> result;
  for (std::size_t i = 0; i < own.gaps.size(); ++i) {
    MergeGap(own.gaps[i], other.gaps[i], result);
    if (i < own.anchors.size()) result.push_back(*own.anchors[i]);
  }
  return result;
}

void MarkReleases(std::vector<Pass>& forwards, const std::vector<Pass>& unkept) {
  if (forwards.size() != unkept.size()) return;
  std::unordered_map<StorageId, StorageId> same;
  std::vector<std::vector<TraceEvent>> marked;
  for (std::size_t i = 0; i < forwards.size(); ++i) {
    auto events = WithReleases(forwards[i].events, unkept[i].events, same);
    if (!events) return;
    marked.push_back(std::move(*events));
  }
  for (std::size_t i = 0; i < forwards.size(); ++i) forwards[i].events = std::move(marked[i]);
}

void MarkTrainable(std::vector<Pass>& forwards, const std::vector<Pass>& trained_forwards,
                   const std::vector<Pass>& trained_backwards) {
  const auto same_shapes = [](const Pass& own, const Pass& other) {
    return std::ranges::equal(own.tensors, other.tensors,
                              [](const Tensor& a, const Tensor& b) { return a.shape == b.shape; });
  };
  if (!std::ranges::equal(forwards, trained_forwards, same_shapes))
    return;  // the model does something else then
  const auto in_loss = TensorsInLoss(trained_forwards, trained_backwards);
  for (std::size_t number = 0; number < forwards.size(); ++number) {
    for (std::size_t i = 0; i < forwards[number].tensors.size(); ++i) {
      Tensor& tensor = forwards[number].tensors[i];
      if (tensor.requires_grad) continue;
      tensor.may_require_grad = trained_forwards[number].tensors[i].requires_grad;
      if (const auto found = in_loss.find({number, static_cast<TensorId>(i)}); found != in_loss.end()) {
        tensor.in_loss = found->second;
      }
    }
  }
}

}  // namespace shardplan::executor

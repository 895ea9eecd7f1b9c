// SPDX-License-Identifier: Apache-2.0
#include "texts/memory_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan::cli {
namespace {

using Json = nlohmann::ordered_json;

double Gib(Bytes bytes) {
  return static_cast<double>(bytes.value) / static_cast<double>(std::int64_t{1} << 30);
}

Json Numbers(const std::vector<Bytes>& values) {
  Json numbers = Json::array();
  for (const Bytes value : values) numbers.push_back(value.value);
  return numbers;
}

std::string Compact(const Json& json) { return json.dump(-1, ' ', true, Json::error_handler_t::replace); }

// An object with a line for each member, and for each element of its arrays of objects.
std::string Lines(const Json& object) {
  std::string text = "{\n";
  for (const auto& [name, value] : object.items()) {
    if (text.size() > 2) text += ",\n";
    text += "  " + Compact(name) + ": ";
    if (!value.is_array() || value.empty() || !value.front().is_object()) {
      text += Compact(value);
      continue;
    }
    for (const Json& element : value)
      text += (&element == &value.front() ? "[\n    " : ",\n    ") + Compact(element);
    text += "\n  ]";
  }
  return text + "\n}\n";
}

std::string Row(std::string_view name, Bytes at_peak, Bytes between) {
  return fmt::format("{:<28} {:>18} {:>10.3f}   {:>18} {:>10.3f}\n", name, at_peak.value, Gib(at_peak),
                     between.value, Gib(between));
}

// Units that have the same, say the layers of a model.
bool Alike(const AliveMemory& a, const AliveMemory& b) {
  return a.unit >= 0 && b.unit >= 0 && a.category == b.category && a.bytes == b.bytes &&
         a.knob_bytes == b.knob_bytes && a.in_use == b.in_use;
}

// The first of `alike` units that have the same, with the bytes of all.
std::string AliveText(const Plan& plan, const AliveMemory& a, std::int64_t alike) {
  const Bytes bytes = a.bytes * alike;
  std::string unit = a.unit < 0 ? "-" : Printable(UnitText(plan, a.unit));
  if (alike > 1) unit += fmt::format(" and {} like it", alike - 1);
  std::string text = fmt::format("{:>16} {:>9.3f} GiB  {:<22} {:<16} {}\n", bytes.value, Gib(bytes),
                                 a.category, unit, Printable(a.name));
  text += fmt::format("{:>33}since {}; until {}\n", "", Printable(PointText(plan, a.since)),
                      a.until.step < 0 ? "the end" : Printable(PointText(plan, a.until)));
  if (a.knob.empty()) return text;
  const Bytes saved = a.knob_bytes * alike;
  text += fmt::format("{:>33}knob: {}{}\n", "", Printable(a.knob),
                      saved.value > 0 ? fmt::format(" (-{} bytes here)", saved.value) : "");
  return text;
}

}  // namespace

namespace {

// Between steps there are no gradients.
Bytes BesideBytes(const Plan& plan, bool at_peak) {
  const UnmanagedParameters& unmanaged = plan.unmanaged;
  return OutsideBytes(plan, plan.cluster) + unmanaged.parameter_bytes + unmanaged.state_bytes +
         (at_peak ? unmanaged.gradient_bytes : Bytes{});
}

std::string DeferredText(const Plan& plan, const DeferredGradients& deferred) {
  if (deferred.peak_bytes.value == 0) return {};
  return fmt::format(
      "gradients that wait for their reduction: at most {} bytes, {:.3f} GiB, of {} unit{}, since {}\n",
      deferred.peak_bytes.value, Gib(deferred.peak_bytes), deferred.units, deferred.units == 1 ? "" : "s",
      Printable(PointText(plan, deferred.at)));
}

std::string FitText(const Plan& plan, const DeviceFit& fit, std::string_view why) {
  if (!fit.budget_bytes) return {};
  const Device& device = plan.cluster.device;
  std::string text = fmt::format("{} {:.3f} GiB that the allocator may reserve",
                                 fit.Fits(true) ? "fits" : "does not fit", Gib(*fit.budget_bytes));
  if (device.memory_bytes.value > 0)
    text += fmt::format(" ({} of {:.3f} GiB)", Printable(device.name), Gib(device.memory_bytes));
  if (fit.Fits(true) && fit.cache_releases > 0)
    text += fmt::format("; {} requests release the cache, and each synchronises", fit.cache_releases);
  if (!why.empty()) text += fmt::format("; no number of ranks does: {}", why);
  return text + "\n";
}

}  // namespace

std::string MemoryTable(const Plan& plan, const MemoryRows& rows, const DeferredGradients& deferred,
                        const DeviceFit& fit, std::string_view why) {
  const MemoryPeak& peak = rows.peak;
  const MemoryRow& end = rows.rows.back();
  std::string text = fmt::format("{:<28} {:>18} {:>10}   {:>18} {:>10}\n", "category", "at the peak, bytes",
                                 "GiB", "between steps", "GiB");
  for (std::size_t c = 0; c < MemoryCategories().size(); ++c) {
    if (peak.by_category[c].value == 0 && end.by_category[c].value == 0) continue;
    text += Row(MemoryCategories()[c], peak.by_category[c], end.by_category[c]);
  }
  text += Row("total", peak.total_bytes, end.total_bytes);
  text += fmt::format("peak in the {}", Printable(peak.phase));
  if (peak.unit >= 0) text += fmt::format(", {}", Printable(UnitText(plan, peak.unit)));
  if (!peak.allocation.empty()) text += fmt::format(", at the allocation of {}", Printable(peak.allocation));
  text += "\n" + DeferredText(plan, deferred) + "\noutside of it\n";
  const Device& device = plan.cluster.device;
  if (device.context_bytes.value > 0) text += Row("cuda_context", device.context_bytes, device.context_bytes);
  for (const Communicator& communicator : plan.communicators) {
    const Bytes bytes = NcclBufferBytes(communicator);
    if (bytes.value > 0) {
      text += Row(fmt::format("nccl_buffers {} ({})", Printable(communicator.name), communicator.size), bytes,
                  bytes);
    }
  }
  const UnmanagedParameters& unmanaged = plan.unmanaged;
  if (unmanaged.parameter_bytes.value > 0) {
    text += Row("parameters of no unit", unmanaged.parameter_bytes, unmanaged.parameter_bytes);
    text += Row("  their gradients, at most", unmanaged.gradient_bytes, {});
    text += Row("  their optimizer states", unmanaged.state_bytes, unmanaged.state_bytes);
  }
  text += Row("total and outside", peak.total_bytes + BesideBytes(plan, true),
              end.total_bytes + BesideBytes(plan, false));
  if (fit.budget_bytes && !fit.out_of_memory) {
    text += Row("reserved and outside", fit.reserved_bytes + BesideBytes(plan, true),
                fit.reserved_bytes + BesideBytes(plan, false));
  }
  text += FitText(plan, fit, why);
  return text;
}

namespace {

Json Statistics(const AllocatorStats& stats) {
  return {{"requested_bytes", stats.requested_bytes.value},
          {"allocated_bytes", stats.allocated_bytes.value},
          {"active_bytes", stats.active_bytes.value},
          {"reserved_bytes", stats.reserved_bytes.value},
          {"segments", stats.segments}};
}

// Peaks are of everything, calls of the driver from the first step on.
Json AllocatorEnd(const SteadyReserved& allocator) {
  const AllocatorStats& end = allocator.end;
  return {{"peak_allocated_bytes", end.peak_allocated_bytes.value},
          {"peak_active_bytes", end.peak_active_bytes.value},
          {"peak_reserved_bytes", end.peak_reserved_bytes.value},
          {"device_allocs", end.device_allocs},
          {"device_frees", end.device_frees},
          {"retries", end.retries},
          {"out_of_memory", allocator.reserved.out_of_memory}};
}

}  // namespace

std::string RowsJson(const Plan& plan, const MemoryRows& rows, const DeferredGradients& deferred,
                     const SteadyReserved* allocator) {
  const MemoryPeak& peak = rows.peak;
  Json json = {{"categories", MemoryCategories()},
               {"peak",
                {{"total_bytes", peak.total_bytes.value},
                 {"by_category", Numbers(peak.by_category)},
                 {"phase", peak.phase},
                 {"unit", UnitText(plan, peak.unit)},
                 {"allocation", peak.allocation}}},
               {"rows", Json::array()}};
  if (deferred.peak_bytes.value > 0) {
    json["deferred_gradients"] = {{"peak_bytes", deferred.peak_bytes.value},
                                  {"units", deferred.units},
                                  {"at", PointText(plan, deferred.at)}};
  }
  for (std::size_t r = 0; r < rows.rows.size(); ++r) {
    const MemoryRow& row = rows.rows[r];
    Json entry = {{"event", row.event},
                  {"unit", UnitText(plan, row.unit)},
                  {"microbatch", row.microbatch},
                  {"total_bytes", row.total_bytes.value},
                  {"by_category", Numbers(row.by_category)}};
    if (allocator != nullptr && r < allocator->at_rows.size()) {
      entry["allocator"] = Statistics(allocator->at_rows[r]);
    }
    json["rows"].push_back(std::move(entry));
  }
  if (allocator != nullptr) json["allocator"] = AllocatorEnd(*allocator);
  return Lines(json);
}

std::string ReservedTable(const Plan& plan, const ReservedMemory& reserved, const DeviceFit& fit,
                          Bytes at_once_bytes, const std::vector<SettingsTrial>& trials) {
  std::string text;
  if (reserved.out_of_memory) {
    text =
        fmt::format("\nreserved: out of memory at {}, with {} bytes reserved\n",
                    Printable(PointText(plan, reserved.out_of_memory_at)), reserved.end_reserved_bytes.value);
    text += fmt::format("{:<28} {:>18} {:>10.3f}\n", "reserved without a limit", fit.reserved_bytes.value,
                        Gib(fit.reserved_bytes));
  } else {
    text = fmt::format("\n{:<28} {:>18} {:>10.3f}\n", "reserved at its peak",
                       reserved.peak_reserved_bytes.value, Gib(reserved.peak_reserved_bytes));
    text += fmt::format("{:<28} {:>18} {:>10.3f}   {:.1f} % of it is not allocated\n", "allocated then",
                        reserved.allocated_at_peak_bytes.value, Gib(reserved.allocated_at_peak_bytes),
                        static_cast<double>(reserved.FragmentationPpm()) / 1e4);
    text += fmt::format("{:<28} {:>18} {:>10.3f}\n", "... device never behind", at_once_bytes.value,
                        Gib(at_once_bytes));
    text += fmt::format("first reserved at {}; {} requests released the cache\n",
                        Printable(PointText(plan, reserved.peak_at)), reserved.retries);
  }
  if (trials.empty()) return text;
  text += fmt::format("\n{:<52} {:>18} {:>18} {:>14}\n", "with PYTORCH_CUDA_ALLOC_CONF", "reserved, bytes",
                      "saved", "cache released");
  for (const SettingsTrial& trial : trials) {
    const std::int64_t saved = (reserved.peak_reserved_bytes - trial.peak_reserved_bytes).value;
    const std::string saves = reserved.out_of_memory ? "it fits" : fmt::format("{}", saved);
    text += trial.out_of_memory ? fmt::format("{:<52} {:>18}\n", trial.text, "out of memory")
                                : fmt::format("{:<52} {:>18} {:>18} {:>14}\n", trial.text,
                                              trial.peak_reserved_bytes.value, saves, trial.retries);
  }
  return text;
}

std::string ExplanationTable(const Plan& plan, const MemoryExplanation& explanation, std::size_t count) {
  std::string text = fmt::format("peak: {} bytes ({:.3f} GiB) in {}", explanation.peak_bytes.value,
                                 Gib(explanation.peak_bytes), Printable(explanation.peak_text));
  if (!explanation.allocation.empty())
    text += fmt::format(", at the allocation of {}", Printable(explanation.allocation));
  text += "\n\nalive there, largest first\n";
  const std::vector<AliveMemory>& alive = explanation.alive;
  struct Group {
    std::size_t first, units;
  };
  std::vector<Group> groups;
  for (std::size_t i = 0; i < alive.size(); i += groups.back().units) {
    std::size_t alike = 1;
    while (i + alike < alive.size() && Alike(alive[i], alive[i + alike])) ++alike;
    groups.push_back({i, alike});
  }
  std::ranges::stable_sort(groups, std::greater<>(), [&](const Group& group) {
    return alive[group.first].bytes * static_cast<std::int64_t>(group.units);
  });
  for (std::size_t g = 0; g < std::min(count, groups.size()); ++g) {
    text += AliveText(plan, alive[groups[g].first], static_cast<std::int64_t>(groups[g].units));
  }
  if (groups.size() > count) text += fmt::format("{:>33}and {} more (--all)\n", "", groups.size() - count);
  text +=
      fmt::format("\n{:<28} {:>18} {:>18}   {}\n", "unit", "at the peak, bytes", "its most, bytes", "then");
  for (const UnitMemory& unit : explanation.units) {
    if (unit.highest_bytes.value == 0) continue;
    text += fmt::format(
        "{:<28} {:>18} {:>18}   {}\n", unit.unit < 0 ? "(none)" : Printable(UnitText(plan, unit.unit)),
        unit.at_peak_bytes.value, unit.highest_bytes.value, Printable(PointText(plan, unit.highest_at)));
  }
  return text;
}

std::string ExplanationJson(const Plan& plan, const MemoryExplanation& explanation) {
  const auto unit_name = [&](UnitId unit) { return unit < 0 ? Json() : Json(UnitText(plan, unit)); };
  Json json = {{"peak_bytes", explanation.peak_bytes.value},
               {"peak_at", explanation.peak_text},
               {"allocation", explanation.allocation},
               {"alive", Json::array()},
               {"units", Json::array()}};
  for (const AliveMemory& a : explanation.alive) {
    json["alive"].push_back({{"category", a.category},
                             {"unit", unit_name(a.unit)},
                             {"name", a.name},
                             {"bytes", a.bytes.value},
                             {"blocks", a.blocks},
                             {"since", PointText(plan, a.since)},
                             {"until", a.until.step < 0 ? Json() : Json(PointText(plan, a.until))},
                             {"in_use", a.in_use},
                             {"knob", a.knob},
                             {"knob_bytes", a.knob_bytes.value}});
  }
  for (const UnitMemory& unit : explanation.units) {
    json["units"].push_back({{"unit", unit_name(unit.unit)},
                             {"at_peak_bytes", unit.at_peak_bytes.value},
                             {"highest_bytes", unit.highest_bytes.value},
                             {"highest_at", PointText(plan, unit.highest_at)}});
  }
  return Lines(json);
}

}  // namespace shardplan::cli

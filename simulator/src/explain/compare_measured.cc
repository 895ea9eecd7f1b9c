// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "report/comparison.h"
#include "shardplan/simulator/measurements.h"

namespace shardplan {
namespace {

constexpr const char* kSegment = "segment";      // all operators between two triggers
constexpr const char* kAllocated = "allocated";  // a measured peak that nobody divided into categories

std::unexpected<Error> Bad(std::string pointer, std::string message, std::string found,
                           std::string expected) {
  return std::unexpected(Error{ErrorCode::kBadInput, std::move(message), "", std::move(pointer),
                               std::move(found), std::move(expected)});
}

// In the order of the first list that has them; what only the second has comes behind.
std::vector<TimePair> PairActivities(const Report& predicted, const Report& measured) {
  std::vector<TimePair> pairs;
  for (const ActivityReport& entry : predicted.activities)
    pairs.push_back({entry.activity, entry.time_ns, {}});
  for (const ActivityReport& entry : measured.activities) {
    const auto known = std::ranges::find(pairs, entry.activity, &TimePair::what);
    known == pairs.end() ? pairs.push_back({entry.activity, {}, entry.time_ns})
                         : static_cast<void>(known->measured_ns += entry.time_ns);
  }
  return pairs;
}

std::vector<KernelPair> PairKernels(const Report& predicted, const Report& measured) {
  // A plan that measured itself knows segments as wholes.
  const auto whole = [&](const std::string& phase) {
    return std::ranges::any_of(measured.operators, [&](const OperatorReport& entry) {
      return entry.kind == kSegment && entry.phase == phase;
    });
  };
  std::map<std::pair<std::string, std::string>, KernelPair> by_name;
  const auto pair_of = [&](const OperatorReport& entry) -> KernelPair& {
    const std::string kind = whole(entry.phase) ? kSegment : entry.kind;
    return by_name.try_emplace({kind, entry.phase}, kind, entry.phase).first->second;
  };
  for (const OperatorReport& entry : predicted.operators) {
    pair_of(entry).predicted_count += entry.count;
    pair_of(entry).predicted_ns += entry.busy_ns;
  }
  for (const OperatorReport& entry : measured.operators) {
    pair_of(entry).measured_count += entry.count;
    pair_of(entry).measured_ns += entry.busy_ns;
  }
  std::vector<KernelPair> pairs;
  for (auto& [name, pair] : by_name) pairs.push_back(std::move(pair));
  return pairs;
}

std::vector<CollectivePair> PairCollectives(const Report& predicted, const Report& measured) {
  std::map<std::pair<std::string, std::string>, CollectivePair> by_name;
  const auto pair_of = [&](const CollectiveReport& entry) -> CollectivePair& {
    return by_name.try_emplace({entry.kind, entry.communicator}, entry.kind, entry.communicator)
        .first->second;
  };
  for (const CollectiveReport& entry : predicted.collectives) {
    CollectivePair& pair = pair_of(entry);
    pair.predicted_count += entry.count;
    pair.predicted_bytes += entry.full_tensor_bytes;
    pair.predicted_ns += entry.busy_ns;
    pair.predicted_exposed_ns += entry.exposed_ns;
  }
  for (const CollectiveReport& entry : measured.collectives) {
    CollectivePair& pair = pair_of(entry);
    pair.measured_count += entry.count;
    pair.measured_bytes += entry.full_tensor_bytes;
    pair.measured_ns += entry.busy_ns;
    pair.measured_exposed_ns += entry.exposed_ns;
  }
  std::vector<CollectivePair> pairs;
  for (auto& [name, pair] : by_name) pairs.push_back(std::move(pair));
  return pairs;
}

std::vector<TimePair> PairUnits(const Report& predicted, const Report& measured) {
  std::vector<TimePair> pairs;
  for (const UnitReport& unit : predicted.units) {
    const auto found = std::ranges::find(measured.units, unit.unit, &UnitReport::unit);
    if (found == measured.units.end()) continue;
    pairs.push_back({"forward " + unit.unit, unit.forward_ns, found->forward_ns});
    pairs.push_back({"backward " + unit.unit, unit.backward_ns, found->backward_ns});
  }
  return pairs;
}

// Pairs the memory that the allocator follows: context and NCCL's buffers are outside.
std::vector<BytesPair> PairMemory(const MemoryReport& predicted, const MemoryReport& measured) {
  if (measured.peak_bytes.value == 0) return {};
  const bool divided = std::ranges::none_of(
      measured.peak_by_category, [](const CategoryBytes& entry) { return entry.category == kAllocated; });
  if (!divided) return {{kAllocated, predicted.peak_bytes, measured.peak_bytes}};
  std::map<std::string, BytesPair> by_category;
  const auto pair_of = [&](const std::string& category) -> BytesPair& {
    return by_category.try_emplace(category, category).first->second;
  };
  const auto inside = [](const CategoryBytes& entry) { return !internal::OutsideAllocated(entry.category); };
  for (const CategoryBytes& entry : predicted.peak_by_category) {
    if (inside(entry)) pair_of(entry.category).predicted_bytes += entry.size_bytes;
  }
  for (const CategoryBytes& entry : measured.peak_by_category) {
    if (inside(entry)) pair_of(entry.category).measured_bytes += entry.size_bytes;
  }
  std::vector<BytesPair> pairs;
  for (auto& [category, pair] : by_category) pairs.push_back(std::move(pair));
  return pairs;
}

std::vector<std::string> Remarks(const Report& predicted, const Report& measured) {
  std::vector<std::string> remarks;
  const auto differ = [&](const char* what, const std::string& of_plan, const std::string& of_report) {
    if (of_plan != of_report)
      remarks.push_back(fmt::format("{}: the plan has {}, the measured step {}", what, of_plan, of_report));
  };
  differ("model", predicted.model, measured.model);
  differ("ranks", std::to_string(predicted.world_size), std::to_string(measured.world_size));
  if (!measured.plan_digest.empty() && measured.plan_digest != predicted.plan_digest)
    remarks.push_back("the measured step was read with another plan than this one");
  const MeasuredReport& m = measured.measured;
  if (m.collectives_beside_plan > 0 || m.collectives_missing > 0) {
    remarks.push_back(fmt::format("collectives: {} that the plan has not, {} of the plan are missing",
                                  m.collectives_beside_plan, m.collectives_missing));
  }
  if (m.unassigned_kernels > 0) {
    remarks.push_back(fmt::format("{} kernels ({:.3f} ms) are in no unit of the plan", m.unassigned_kernels,
                                  static_cast<double>(m.unassigned_ns.value) / 1e6));
  }
  if (measured.memory.peak_bytes.value == 0) remarks.push_back("memory was not measured");
  return remarks;
}

}  // namespace

Result<MeasuredComparison> CompareMeasured(const Report& predicted, const Report& measured) {
  if (measured.measured.device.empty())
    return Bad("/measured", "nothing is measured here", "a simulated report",
               "one of import-profile or of a training that measured itself");
  if (measured.activities.empty())
    return Bad("/activities", "the report does not say what the device did", "none",
               "times that add up to step_ns");
  Nanoseconds sum;
  for (const ActivityReport& entry : measured.activities) sum += entry.time_ns;
  if (sum != measured.step_ns)
    return Bad("/activities", "the activities do not add up to the step", std::to_string(sum.value),
               std::to_string(measured.step_ns.value));
  return MeasuredComparison{
      .predicted_ns = predicted.step_ns,
      .measured_ns = measured.step_ns,
      .activities = PairActivities(predicted, measured),
      .kernels = PairKernels(predicted, measured),
      .collectives = PairCollectives(predicted, measured),
      .units = PairUnits(predicted, measured),
      .memory = PairMemory(predicted.memory, measured.memory),
      .reserved = {"reserved", predicted.memory.reserved_bytes, measured.memory.reserved_bytes},
      .remarks = Remarks(predicted, measured)};
}

}  // namespace shardplan

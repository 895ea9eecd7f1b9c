// SPDX-License-Identifier: Apache-2.0
// The copies between two layouts: every placement once, and the senders balanced over all tensors.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/layouts/part_boxes.h"
#include "shardplan/checkpoints/reshard.h"

namespace shardplan {
namespace {

// If several ranks hold the same, a group is planned in so many parts that each holder sends some of it.
constexpr std::int64_t kCopiesOfSender = 4;

struct TensorsAlike {
  std::vector<std::string> names;
  const StateTensor* source = nullptr;
  const StateTensor* target = nullptr;
};

// Bytes that a part of the source and one of the target share.
struct SharedBytes {
  const HeldPart* source = nullptr;
  const HeldPart* target = nullptr;
  ReshardCopy copy;  // without ranks
};

class ReshardPlanner {
 public:
  ReshardPlanner(const StateLayout& source, const StateLayout& target, const ReshardOptions& options)
      : options_(options), sent_(static_cast<std::size_t>(RanksOf(source)), 0) {
    plan_.source = source;
    plan_.target = target;
    plan_.ranks_per_node = options.ranks_per_node;
    plan_.budget_bytes = options.budget_bytes;
  }

  Result<ReshardPlan> Run() {
    if (Status status = FindTensors(); !status) return std::unexpected(status.error());
    for (const TensorsAlike& alike : all_) Add(alike);
    return std::move(plan_);
  }

 private:
  // Tensors of both layouts, by their placements.
  Status FindTensors() {
    std::unordered_map<std::string_view, const StateTensor*> sources;
    for (const StateTensor& tensor : plan_.source.tensors) sources.emplace(tensor.name, &tensor);
    if (options_.lenient)
      std::erase_if(plan_.target.tensors,
                    [&](const StateTensor& tensor) { return !sources.contains(tensor.name); });
    std::unordered_map<std::string, std::size_t> known;
    for (std::size_t t = 0; t < plan_.target.tensors.size(); ++t) {
      const StateTensor& target = plan_.target.tensors[t];
      const auto source = sources.find(target.name);
      const std::string at = fmt::format("/target/tensors/{}", t);
      if (source == sources.end())
        return MakeInputError(at, "the source has no tensor of that name", target.name);
      if (Status status = CheckSame(*source->second, target, at); !status) return status;
      const std::string key =
          PlacementKey(plan_.source, *source->second) + "\n" + PlacementKey(plan_.target, target);
      const auto [found, is_new] = known.try_emplace(key, all_.size());
      if (is_new) all_.push_back({{}, source->second, &target});
      all_[found->second].names.push_back(target.name);
    }
    return {};
  }

  static Status CheckSame(const StateTensor& source, const StateTensor& target, const std::string& at) {
    if (source.shape != target.shape)
      return MakeInputError(at + "/shape", fmt::format("{} has another shape in the source", target.name),
                            fmt::format("[{}]", fmt::join(target.shape, ", ")),
                            fmt::format("[{}]", fmt::join(source.shape, ", ")));
    if (source.dtype != target.dtype)
      return MakeInputError(at + "/dtype", fmt::format("{} has another dtype in the source", target.name),
                            std::string(Name(target.dtype)), std::string(Name(source.dtype)));
    return {};
  }

  void Add(const TensorsAlike& alike) {
    const std::vector<HeldPart> sources = HeldPartsOf(plan_.source, *alike.source);
    const std::vector<HeldPart> targets = HeldPartsOf(plan_.target, *alike.target);
    const std::size_t dims = std::max<std::size_t>(1, alike.target->shape.size());
    const BoxIndex index(sources, dims);
    std::vector<SharedBytes> shared;
    std::int64_t holders = 1;
    std::int64_t to_send = 0;
    for (const HeldPart& target : targets) {
      for (const PartBox& box : target.boxes) {
        index.ForEachNear(box, [&](const BoxIndex::Entry& entry) {
          const HeldPart& source = sources[entry.part];
          SharedBytes bytes{&source, &target, {}};
          if (!Meet(source.boxes[entry.box], box, dims, SizeBytes(alike.target->dtype), bytes.copy)) return;
          holders = std::max(holders, std::ssize(source.ranks));
          to_send += std::ssize(target.ranks);
          shared.push_back(std::move(bytes));
        });
      }
    }
    const std::int64_t tensors = std::ssize(alike.names);
    const std::int64_t wanted = holders * kCopiesOfSender / std::max<std::int64_t>(1, to_send);
    const std::int64_t parts = std::clamp<std::int64_t>(holders == 1 ? 1 : wanted, 1, tensors);
    for (std::int64_t p = 0; p < parts; ++p) {
      ReshardGroup group;
      group.tensors.assign(alike.names.begin() + tensors * p / parts,
                           alike.names.begin() + tensors * (p + 1) / parts);
      senders_.clear();
      for (const SharedBytes& bytes : shared) AddCopies(bytes, std::ssize(group.tensors), group.copies);
      Join(group.copies);
      plan_.groups.push_back(std::move(group));
    }
  }

  // To every rank that holds the part in the target.
  void AddCopies(const SharedBytes& bytes, std::int64_t tensors, std::vector<ReshardCopy>& copies) {
    for (const std::int64_t target : bytes.target->ranks) {
      ReshardCopy copy = bytes.copy;
      copy.target_rank = target;
      const auto [sender, is_new] = senders_.try_emplace({bytes.source, target});
      if (is_new) sender->second = SenderFor(target, bytes.source->ranks);
      copy.source_rank = sender->second;
      if (copy.source_rank != target)
        sent_[static_cast<std::size_t>(copy.source_rank)] += MovedBytes(copy).value * tensors;
      copies.push_back(std::move(copy));
    }
  }

  // Runs that lie side by side on both ranks are one copy.
  static void Join(std::vector<ReshardCopy>& copies) {
    std::ranges::sort(copies, {}, [](const ReshardCopy& copy) {
      return std::tuple(copy.target_rank, copy.target_offset, copy.source_rank);
    });
    std::vector<ReshardCopy> joined;
    for (ReshardCopy& copy : copies) {
      if (!joined.empty() && GoesOn(joined.back(), copy)) {
        joined.back().run_bytes += copy.run_bytes;
      } else {
        joined.push_back(std::move(copy));
      }
    }
    copies = std::move(joined);
  }
  static bool GoesOn(const ReshardCopy& before, const ReshardCopy& copy) {
    return before.loops.empty() && copy.loops.empty() && before.source_rank == copy.source_rank &&
           before.target_rank == copy.target_rank &&
           before.source_offset + before.run_bytes.value == copy.source_offset &&
           before.target_offset + before.run_bytes.value == copy.target_offset;
  }

  std::int64_t SenderFor(std::int64_t target, const std::vector<std::int64_t>& holders) const {
    if (holders.size() == 1 || std::ranges::binary_search(holders, target))
      return holders.size() == 1 ? holders.front() : target;
    const std::int64_t node = target / options_.ranks_per_node;
    const auto first = std::ranges::lower_bound(holders, node * options_.ranks_per_node);
    const auto last = std::ranges::lower_bound(holders, (node + 1) * options_.ranks_per_node);
    const bool in_node = first != last;
    return *std::min_element(in_node ? first : holders.begin(), in_node ? last : holders.end(),
                             [&](std::int64_t a, std::int64_t b) {
                               return sent_[static_cast<std::size_t>(a)] < sent_[static_cast<std::size_t>(b)];
                             });
  }

  const ReshardOptions& options_;
  ReshardPlan plan_;
  std::vector<TensorsAlike> all_;
  std::vector<std::int64_t> sent_;  // bytes by rank of the source
  // By part and rank of the group at hand: the sender.
  std::map<std::pair<const HeldPart*, std::int64_t>, std::int64_t> senders_;
};

}  // namespace

Result<ReshardPlan> PlanReshard(const StateLayout& source, const StateLayout& target,
                                const ReshardOptions& options) {
  if (Status status = CheckStateLayout(source, "/source"); !status) return std::unexpected(status.error());
  if (Status status = CheckStateLayout(target, "/target"); !status) return std::unexpected(status.error());
  if (options.budget_bytes.value < kLeastReshardBudget || options.ranks_per_node < 1)
    return MakeError(ErrorCode::kUsage,
                     fmt::format("the budget of a rank is at least {} bytes, a node has at least one rank",
                                 kLeastReshardBudget));
  return ReshardPlanner(source, target, options).Run();
}

}  // namespace shardplan

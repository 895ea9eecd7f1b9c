// SPDX-License-Identifier: Apache-2.0
// Proves a plan of copies run by run: it looks at where a run's bytes come from and go to, and shares nothing
// with the planner but what a layout means (PartOf).
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "json/fields.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

constexpr std::size_t kMostViolations = 100;

// The element of the whole tensor that lies at `at` of a part (elements from the part's first), and how many
// behind it lie side by side in the whole tensor, too.
struct ElementRun {
  std::int64_t element = 0;
  std::int64_t side_by_side = 0;
};
ElementRun ElementAt(const std::vector<std::int64_t>& shape, const LocalPart& part, std::int64_t at) {
  ElementRun run;
  std::int64_t index = part.first + at;
  std::int64_t stride = 1;
  for (std::size_t d = part.size.size(); d-- > 0;) {
    const std::int64_t here = index % part.size[d];
    if (d + 1 == part.size.size()) run.side_by_side = part.size[d] - here;
    index /= part.size[d];
    run.element += (part.low[d] + here) * stride;
    stride *= shape.empty() ? 1 : shape[d];
  }
  return run;
}

struct TargetRun {
  std::int64_t begin = 0, end = 0;
  std::size_t copy = 0;
};

// One tensor under the copies of its group.
class TensorProof {
 public:
  TensorProof(const ReshardPlan& plan, const StateTensor& source, const StateTensor& target)
      : plan_(plan), source_(source), target_(target), element_bytes_(SizeBytes(target.dtype)) {}

  // The first fault, and the copy at which it is; no copy: the whole group.
  struct Fault {
    std::optional<std::size_t> copy;
    std::string message;
  };
  std::optional<Fault> Run(const std::vector<ReshardCopy>& copies) {
    std::vector<std::vector<std::size_t>> of_rank(static_cast<std::size_t>(RanksOf(plan_.target)));
    for (std::size_t c = 0; c < copies.size(); ++c) {
      if (std::optional<std::string> wrong = CheckRanks(copies[c])) return Fault{c, *wrong};
      of_rank[static_cast<std::size_t>(copies[c].target_rank)].push_back(c);
    }
    for (std::size_t rank = 0; rank < of_rank.size(); ++rank) {
      target_part_ = PartOf(plan_.target, target_, static_cast<std::int64_t>(rank));
      runs_.clear();
      for (const std::size_t c : of_rank[rank]) {
        if (std::optional<std::string> wrong = CheckCopy(copies[c], c)) return Fault{c, *wrong};
      }
      if (std::optional<Fault> wrong = CheckCovered(rank)) return wrong;
    }
    return std::nullopt;
  }

 private:
  std::optional<std::string> CheckRanks(const ReshardCopy& copy) const {
    if (copy.source_rank < 0 || copy.source_rank >= RanksOf(plan_.source))
      return fmt::format("the source has no rank {}", copy.source_rank);
    if (copy.target_rank < 0 || copy.target_rank >= RanksOf(plan_.target))
      return fmt::format("the target has no rank {}", copy.target_rank);
    return std::nullopt;
  }

  const LocalPart& SourcePart(std::int64_t rank) {
    const auto [found, is_new] = source_parts_.try_emplace(rank);
    if (is_new) found->second = PartOf(plan_.source, source_, rank);
    return found->second;
  }

  std::optional<std::string> CheckCopy(const ReshardCopy& copy, std::size_t index) {
    const LocalPart& source = SourcePart(copy.source_rank);
    const std::int64_t most = target_part_.count * element_bytes_;
    std::int64_t bytes = copy.run_bytes.value;
    if (bytes < 1) return "a copy of no bytes";
    for (const CopyLoop& loop : copy.loops) {
      if (loop.count < 1 || bytes > most / loop.count)
        return fmt::format("a copy of more bytes than rank {} holds ({})", copy.target_rank, most);
      bytes *= loop.count;
    }
    if (bytes > most)
      return fmt::format("a copy of more bytes than rank {} holds ({})", copy.target_rank, most);
    const std::int64_t source_first = source.offset * element_bytes_;
    const std::int64_t target_first = target_part_.offset * element_bytes_;
    std::vector<std::int64_t> at(copy.loops.size(), 0);
    while (true) {
      std::int64_t from = copy.source_offset - source_first;
      std::int64_t to = copy.target_offset - target_first;
      for (std::size_t l = 0; l < at.size(); ++l) {
        if (copy.loops[l].source_stride > kMaxExact / copy.loops[l].count ||
            copy.loops[l].target_stride > kMaxExact / copy.loops[l].count)
          return "a stride that leads out of every storage";
        from += at[l] * copy.loops[l].source_stride;
        to += at[l] * copy.loops[l].target_stride;
      }
      if (std::optional<std::string> wrong = CheckRun(copy, source, from, to)) return wrong;
      runs_.push_back({to, to + copy.run_bytes.value, index});
      std::size_t l = at.size();
      while (l > 0 && ++at[l - 1] == copy.loops[l - 1].count) at[--l] = 0;
      if (l == 0) return std::nullopt;
    }
  }

  // `from` and `to` count from what the ranks hold of this tensor.
  std::optional<std::string> CheckRun(const ReshardCopy& copy, const LocalPart& source, std::int64_t from,
                                      std::int64_t to) const {
    const std::int64_t length = copy.run_bytes.value;
    if (from < 0 || length > source.count * element_bytes_ - from)
      return fmt::format("bytes [{}, {}) of rank {}'s {} bytes of the tensor are read", from, from + length,
                         copy.source_rank, source.count * element_bytes_);
    if (to < 0 || length > target_part_.count * element_bytes_ - to)
      return fmt::format("bytes [{}, {}) of rank {}'s {} bytes of the tensor are written", to, to + length,
                         copy.target_rank, target_part_.count * element_bytes_);
    std::int64_t done = 0;
    while (done < length) {
      const ElementRun read = ElementAt(source_.shape, source, (from + done) / element_bytes_);
      const ElementRun written = ElementAt(target_.shape, target_part_, (to + done) / element_bytes_);
      const std::int64_t within_read = (from + done) % element_bytes_;
      const std::int64_t within_written = (to + done) % element_bytes_;
      if (read.element != written.element || within_read != within_written)
        return fmt::format("element {} of rank {} is written where rank {} holds element {}", read.element,
                           copy.source_rank, copy.target_rank, written.element);
      done += std::min(read.side_by_side, written.side_by_side) * element_bytes_ - within_read;
    }
    return std::nullopt;
  }

  std::optional<Fault> CheckCovered(std::size_t rank) {
    std::ranges::sort(runs_, {}, &TargetRun::begin);
    std::int64_t written = 0;
    for (const TargetRun& run : runs_) {
      if (run.begin > written)
        return Fault{std::nullopt, fmt::format("bytes [{}, {}) of the tensor on rank {} are not written",
                                               written, run.begin, rank)};
      if (run.begin < written)
        return Fault{run.copy,
                     fmt::format("byte {} of the tensor on rank {} is written twice", run.begin, rank)};
      written = run.end;
    }
    const std::int64_t all = target_part_.count * element_bytes_;
    if (written == all) return std::nullopt;
    return Fault{std::nullopt,
                 fmt::format("bytes [{}, {}) of the tensor on rank {} are not written", written, all, rank)};
  }

  const ReshardPlan& plan_;
  const StateTensor& source_;
  const StateTensor& target_;
  const std::int64_t element_bytes_;
  LocalPart target_part_;
  std::vector<TargetRun> runs_;
  std::unordered_map<std::int64_t, LocalPart> source_parts_;
};

class ReshardProof {
 public:
  explicit ReshardProof(const ReshardPlan& plan) : plan_(plan) {}

  std::vector<ReshardViolation> Run() {
    CheckLayout(plan_.source, "/source");
    CheckLayout(plan_.target, "/target");
    if (plan_.budget_bytes.value < kLeastReshardBudget)
      Complain("/budget_bytes", fmt::format("a budget of less than {} bytes", kLeastReshardBudget));
    if (!violations_.empty()) return violations_;
    for (const StateTensor& tensor : plan_.source.tensors) sources_.emplace(tensor.name, &tensor);
    for (const StateTensor& tensor : plan_.target.tensors) targets_.emplace(tensor.name, &tensor);
    for (std::size_t g = 0; g < plan_.groups.size() && violations_.size() < kMostViolations; ++g)
      CheckGroup(g);
    for (std::size_t t = 0; t < plan_.target.tensors.size() && violations_.size() < kMostViolations; ++t) {
      if (!moved_.contains(plan_.target.tensors[t].name))
        Complain(fmt::format("/target/tensors/{}", t),
                 fmt::format("no group copies {}", Printable(plan_.target.tensors[t].name)));
    }
    return violations_;
  }

 private:
  void Complain(std::string pointer, std::string message) {
    violations_.push_back({std::move(pointer), std::move(message)});
  }
  void CheckLayout(const StateLayout& layout, const std::string& pointer) {
    const Status status = CheckStateLayout(layout, pointer);
    if (!status)
      Complain(status.error().pointer, ToString({.message = status.error().message,
                                                 .found = status.error().found,
                                                 .expected = status.error().expected}));
  }

  void CheckGroup(std::size_t g) {
    const ReshardGroup& group = plan_.groups[g];
    std::set<std::string> proved;  // placements
    for (std::size_t t = 0; t < group.tensors.size() && violations_.size() < kMostViolations; ++t) {
      const std::string at = fmt::format("/groups/{}/tensors/{}", g, t);
      const std::string name = Printable(group.tensors[t]);
      const auto source = sources_.find(group.tensors[t]);
      const auto target = targets_.find(group.tensors[t]);
      if (source == sources_.end() || target == targets_.end()) {
        Complain(
            at, fmt::format("the {} has no tensor {}", source == sources_.end() ? "source" : "target", name));
        continue;
      }
      if (!moved_.insert(group.tensors[t]).second)
        Complain(at, fmt::format("{} is copied a second time", name));
      if (source->second->shape != target->second->shape || source->second->dtype != target->second->dtype) {
        Complain(at, fmt::format("{} has another shape or dtype in the source than in the target", name));
        continue;
      }
      const std::string key =
          PlacementKey(plan_.source, *source->second) + "\n" + PlacementKey(plan_.target, *target->second);
      if (!proved.insert(key).second) continue;
      const auto fault = TensorProof(plan_, *source->second, *target->second).Run(group.copies);
      if (!fault) continue;
      Complain(fault->copy ? fmt::format("/groups/{}/copies/{}", g, *fault->copy) : at,
               fmt::format("{}: {}", name, fault->message));
    }
  }

  const ReshardPlan& plan_;
  std::map<std::string_view, const StateTensor*> sources_, targets_;
  std::set<std::string_view> moved_;
  std::vector<ReshardViolation> violations_;
};

}  // namespace

std::vector<ReshardViolation> VerifyReshard(const ReshardPlan& plan) { return ReshardProof(plan).Run(); }

}  // namespace shardplan

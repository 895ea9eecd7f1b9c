// SPDX-License-Identifier: Apache-2.0
#include "bound/recomputed_stretches.h"

#include <algorithm>
#include <utility>

namespace shardplan::internal {
namespace {

// A stretch is a 48th of the pass at least, and not much longer: at other cuts than those that all of it has
// in common it costs nothing.
constexpr std::int64_t kStretches = 48;
constexpr std::int64_t kLeastOperators = 8, kMostOperators = 256;
// Tensors with so little of the bytes do not decide where a stretch is looked at.
constexpr std::int64_t kFew = 10;

// [Note: stretches]
// Choices at a cut are independent where they concern different operators. So the sum over stretches of what
// the cheapest choice in each costs is a lower bound, as long as each operator is in one of them. Tensors
// made outside of a stretch are taken to be there when an operator of it runs again. The least is lost that
// way if a stretch ends where the fewest bytes pass from one operator to those behind it.
//
// An operator whose results no later pass uses runs again for the sake of others alone. So it belongs to the
// stretch of the first that reads them.
class PassStretches {
 public:
  PassStretches(std::int64_t first, const std::vector<PassOperator>& operators,
                std::vector<PassTensor>& tensors)
      : first_(first), operators_(operators), tensors_(tensors), first_writers_(tensors.size(), -1) {
    for (std::int64_t o = 0; o < count(); ++o) {
      for (const std::int32_t t : operators_[static_cast<std::size_t>(o)].writes) {
        std::int64_t& writer = first_writers_[static_cast<std::size_t>(t)];
        if (writer < 0) writer = o;
      }
    }
  }

  // Ends of the stretches, in operators of the pass.
  std::vector<std::int64_t> Ends() const {
    const std::vector<std::int64_t> passing = PassingBytes();
    std::int64_t pass_ns = 0;
    for (const PassOperator& op : operators_) pass_ns += op.duration_ns;
    const std::int64_t least_ns = pass_ns / kStretches + 1;
    std::vector<std::int64_t> ends;
    std::int64_t begin = 0, since_ns = 0, best = -1;
    for (std::int64_t end = 1; end < count(); ++end) {
      since_ns += operators_[static_cast<std::size_t>(end - 1)].duration_ns;
      if (end - begin < kLeastOperators) continue;
      const bool last = since_ns >= 2 * least_ns || end - begin >= kMostOperators;
      if (since_ns >= least_ns || last) {
        if (best < 0 || At(passing, end) < At(passing, best)) best = end;
      }
      if (!last || best < 0) continue;
      ends.push_back(best);
      begin = end = std::exchange(best, -1);
      since_ns = 0;
    }
    if (count() > 0) ends.push_back(count());
    return ends;
  }

  // By operator: the one in whose stretch it is; -1: nothing comes of its running again.
  std::vector<std::int64_t> Anchors() const {
    std::vector<std::int64_t> anchors(operators_.size(), -1);
    std::vector<std::vector<std::int64_t>> readers(tensors_.size());
    for (std::int64_t o = 0; o < count(); ++o) {
      for (const std::int32_t t : operators_[static_cast<std::size_t>(o)].reads)
        readers[static_cast<std::size_t>(t)].push_back(o);
    }
    for (std::int64_t o = count() - 1; o >= 0; --o) {
      std::int64_t reader = count();
      for (const std::int32_t t : operators_[static_cast<std::size_t>(o)].writes) {
        if (Tensor(t).last_later_use >= 0) anchors[static_cast<std::size_t>(o)] = o;
        for (const std::int64_t by : readers[static_cast<std::size_t>(t)]) {
          if (by > o && anchors[static_cast<std::size_t>(by)] >= 0) reader = std::min(reader, by);
        }
      }
      std::int64_t& anchor = anchors[static_cast<std::size_t>(o)];
      if (anchor < 0 && reader < count()) anchor = anchors[static_cast<std::size_t>(reader)];
    }
    return anchors;
  }

  // The stretch of the operators given, ascending. `graph`: its choices.
  RecomputedStretch Describe(const std::vector<std::int64_t>& members, std::int64_t end,
                             RecomputationGraph& graph) {
    const std::vector<std::int32_t> made = MadeBy(members);
    RecomputedStretch stretch;
    std::vector<std::pair<std::int64_t, std::int64_t>> last_uses, later_uses;  // with bytes
    for (const std::int32_t t : made) {
      last_uses.emplace_back(Tensor(t).last_use, Tensor(t).bytes);
      if (Tensor(t).last_later_use >= 0) later_uses.emplace_back(-Tensor(t).first_later_use, Tensor(t).bytes);
    }
    if (later_uses.empty()) return stretch;
    stretch.from = std::max(OfMost(last_uses), first_ + end - 1);
    stretch.to = -OfMost(later_uses);
    std::vector<std::int32_t> tensor_of(tensors_.size(), -1);
    for (const std::int32_t t : made) {
      const PassTensor& tensor = Tensor(t);
      const bool later = tensor.last_later_use >= stretch.to;
      if (tensor.last_use > stretch.from || (!later && tensor.last_later_use >= 0)) continue;
      tensor_of[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(graph.tensors.size());
      graph.tensors.push_back({.bytes = tensor.bytes, .used_later = later, .maker = -1, .readers = {}});
      stretch.until = std::max(stretch.until, tensor.last_later_use);
      if (stretch.from < stretch.to) tensors_[static_cast<std::size_t>(t)].chosen_until = stretch.to;
    }
    for (std::size_t m = 0; m < members.size(); ++m) {
      const PassOperator& op = operators_[static_cast<std::size_t>(members[m])];
      graph.operators_ns.push_back(op.duration_ns);
      const auto number = static_cast<std::int32_t>(m);
      for (const std::int32_t t : op.writes) {
        if (tensor_of[static_cast<std::size_t>(t)] < 0) continue;
        MadeTensor& tensor = graph.tensors[static_cast<std::size_t>(tensor_of[static_cast<std::size_t>(t)])];
        // Readers before it need what earlier writers made alone.
        const bool longer =
            tensor.maker < 0 || (tensor.readers.empty() &&
                                 op.duration_ns > graph.operators_ns[static_cast<std::size_t>(tensor.maker)]);
        if (longer) tensor.maker = number;
      }
      for (const std::int32_t t : op.reads) {
        if (tensor_of[static_cast<std::size_t>(t)] < 0) continue;
        MadeTensor& tensor = graph.tensors[static_cast<std::size_t>(tensor_of[static_cast<std::size_t>(t)])];
        if (tensor.maker != number) tensor.readers.push_back(number);
      }
    }
    return stretch;
  }

 private:
  std::int64_t count() const { return std::ssize(operators_); }
  const PassTensor& Tensor(std::int32_t t) const { return tensors_[static_cast<std::size_t>(t)]; }
  static std::int64_t At(const std::vector<std::int64_t>& values, std::int64_t i) {
    return values[static_cast<std::size_t>(i)];
  }

  // By operator: bytes that are made before it and used from it on.
  std::vector<std::int64_t> PassingBytes() const {
    std::vector<std::int64_t> change(operators_.size() + 1, 0);
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const std::int64_t made = first_writers_[t], last = tensors_[t].last_use - first_;
      if (made < 0 || last <= made) continue;
      change[static_cast<std::size_t>(made + 1)] += tensors_[t].bytes;
      change[static_cast<std::size_t>(last + 1)] -= tensors_[t].bytes;
    }
    for (std::size_t i = 1; i < change.size(); ++i) change[i] += change[i - 1];
    return change;
  }

  // Tensors whose first writer is a member: each is in one stretch.
  std::vector<std::int32_t> MadeBy(const std::vector<std::int64_t>& members) const {
    std::vector<std::int32_t> made;
    for (const std::int64_t o : members) {
      for (const std::int32_t t : operators_[static_cast<std::size_t>(o)].writes) {
        if (first_writers_[static_cast<std::size_t>(t)] == o) made.push_back(t);
      }
    }
    return made;
  }

  // The least position that no more than a few of the bytes are above.
  static std::int64_t OfMost(std::vector<std::pair<std::int64_t, std::int64_t>> positions) {
    std::ranges::sort(positions);
    std::int64_t all = 0, above = 0;
    for (const auto& [position, bytes] : positions) all += bytes;
    for (std::size_t i = positions.size() - 1; i > 0; --i) {
      above += positions[i].second;
      if (above * kFew > all) return positions[i].first;
    }
    return positions.front().first;
  }

  const std::int64_t first_;
  const std::vector<PassOperator>& operators_;
  std::vector<PassTensor>& tensors_;
  std::vector<std::int64_t> first_writers_;
};

}  // namespace

void StretchMaker::Add(std::int64_t first_operator, const std::vector<PassOperator>& operators,
                       std::vector<PassTensor>& tensors, std::vector<RecomputedStretch>& stretches) {
  PassStretches pass(first_operator, operators, tensors);
  const std::vector<std::int64_t> anchors = pass.Anchors();
  std::int64_t begin = 0;
  for (const std::int64_t end : pass.Ends()) {
    std::vector<std::int64_t> members;
    for (std::int64_t o = 0; o < end; ++o) {
      const std::int64_t anchor = anchors[static_cast<std::size_t>(o)];
      if (begin <= anchor && anchor < end) members.push_back(o);
    }
    begin = end;
    RecomputationGraph graph;
    RecomputedStretch stretch = pass.Describe(members, end, graph);
    if (stretch.to <= stretch.from) continue;
    auto& choices = known_[graph];
    if (choices == nullptr)
      choices = std::make_shared<const std::vector<RecomputationChoice>>(CheapestChoices(graph));
    stretch.choices = choices;
    stretches.push_back(std::move(stretch));
  }
}

}  // namespace shardplan::internal

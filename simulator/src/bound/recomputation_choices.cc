// SPDX-License-Identifier: Apache-2.0
#include "bound/recomputation_choices.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace shardplan::internal {
namespace {

__extension__ using Int128 = __int128;

// Minimum cut of a network of a hundred nodes: shortest augmenting paths, as many at a time as there are
// (Dinic).
class MinimumCut {
 public:
  explicit MinimumCut(std::size_t nodes) : edges_(nodes), level_(nodes), next_(nodes) {}

  void Add(std::size_t from, std::size_t to, Int128 capacity) {
    edges_[from].push_back({to, edges_[to].size(), capacity});
    edges_[to].push_back({from, edges_[from].size() - 1, 0});
  }

  // By node: whether it is on the side of the source, in the smallest of the minimum cuts.
  std::vector<bool> SourceSide(std::size_t source, std::size_t sink, Int128 most) {
    while (SetLevels(source, sink)) {
      std::ranges::fill(next_, 0);
      while (Push(source, sink, most) > 0) {
      }
    }
    std::vector<bool> side;
    for (const int level : level_) side.push_back(level >= 0);
    return side;
  }

 private:
  struct Edge {
    std::size_t to = 0;
    std::size_t back = 0;  // index of the reverse edge
    Int128 left = 0;
  };

  bool SetLevels(std::size_t source, std::size_t sink) {
    std::ranges::fill(level_, -1);
    level_[source] = 0;
    std::vector<std::size_t> queue = {source};
    for (std::size_t i = 0; i < queue.size(); ++i) {
      for (const Edge& edge : edges_[queue[i]]) {
        if (edge.left <= 0 || level_[edge.to] >= 0) continue;
        level_[edge.to] = level_[queue[i]] + 1;
        queue.push_back(edge.to);
      }
    }
    return level_[sink] >= 0;
  }

  Int128 Push(std::size_t node, std::size_t sink, Int128 most) {
    if (node == sink) return most;
    for (std::size_t& e = next_[node]; e < edges_[node].size(); ++e) {
      Edge& edge = edges_[node][e];
      if (edge.left <= 0 || level_[edge.to] != level_[node] + 1) continue;
      const Int128 pushed = Push(edge.to, sink, std::min(most, edge.left));
      if (pushed <= 0) continue;
      edge.left -= pushed;
      edges_[edge.to][edge.back].left += pushed;
      return pushed;
    }
    return 0;
  }

  std::vector<std::vector<Edge>> edges_;
  std::vector<int> level_;
  std::vector<std::size_t> next_;
};

// The cheapest choice where a nanosecond and a byte cost so much.
RecomputationChoice CheapestAt(const RecomputationGraph& graph, Int128 of_ns, Int128 of_byte) {
  constexpr Int128 kNever = Int128{1} << 120;
  const std::size_t operators = graph.operators_ns.size(), tensors = graph.tensors.size();
  const std::size_t source = operators + tensors, sink = source + 1;
  MinimumCut cut(sink + 1);
  for (std::size_t o = 0; o < operators; ++o) cut.Add(o, sink, of_ns * graph.operators_ns[o]);
  for (std::size_t t = 0; t < tensors; ++t) {
    const MadeTensor& tensor = graph.tensors[t];
    const std::size_t needed = operators + t;
    if (tensor.used_later) cut.Add(source, needed, kNever);
    for (const std::int32_t reader : tensor.readers)
      cut.Add(static_cast<std::size_t>(reader), needed, kNever);
    cut.Add(needed, static_cast<std::size_t>(tensor.maker), of_byte * tensor.bytes);
  }
  const std::vector<bool> side = cut.SourceSide(source, sink, kNever);
  RecomputationChoice choice;
  for (std::size_t o = 0; o < operators; ++o) choice.again_ns += side[o] ? graph.operators_ns[o] : 0;
  for (std::size_t t = 0; t < tensors; ++t) {
    const MadeTensor& tensor = graph.tensors[t];
    if (side[operators + t] && !side[static_cast<std::size_t>(tensor.maker)])
      choice.kept_bytes += tensor.bytes;
  }
  return choice;
}

// Adds what is between two neighbours.
void AddBetween(const RecomputationGraph& graph, const RecomputationChoice& a, const RecomputationChoice& b,
                std::vector<RecomputationChoice>& choices) {
  const Int128 of_ns = a.kept_bytes - b.kept_bytes, of_byte = b.again_ns - a.again_ns;
  if (of_ns <= 0 || of_byte <= 0) return;
  const RecomputationChoice middle = CheapestAt(graph, of_ns, of_byte);
  const auto cost = [&](const RecomputationChoice& choice) {
    return of_ns * choice.again_ns + of_byte * choice.kept_bytes;
  };
  if (cost(middle) >= cost(a)) return;
  AddBetween(graph, a, middle, choices);
  choices.push_back(middle);
  AddBetween(graph, middle, b, choices);
}

}  // namespace

std::vector<RecomputationChoice> CheapestChoices(const RecomputationGraph& graph) {
  Int128 all_ns = 1, all_bytes = 1;
  for (const std::int64_t duration : graph.operators_ns) all_ns += duration;
  for (const MadeTensor& tensor : graph.tensors) all_bytes += tensor.bytes;
  const RecomputationChoice fastest = CheapestAt(graph, all_bytes, 1);
  const RecomputationChoice smallest = CheapestAt(graph, 1, all_ns);
  std::vector<RecomputationChoice> choices = {fastest};
  if (smallest.kept_bytes >= fastest.kept_bytes) return choices;
  AddBetween(graph, fastest, smallest, choices);
  choices.push_back(smallest);
  return choices;
}

}  // namespace shardplan::internal

// SPDX-License-Identifier: Apache-2.0
#include "passes/schedule_analysis.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/dag_shortest_paths.hpp>
#include <boost/graph/dominator_tree.hpp>
#include <boost/graph/graphviz.hpp>
#include <boost/graph/transitive_reduction.hpp>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

auto OutEdges(std::size_t vertex, const ScheduleGraph& graph) {
  return boost::make_iterator_range(boost::out_edges(static_cast<std::uint32_t>(vertex), graph));
}

constexpr std::array<std::string_view, 8> kColors = {"black",  "steelblue", "seagreen", "firebrick",
                                                     "purple", "goldenrod", "grey40",   "deeppink"};

std::string_view EdgeStyle(EdgeKind kind) {
  switch (kind) {
    case EdgeKind::kData:
      return "color=black";
    case EdgeKind::kMemory:
      return "color=grey, style=dashed";
    case EdgeKind::kReuse:
      return "color=orange, style=dashed";
    case EdgeKind::kStream:
      return "color=steelblue, style=dotted";
    case EdgeKind::kEvent:
      return "color=steelblue";
    case EdgeKind::kCommunicator:
      return "color=purple, style=dotted";
    case EdgeKind::kHostWait:
      return "color=firebrick";
    case EdgeKind::kHost:
      return "color=lightgrey, weight=2";
  }
  return "";
}

// The name as it stands inside the quotes of a label. GraphViz reads \n, \l, \N and the like after a
// backslash.
std::string LabelText(std::string_view name) {
  std::string text;
  for (const char c : Printable(name)) {
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  return text;
}

std::string NodeText(const Plan& plan, const PlanStep& step, const ScheduleNode& node) {
  const Trigger& trigger = step.triggers[node.trigger];
  if (node.instruction < 0) {
    return fmt::format("label=\"{}\\n{}\", shape=plaintext", Name(trigger.kind),
                       trigger.unit < 0 ? "" : LabelText(DisplayName(plan.units[trigger.unit].fqn)));
  }
  const Instruction& instruction = trigger.instructions[node.instruction];
  const std::string_view color = kColors[(instruction.stream + 1) % kColors.size()];
  if (instruction.kind == InstructionKind::kCompute) {
    return fmt::format("label=\"{}\", color={}, shape=box",
                       LabelText(plan.segments[instruction.segment].name), color);
  }
  std::string label(Name(instruction.kind));
  const BufferId buffer = instruction.dst >= 0 ? instruction.dst : instruction.src;
  if (buffer >= 0) label += "\\n" + LabelText(plan.buffers[buffer].name);
  if (instruction.event >= 0) label += "\\n" + LabelText(plan.events[instruction.event]);
  return fmt::format("label=\"{}\", color={}, shape=ellipse", label, color);
}

// The graph of the vertices in `among` alone, `kept` in order, with a path wherever there was one.
ScheduleGraph Contract(const ScheduleGraph& graph, const std::vector<bool>& among,
                       std::vector<std::int32_t>& kept) {
  const std::size_t count = boost::num_vertices(graph);
  ScheduleGraphParts contracted;
  std::vector<std::set<std::size_t>> nearest(count);  // that a vertex comes after, in `contracted`
  for (std::size_t v = 0; v < count; ++v) {           // edges lead to later vertices
    if (among[v]) {
      const std::size_t added = contracted.nodes.size();
      contracted.nodes.push_back(graph[v]);
      for (const std::size_t before : nearest[v]) contracted.AddEdge(before, added, EdgeKind::kHost);
      nearest[v] = {added};
      kept.push_back(static_cast<std::int32_t>(v));
    }
    for (const auto edge : OutEdges(v, graph)) {
      nearest[boost::target(edge, graph)].insert(nearest[v].begin(), nearest[v].end());
    }
  }
  return contracted.Graph();
}

}  // namespace

ScheduleGraph TransitiveReduction(const ScheduleGraph& graph) {
  const std::size_t count = boost::num_vertices(graph);
  using Bare = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS>;
  Bare bare;
  std::vector<std::size_t> reduced_of(count);
  boost::transitive_reduction(
      graph, bare,
      boost::make_iterator_property_map(reduced_of.begin(), boost::get(boost::vertex_index, graph)),
      boost::get(boost::vertex_index, graph));
  std::vector<std::size_t> vertex_of(count);
  for (std::size_t v = 0; v < count; ++v) vertex_of[reduced_of[v]] = v;
  ScheduleGraphParts reduced;
  for (std::size_t v = 0; v < count; ++v) reduced.nodes.push_back(graph[v]);
  for (std::size_t v = 0; v < count; ++v) {
    std::map<std::size_t, EdgeKind> kinds;
    for (const auto edge : OutEdges(v, graph)) {
      const auto [entry, added] = kinds.try_emplace(boost::target(edge, graph), graph[edge].kind);
      entry->second = std::min(entry->second, graph[edge].kind);
    }
    for (const auto edge : boost::make_iterator_range(boost::out_edges(reduced_of[v], bare))) {
      const std::size_t target = vertex_of[boost::target(edge, bare)];
      reduced.AddEdge(v, target, kinds.at(target));
    }
  }
  return reduced.Graph();
}

std::vector<TriggerRange> MovableRanges(const ScheduleGraph& graph) {
  const std::size_t count = boost::num_vertices(graph);
  if (count == 0) return {};
  const std::int32_t last_trigger = graph[count - 1].trigger;
  std::vector<TriggerRange> ranges(count, {0, last_trigger});
  const auto is_trigger = [&](std::size_t v) { return graph[v].instruction < 0; };
  for (std::size_t v = 0; v < count; ++v) {  // edges lead to later vertices
    if (graph[v].is_fixed) ranges[v].first = graph[v].trigger;
    for (const auto edge : OutEdges(v, graph)) {
      std::int32_t& first = ranges[boost::target(edge, graph)].first;
      first = std::max(first, ranges[v].first);
    }
  }
  for (std::size_t v = count; v-- > 0;) {
    for (const auto edge : OutEdges(v, graph)) {
      const std::size_t target = boost::target(edge, graph);
      const std::int32_t bound = ranges[target].last - (is_trigger(target) ? 1 : 0);
      ranges[v].last = std::min(ranges[v].last, bound);
    }
    if (graph[v].is_fixed) ranges[v].last = graph[v].trigger;
  }
  return ranges;
}

std::vector<std::int32_t> Barriers(const ScheduleGraph& graph, const std::vector<bool>& among) {
  std::vector<std::int32_t> kept;
  const ScheduleGraph contracted = Contract(graph, among, kept);
  const std::size_t count = kept.size();
  if (count == 0) return {};
  // An edge that follows from others leads past vertices that nothing can move across: only the reduction's
  // dominators are those.
  const ScheduleGraph reduced = TransitiveReduction(contracted);
  using Both = boost::adjacency_list<boost::vecS, boost::vecS, boost::bidirectionalS>;
  Both flow(count + 2);  // and where all ends and begins
  std::vector<bool> has_predecessor(count, false);
  for (std::size_t v = 0; v < count; ++v) {
    for (const auto edge : OutEdges(v, reduced)) {
      boost::add_edge(v, boost::target(edge, reduced), flow);
      has_predecessor[boost::target(edge, reduced)] = true;
    }
    if (boost::out_degree(static_cast<std::uint32_t>(v), reduced) == 0) boost::add_edge(v, count, flow);
    if (!has_predecessor[v]) boost::add_edge(count + 1, v, flow);
  }
  const auto nobody = boost::graph_traits<Both>::null_vertex();
  std::vector<std::size_t> dominator(count + 2, nobody);
  boost::lengauer_tarjan_dominator_tree(
      flow, count + 1,
      boost::make_iterator_property_map(dominator.begin(), boost::get(boost::vertex_index, flow)));
  std::vector<std::int32_t> barriers;
  for (std::size_t v = dominator[count]; v != count + 1; v = dominator[v]) barriers.push_back(kept[v]);
  std::ranges::reverse(barriers);
  return barriers;
}

LongestPath FindLongestPath(const ScheduleGraph& graph,
                            const std::function<Nanoseconds(const ScheduleNode&)>& duration_ns) {
  const std::size_t count = boost::num_vertices(graph);
  if (count == 0) return {};
  // The shortest path with every duration negative is the longest.
  using Weighted = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, boost::no_property,
                                         boost::property<boost::edge_weight_t, std::int64_t>>;
  Weighted weighted(count);
  for (std::size_t v = 0; v < count; ++v) {
    for (const auto edge : OutEdges(v, graph)) {
      const std::size_t target = boost::target(edge, graph);
      boost::add_edge(v, target, -duration_ns(graph[target]).value, weighted);
    }
  }
  std::vector<std::int64_t> distance(count);
  std::vector<std::size_t> predecessor(count);
  const auto index = boost::get(boost::vertex_index, weighted);
  boost::dag_shortest_paths(
      weighted, 0,
      boost::distance_map(boost::make_iterator_property_map(distance.begin(), index))
          .predecessor_map(boost::make_iterator_property_map(predecessor.begin(), index)));
  const auto end = static_cast<std::size_t>(std::ranges::min_element(distance) - distance.begin());
  LongestPath path{.length_ns = Nanoseconds{duration_ns(graph[0]).value - distance[end]}, .vertices = {}};
  for (std::size_t v = end; v != 0; v = predecessor[v]) {
    path.vertices.push_back(static_cast<std::int32_t>(v));
  }
  path.vertices.push_back(0);
  std::ranges::reverse(path.vertices);
  return path;
}

std::string WriteGraphviz(const ScheduleGraph& graph, const Plan& plan, const PlanStep& step) {
  const ScheduleGraph shown = TransitiveReduction(graph);
  std::ostringstream out;
  boost::write_graphviz(
      out, shown,
      [&](std::ostream& o, auto vertex) { o << "[" << NodeText(plan, step, shown[vertex]) << "]"; },
      [&](std::ostream& o, auto edge) { o << "[" << EdgeStyle(shown[edge].kind) << "]"; },
      [](std::ostream& o) { o << "rankdir=TB;\nnode [fontsize=9];\n"; });
  return out.str();
}

}  // namespace shardplan

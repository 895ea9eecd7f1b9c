#include "passes/schedule_graph.h"

#include <fmt/format.h>

#include <array>
#include <boost/graph/filtered_graph.hpp>
#include <boost/graph/graphviz.hpp>
#include <sstream>
#include <string_view>

namespace shardplan {
namespace {

using Vertex = std::int32_t;

// Walks the instructions in host order and draws the edges to what each depends on.
class GraphBuilder {
 public:
  explicit GraphBuilder(const Plan& plan)
      : plan_(plan),
        last_on_stream_(plan.streams.size(), -1),
        record_(plan.events.size(), -1),
        writer_(plan.buffers.size(), -1),
        last_use_(plan.buffers.size(), -1),
        made_grad_(plan.units.size(), -1),
        bound_(plan.units.size(), -1) {}

  ScheduleGraph Build() {
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
      for (std::size_t t = 0; t < plan_.steps[s].triggers.size(); ++t) {
        const std::vector<Instruction>& instructions = plan_.steps[s].triggers[t].instructions;
        for (std::size_t i = 0; i < instructions.size(); ++i) {
          Add(instructions[i],
              {static_cast<std::int32_t>(s), static_cast<std::int32_t>(t), static_cast<std::int32_t>(i),
               instructions[i].kind == InstructionKind::kCompute});
        }
      }
    }
    return graph_;
  }

 private:
  void Edge(Vertex from, Vertex to, EdgeKind kind) {
    if (from >= 0 && from != to) boost::add_edge(from, to, {kind}, graph_);
  }

  void Add(const Instruction& instruction, const ScheduleNode& node) {
    const auto vertex = static_cast<Vertex>(boost::add_vertex(node, graph_));
    Edge(last_, vertex, EdgeKind::kHostOrder);
    last_ = vertex;
    if (instruction.stream >= 0) {
      Edge(last_on_stream_[instruction.stream], vertex, EdgeKind::kStreamOrder);
      last_on_stream_[instruction.stream] = vertex;
    }
    switch (instruction.kind) {
      case InstructionKind::kRecord:
        record_[instruction.event] = vertex;
        break;
      case InstructionKind::kWait:
      case InstructionKind::kHostWait:
        Edge(record_[instruction.event], vertex, EdgeKind::kStreamOrder);
        break;
      case InstructionKind::kCompute:
        AddSegment(plan_.segments[instruction.segment], vertex);
        break;
      case InstructionKind::kBindUnsharded:
        Edge(writer_[instruction.src], vertex, EdgeKind::kData);
        bound_[plan_.buffers[instruction.src].unit] = instruction.src;
        break;
      case InstructionKind::kBindSharded:
        bound_[plan_.buffers[instruction.src].unit] = -1;
        break;
      default:
        AddUse(instruction, vertex);
    }
  }

  void AddSegment(const Segment& segment, Vertex vertex) {
    for (const UnitId unit : segment.reads) {
      if (bound_[unit] < 0) continue;
      Edge(writer_[bound_[unit]], vertex, EdgeKind::kData);
      last_use_[bound_[unit]] = vertex;
    }
    UnitId previous = -1;
    for (const SegmentGrad& grad : segment.grads) {
      if (grad.unit != previous) made_grad_[grad.unit] = vertex;
      previous = grad.unit;
    }
  }

  void AddUse(const Instruction& instruction, Vertex vertex) {
    if (instruction.src >= 0) {
      const BufferId src = instruction.src;
      const Buffer& buffer = plan_.buffers[src];
      if (instruction.kind == InstructionKind::kFree) {
        Edge(last_use_[src], vertex, EdgeKind::kMemory);
        if (instruction.parts.empty()) writer_[src] = -1;
      } else {
        const bool made_by_segment = buffer.role == BufferRole::kGradUnsharded && buffer.unit >= 0;
        Edge(made_by_segment ? made_grad_[buffer.unit] : writer_[src], vertex, EdgeKind::kData);
      }
      last_use_[src] = vertex;
    }
    if (instruction.dst >= 0) {
      Edge(last_use_[instruction.dst], vertex, EdgeKind::kMemory);
      writer_[instruction.dst] = vertex;
      last_use_[instruction.dst] = vertex;
    }
  }

  const Plan& plan_;
  ScheduleGraph graph_;
  Vertex last_ = -1;
  std::vector<Vertex> last_on_stream_, record_, writer_, last_use_, made_grad_;
  std::vector<BufferId> bound_;
};

constexpr std::array<std::string_view, 8> kColours = {"black",  "steelblue", "seagreen", "firebrick",
                                                      "purple", "goldenrod", "grey40",   "deeppink"};

std::string_view EdgeStyle(EdgeKind kind) {
  switch (kind) {
    case EdgeKind::kData:
      return "color=black";
    case EdgeKind::kMemory:
      return "color=grey, style=dashed";
    case EdgeKind::kStreamOrder:
      return "color=steelblue, style=dotted";
    case EdgeKind::kHostOrder:
      return "color=lightgrey, weight=2";
  }
  return "";
}

std::string Label(const Plan& plan, const ScheduleNode& node) {
  const Trigger& trigger = plan.steps[node.step].triggers[node.trigger];
  const Instruction& instruction = trigger.instructions[node.instruction];
  if (node.is_segment) return plan.segments[instruction.segment].name;
  std::string label(Name(instruction.kind));
  const BufferId buffer = instruction.dst >= 0 ? instruction.dst : instruction.src;
  if (buffer >= 0) label += "\\n" + plan.buffers[buffer].name;
  if (instruction.event >= 0) label += "\\n" + plan.events[instruction.event];
  return label;
}

}  // namespace

ScheduleGraph BuildScheduleGraph(const Plan& plan) { return GraphBuilder(plan).Build(); }

std::string WriteGraphviz(const ScheduleGraph& graph, const Plan& plan) {
  const auto steady = [&](auto vertex) { return graph[vertex].step == plan.steady_step; };
  const boost::filtered_graph<ScheduleGraph, boost::keep_all, std::function<bool(std::size_t)>> shown(
      graph, boost::keep_all(), steady);
  std::ostringstream out;
  boost::write_graphviz(
      out, shown,
      [&](std::ostream& o, auto vertex) {
        const ScheduleNode& node = graph[vertex];
        const Instruction& instruction =
            plan.steps[node.step].triggers[node.trigger].instructions[node.instruction];
        const std::string_view colour = kColours[(instruction.stream + 1) % kColours.size()];
        o << fmt::format("[label=\"{}\", color={}, shape={}]", Label(plan, node), colour,
                         node.is_segment ? "box" : "ellipse");
      },
      [&](std::ostream& o, auto edge) { o << fmt::format("[{}]", EdgeStyle(graph[edge].kind)); },
      [](std::ostream& o) { o << "rankdir=TB;\nnode [fontsize=9];\n"; });
  return out.str();
}

}  // namespace shardplan

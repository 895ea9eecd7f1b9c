// SPDX-License-Identifier: Apache-2.0
#include "passes/schedule_graph.h"

#include <algorithm>
#include <array>

#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/instruction_set.h"

namespace shardplan {
namespace {

using Vertex = std::int32_t;
constexpr Vertex kNone = -1;

// The accesses of one thing in host order: a read comes after the last write, a write after all reads since.
struct Accesses {
  Vertex writer = kNone;
  bool is_lifetime = false;  // the writer allocated or freed it
  std::vector<Vertex> readers;
};

// Facts of a buffer that hold from one step to the next.
struct BufferState {
  BufferId memory = -1;  // the buffer whose accesses are ordered with this one's: itself, or what it views
  StreamId pool = 0;     // of the stream that it was allocated on; -1: the host's
};

// Which buffers something other than allocate and free uses. The others hold what the plan does not show the
// use of (temporaries of the optimizer, an extension's tensors, the model's own buffers).
std::vector<bool> FindUsed(const Plan& plan) {
  std::vector<bool> used(plan.buffers.size(), false);
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    // By segments and by the optimizer.
    const BufferRole role = plan.buffers[b].role;
    used[b] = IsTrainingState(role) || LifetimeOf(role) == RoleLifetime::kBackward;
  }
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kAllocate || i.kind == InstructionKind::kFree) continue;
        for (const BufferId buffer : {i.src, i.dst}) {
          if (buffer >= 0) used[buffer] = true;
        }
      }
    }
  }
  return used;
}

// Walks the program in host order, as the verifier does, and draws the edges to what each instruction depends
// on.
class GraphBuilder {
 public:
  explicit GraphBuilder(const Plan& plan)
      : plan_(plan),
        used_(FindUsed(plan)),
        activations_(ActivationsTouched(plan)),
        alive_(plan),
        state_(plan.buffers.size()),
        bound_(plan.units.size(), -1),
        has_unsharded_(plan.units.size(), false),
        unit_buffers_(plan.units.size()) {
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      const Buffer& buffer = plan.buffers[b];
      const auto id = static_cast<BufferId>(b);
      // A gradient that a segment makes comes from the pool of the stream that computes.
      state_[b] = {.memory = id, .pool = buffer.persistent ? -1 : 0};
      if (buffer.unit < 0) continue;
      if (IsTrainingState(buffer.role)) unit_buffers_[buffer.unit].push_back(id);
      if (buffer.role == BufferRole::kParamUnsharded) has_unsharded_[buffer.unit] = true;
    }
  }

  ScheduleGraph BuildStep(const PlanStep& step) {
    Begin();
    for (std::size_t t = 0; t < step.triggers.size(); ++t) {
      const std::vector<Instruction>& instructions = step.triggers[t].instructions;
      AddVertex({.trigger = static_cast<std::int32_t>(t), .is_fixed = true});
      for (std::size_t i = 0; i < instructions.size(); ++i) {
        AddVertex({static_cast<std::int32_t>(t), static_cast<std::int32_t>(i), IsFixed(instructions[i])});
        AddInstruction(instructions[i]);
        alive_.Pass(instructions[i]);
      }
    }
    for (Vertex v = 1; v < std::ssize(has_predecessor_); ++v) {
      if (!has_predecessor_[v]) Edge(0, v, EdgeKind::kHost);
    }
    return parts_.Graph();
  }

 private:
  void Begin() {
    parts_ = {};
    has_predecessor_.clear();
    host_ = host_work_ = kNone;
    last_on_stream_.assign(plan_.streams.size(), kNone);
    host_work_seen_.assign(plan_.streams.size(), kNone);
    last_on_communicator_.assign(plan_.communicators.size(), kNone);
    last_free_.assign(plan_.streams.size(), kNone);
    allocations_.assign(plan_.streams.size(), {});
    events_.assign(plan_.events.size(), {});
    memory_.assign(plan_.buffers.size(), {});
    bindings_.assign(plan_.units.size(), {});
    unsharded_gradients_.assign(plan_.units.size(), {});
  }

  void Edge(Vertex from, Vertex to, EdgeKind kind) {
    if (from == kNone || from == to) return;
    SHARDPLAN_ASSERT(from < to, "an instruction depends on what was issued before it");
    parts_.AddEdge(static_cast<std::size_t>(from), static_cast<std::size_t>(to), kind);
    has_predecessor_[to] = true;
  }

  void AddVertex(const ScheduleNode& node) {
    at_ = static_cast<Vertex>(parts_.nodes.size());
    parts_.nodes.push_back(node);
    has_predecessor_.push_back(false);
    if (!node.is_fixed) return;
    Edge(host_, at_, EdgeKind::kHost);
    host_ = at_;
  }

  // The model's own work, what it sees of the parameters, what the user calls; and memory that serves
  // something that the plan does not show.
  bool IsFixed(const Instruction& i) const {
    switch (DescriptionOf(i.kind).family) {
      case InstructionFamily::kCompute:
      case InstructionFamily::kBind:
      case InstructionFamily::kOptimizer:
        return true;
      case InstructionFamily::kMemory:
        return !used_[i.dst >= 0 ? i.dst : i.src];
      case InstructionFamily::kCopy:
      case InstructionFamily::kCollective:
      case InstructionFamily::kScale:
      case InstructionFamily::kOrder:
        return false;
    }
    return false;
  }

  void Read(Accesses& accesses, EdgeKind kind) {
    Edge(accesses.writer, at_, accesses.is_lifetime ? EdgeKind::kMemory : kind);
    accesses.readers.push_back(at_);
  }
  void Write(Accesses& accesses, EdgeKind kind, bool is_lifetime = false) {
    if (accesses.readers.empty()) Edge(accesses.writer, at_, kind);
    for (const Vertex reader : accesses.readers) Edge(reader, at_, kind);
    accesses = {.writer = at_, .is_lifetime = is_lifetime, .readers = {}};
  }

  bool IsUnshardedGradient(BufferId buffer) const {
    return plan_.buffers[buffer].role == BufferRole::kGradUnsharded && plan_.buffers[buffer].unit >= 0;
  }
  void ReadBuffer(BufferId buffer) {
    // Which buffer a segment's gradient goes to depends on what is taken next: all of a unit's are one.
    if (IsUnshardedGradient(buffer)) return WriteBuffer(buffer);
    Read(memory_[state_[buffer].memory], EdgeKind::kData);
  }
  void WriteBuffer(BufferId buffer) {
    if (IsUnshardedGradient(buffer)) {
      return Write(unsharded_gradients_[plan_.buffers[buffer].unit], EdgeKind::kData);
    }
    Write(memory_[state_[buffer].memory], EdgeKind::kMemory);
  }

  void AddInstruction(const Instruction& i) {
    if (IsCollective(i.kind)) {
      Edge(last_on_communicator_[i.communicator], at_, EdgeKind::kCommunicator);
      last_on_communicator_[i.communicator] = at_;
    }
    switch (DescriptionOf(i.kind).family) {
      case InstructionFamily::kMemory:
        return DescriptionOf(i.kind).lifetime == LifetimeEffect::kBegins ? Allocate(i) : Free(i);
      case InstructionFamily::kBind:
        return Bind(i);
      case InstructionFamily::kCopy:
      case InstructionFamily::kCollective:
      case InstructionFamily::kScale:
        return alive_.MakesView(i) ? MakeView(i) : Move(i);
      case InstructionFamily::kOrder:
        Issue(i);
        return DescriptionOf(i.kind).order == OrderEffect::kRecords
                   ? Write(events_[i.event], EdgeKind::kEvent)
                   : Read(events_[i.event], EdgeKind::kEvent);
      case InstructionFamily::kCompute:
        Issue(i);
        return Compute(i);
      case InstructionFamily::kOptimizer:
        if (!IsWork(i.kind)) return ZeroGrad(i);
        Issue(i);
        return i.exchange >= 0 ? StepExchange(i) : StepOptimizer(i);
    }
  }

  void Move(const Instruction& i) {
    Issue(i);
    if (i.src >= 0 && i.src != i.dst) {
      i.dst < 0 ? WriteBuffer(i.src) : ReadBuffer(i.src);  // without a dst it works in place
    }
    if (i.dst >= 0) WriteBuffer(i.dst);
  }

  // Work on a stream, or of the host itself, which delays everything that it issues later.
  void Issue(const Instruction& i) {
    if (i.stream < 0) {
      Edge(host_work_, at_, EdgeKind::kHostWait);
      host_work_ = at_;
      // A rank that waits before it issues a collective, while another waits behind it, could wait for ever.
      for (const Vertex collective : last_on_communicator_) {
        Edge(collective, at_, EdgeKind::kCommunicator);
      }
      return;
    }
    Edge(last_on_stream_[i.stream], at_, EdgeKind::kStream);
    last_on_stream_[i.stream] = at_;
    if (host_work_seen_[i.stream] != host_work_) Edge(host_work_, at_, EdgeKind::kHostWait);
    host_work_seen_[i.stream] = host_work_;
  }

  // Memory that the pool of `stream` gets back stays behind what was handed out before: that has not waited
  // for its users.
  void GiveBack(StreamId stream) {
    if (stream < 0) return;
    Edge(last_free_[stream], at_, EdgeKind::kReuse);
    last_free_[stream] = at_;
    for (const Vertex allocation : allocations_[stream]) Edge(allocation, at_, EdgeKind::kReuse);
    allocations_[stream].clear();
  }

  void Allocate(const Instruction& i) {
    if (IsUnshardedGradient(i.dst)) WriteBuffer(i.dst);
    Write(memory_[i.dst], EdgeKind::kMemory, /*is_lifetime=*/true);
    const bool pooled = plan_.buffers[i.dst].memory == MemoryKind::kDevice && i.stream >= 0;
    state_[i.dst] = {i.dst, pooled ? i.stream : -1};
    if (pooled) allocations_[i.stream].push_back(at_);
  }

  void Free(const Instruction& i) {
    for (const StreamId stream : i.safe_after) {  // what is issued there so far, not less
      Edge(last_on_stream_[stream], at_, EdgeKind::kReuse);
    }
    End(i.src, /*all=*/i.parts.empty());
  }

  void End(BufferId buffer, bool all) {
    BufferState& state = state_[buffer];
    if (IsUnshardedGradient(buffer)) {
      WriteBuffer(buffer);
    } else {
      Write(memory_[state.memory], EdgeKind::kMemory, /*is_lifetime=*/true);
      if (state.memory != buffer) Write(memory_[buffer], EdgeKind::kMemory, /*is_lifetime=*/true);
    }
    GiveBack(state.pool);
    if (all) state.memory = buffer;
  }

  void Bind(const Instruction& i) {
    // A copy on the host is read by the user, who waits for nothing: behind what the host has waited for.
    const Buffer& bound = plan_.buffers[i.src];
    const bool is_read = bound.memory != MemoryKind::kDevice && bound.role == BufferRole::kParamUnsharded;
    if (is_read) Edge(host_work_, at_, EdgeKind::kHostWait);
    const UnitId unit = i.unit >= 0 ? i.unit : plan_.buffers[i.src].unit;
    ReadBuffer(i.src);
    if (bound_[unit] >= 0) ReadBuffer(bound_[unit]);  // freed only after this
    Write(bindings_[unit], EdgeKind::kData);
    bound_[unit] = i.kind == InstructionKind::kBindUnsharded ? i.src : -1;
  }

  // The cast makes a second name of the memory.
  void MakeView(const Instruction& i) {
    Read(memory_[state_[i.src].memory], EdgeKind::kData);
    Write(memory_[i.dst], EdgeKind::kMemory, /*is_lifetime=*/true);
    // Uses of either name come after both have become one.
    Write(memory_[state_[i.src].memory], EdgeKind::kMemory);
    state_[i.dst] = {state_[i.src].memory, state_[i.src].pool};
  }

  void Compute(const Instruction& i) {
    const Segment& segment = plan_.segments[i.segment];
    for (const UnitId unit : segment.reads) {
      Read(bindings_[unit], EdgeKind::kData);
      if (bound_[unit] >= 0) {
        ReadBuffer(bound_[unit]);
      } else if (!has_unsharded_[unit]) {  // never sharded
        for (const BufferId buffer : unit_buffers_[unit]) {
          if (plan_.buffers[buffer].role == BufferRole::kParamSharded) ReadBuffer(buffer);
        }
      }
    }
    UnitId previous = -1;
    for (const SegmentGrad& grad : segment.grads) {
      if (grad.unit != previous) Write(unsharded_gradients_[grad.unit], EdgeKind::kData);
      previous = grad.unit;
    }
    for (const ActivationTouch& touch : activations_[i.segment]) WriteBuffer(touch.buffer);
    GiveBack(i.stream);  // its own tensors come and go
  }

  template <typename Visit>
  void ForEachUnit(UnitId unit, Visit visit) {
    const UnitId end = unit < 0 ? static_cast<UnitId>(plan_.units.size()) : unit + 1;
    for (UnitId u = std::max(unit, 0); u < end; ++u) visit(u);
  }

  void StepOptimizer(const Instruction& i) {
    ForEachUnit(i.unit, [&](UnitId unit) {
      for (const BufferId buffer : unit_buffers_[unit]) WriteBuffer(buffer);
      Write(unsharded_gradients_[unit], EdgeKind::kData);
    });
  }

  void StepExchange(const Instruction& i) {
    if (i.src >= 0) ReadBuffer(i.src);
    if (i.dst >= 0) WriteBuffer(i.dst);
    if (i.kind == InstructionKind::kOrthogonalize) return GiveBack(i.stream);  // its own tensors come and go
    for (const ExchangedMatrix& matrix : plan_.exchanges[i.exchange].matrices) {
      for (const BufferId buffer : unit_buffers_[matrix.unit]) WriteBuffer(buffer);
    }
  }

  void ZeroGrad(const Instruction& i) {
    ForEachUnit(i.unit, [&](UnitId unit) {
      for (const BufferId buffer : unit_buffers_[unit]) {
        if (!alive_.IsAlive(buffer) || !ZeroGradTakes(i.unit, plan_.buffers[buffer])) continue;
        plan_.buffers[buffer].persistent ? WriteBuffer(buffer) : End(buffer, /*all=*/true);
      }
    });
  }

  const Plan& plan_;
  const std::vector<bool> used_;
  const std::vector<std::vector<ActivationTouch>> activations_;  // by segment
  // State of the program so far, over all steps.
  AliveBuffers alive_;
  std::vector<BufferState> state_;
  std::vector<BufferId> bound_;  // by unit
  // By unit of the plan: whether it is ever unsharded; its buffers that the optimizer touches.
  std::vector<bool> has_unsharded_;
  std::vector<std::vector<BufferId>> unit_buffers_;
  // The parts of the step. `at_` is the vertex that is being added.
  ScheduleGraphParts parts_;
  Vertex at_ = kNone;
  std::vector<bool> has_predecessor_;
  Vertex host_ = kNone;       // the last of the host's own program
  Vertex host_work_ = kNone;  // the last that the host waited for, or worked at
  std::vector<Vertex> last_on_stream_, host_work_seen_, last_on_communicator_;
  std::vector<Vertex> last_free_;                 // by stream: that gave memory back to its pool
  std::vector<std::vector<Vertex>> allocations_;  // by stream: since then
  std::vector<Accesses> events_, memory_, bindings_, unsharded_gradients_;
};

}  // namespace

std::string_view Name(EdgeKind kind) {
  constexpr std::array<std::string_view, kEdgeKinds> kNames = {"data",  "memory",       "reuse",     "stream",
                                                               "event", "communicator", "host_wait", "host"};
  return kNames[static_cast<std::size_t>(kind)];
}

void ScheduleGraphParts::AddEdge(std::size_t from, std::size_t to, EdgeKind kind) {
  ends.emplace_back(static_cast<std::uint32_t>(from), static_cast<std::uint32_t>(to));
  edges.push_back({kind});
}

ScheduleGraph ScheduleGraphParts::Graph() const {
  ScheduleGraph graph(boost::edges_are_unsorted_multi_pass, ends.begin(), ends.end(), edges.begin(),
                      static_cast<std::uint32_t>(nodes.size()));
  for (std::uint32_t v = 0; v < nodes.size(); ++v) graph[v] = nodes[v];
  return graph;
}

std::vector<ScheduleGraph> BuildScheduleGraphs(const Plan& plan) {
  GraphBuilder builder(plan);
  std::vector<ScheduleGraph> graphs;
  for (const PlanStep& step : plan.steps) graphs.push_back(builder.BuildStep(step));
  return graphs;
}

}  // namespace shardplan

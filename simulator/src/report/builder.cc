// SPDX-License-Identifier: Apache-2.0
#include "report/builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cost/fixed_log.h"
#include "cost/operator_class.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/memory_profile.h"
#include "text/instruction_text.h"

namespace shardplan::internal {
namespace {

constexpr std::int64_t kMillion = 1'000'000;
constexpr std::int64_t kNanosecondsPerSecond = 1'000'000'000;

// [Note: the times of the passes]
// Forward, backward and optimizer are what a stopwatch shows that synchronises with the device at their
// borders: each pass begins on an idle device. The step itself has no such borders: the host runs ahead, and
// the first all-gather of the backward is in flight while the forward still computes. So the step can be
// shorter than the sum of the passes.
void FillPhases(const EngineStep& step, const EngineResult& result, Report& report) {
  SHARDPLAN_ASSERT(step.phases.size() == result.phase_end_ns.size(), "the result is of this step");
  Nanoseconds from;
  for (std::size_t p = 0; p < step.phases.size(); ++p) {
    const bool last = p + 1 == step.phases.size();
    const Nanoseconds to = last ? result.end_ns : std::max(from, result.phase_end_ns[p]);
    Nanoseconds& sum = step.phases[p] == Phase::kForward    ? report.forward_ns
                       : step.phases[p] == Phase::kBackward ? report.backward_ns
                                                            : report.optimizer_ns;
    sum += to - from;
    from = to;
  }
}

void FillActivities(const EngineResult& result, Report& report) {
  for (std::size_t a = 0; a < kDeviceActivities; ++a) {
    if (result.activity_ns[a].value > 0)
      report.activities.push_back({std::string(Name(static_cast<DeviceActivity>(a))), result.activity_ns[a]});
  }
}

Bytes ParameterBytes(const Unit& unit) {
  Bytes bytes;
  for (const UnitParameter& parameter : unit.parameters) {
    std::int64_t size = SizeBytes(unit.param_dtype);
    for (const std::int64_t length : parameter.shape) size *= length;
    bytes.value += size;
  }
  return bytes;
}

std::string PeakText(const Plan& plan, const MemoryPoint& at) {
  if (at.step < 0) return "";
  const PlanStep& step = plan.steps[static_cast<std::size_t>(at.step)];
  if (at.trigger < 0) return step.name + " begin";
  const Trigger& trigger = step.triggers[static_cast<std::size_t>(at.trigger)];
  std::string text = step.name + " " + TriggerText(plan, trigger);
  if (at.instruction < 0) return text;
  const Instruction& instruction = trigger.instructions[static_cast<std::size_t>(at.instruction)];
  return text + ": " + InstructionText(plan, instruction);
}

// Categories that are not empty, by name.
std::vector<CategoryBytes> ByCategory(const std::vector<Bytes>& bytes) {
  std::vector<CategoryBytes> categories;
  for (std::size_t c = 0; c < bytes.size(); ++c) {
    if (bytes[c].value != 0) categories.push_back({MemoryCategories()[c], bytes[c]});
  }
  std::ranges::sort(categories, {}, &CategoryBytes::category);
  return categories;
}

MemoryReport BuildMemory(const Plan& plan, const Cluster& cluster, const MemoryProfile& memory,
                         const MemoryProfile& host_memory, const DeviceFit& fit) {
  MemoryReport report;
  report.peak_bytes = memory.peak_bytes;
  report.peak_at = PeakText(plan, memory.peak_at);
  report.steady_bytes = memory.end_bytes;
  report.context_bytes = cluster.device.context_bytes;
  report.device_memory_bytes = cluster.device.memory_bytes;
  const Bytes nccl = NcclBufferBytes(plan);
  report.peak_by_category = ByCategory(memory.peak_by_category);
  if (report.context_bytes.value > 0)
    report.peak_by_category.push_back({"cuda_context", report.context_bytes});
  if (nccl.value > 0) report.peak_by_category.push_back({"nccl_buffers", nccl});
  if (plan.unmanaged.Total().value > 0)
    report.peak_by_category.push_back({"unmanaged", plan.unmanaged.Total()});
  std::ranges::sort(report.peak_by_category, {}, &CategoryBytes::category);
  report.reserved_bytes = fit.reserved_bytes;
  report.cache_releases = fit.cache_releases;
  report.fits = fit.Fits(true);
  report.deferred_gradient_bytes = DeferredGradientsOf(plan, plan.steady_step).peak_bytes;
  report.host_peak_bytes = host_memory.peak_bytes;
  report.host_steady_bytes = host_memory.end_bytes;
  report.host_peak_by_category = ByCategory(host_memory.peak_by_category);
  if (host_memory.peak_bytes.value > 0) report.host_peak_at = PeakText(plan, host_memory.peak_at);
  return report;
}

constexpr std::array<std::string_view, kPhases> kPhaseNames = {"forward", "backward", "optimizer"};

struct KernelSum {
  std::int64_t count = 0;
  Nanoseconds alone_ns;
};
// By index into OperatorClasses.
using ClassSums = std::vector<KernelSum>;

// Kernels of each of the program's segments by class. An operator that takes no time launches none.
std::vector<ClassSums> SumsOfSegments(const Plan& plan, const EngineProgram& program) {
  std::unordered_map<std::string_view, std::size_t> class_of;
  constexpr std::size_t kNone = ~std::size_t{0};
  std::vector<std::size_t> classes(program.operators.size(), kNone);
  for (std::size_t s = 0; s < plan.segments.size(); ++s) {
    auto at = static_cast<std::size_t>(program.segments[s].first);
    for (const SegmentEntry& entry : plan.segments[s].entries) {
      const auto* event = std::get_if<OperatorEvent>(&entry);
      if (event == nullptr) continue;
      const std::size_t index = at++;
      if (program.operators[index].duration_ns.value == 0 || event->collective) continue;
      const auto [known, added] = class_of.try_emplace(event->name, 0);
      if (added) known->second = OperatorClassOf(event->name);
      classes[index] = known->second;
    }
  }
  std::vector<ClassSums> sums;
  for (const EngineSegment& segment : program.segments) {
    ClassSums& of = sums.emplace_back(OperatorClasses().size());
    for (std::int32_t k = segment.first; k < segment.first + segment.count; ++k) {
      const auto index = static_cast<std::size_t>(k);
      if (classes[index] == kNone) continue;
      ++of[classes[index]].count;
      of[classes[index]].alone_ns += program.operators[index].duration_ns;
    }
  }
  return sums;
}

// The time that streams were busy is shared out as kernels take alone: what slows them is spread evenly over
// a pass.
void FillOperators(const Plan& plan, const EngineProgram& program, const EngineResult& result,
                   Report& report) {
  const std::vector<ClassSums> sums = SumsOfSegments(plan, program);
  const EngineStep& step = program.steps.back();
  std::array<std::map<std::string_view, KernelSum>, kPhases> by_phase;
  for (const EngineInstruction& code : step.code) {
    const auto phase = static_cast<std::size_t>(step.phases[code.phase]);
    const auto add = [&](std::string_view kind, const KernelSum& sum) {
      KernelSum& of = by_phase[phase][kind];
      of.count += sum.count;
      of.alone_ns += sum.alone_ns;
    };
    if (code.op == EngineOp::kSegment) {
      const ClassSums& of = sums[static_cast<std::size_t>(code.operand)];
      for (std::size_t c = 0; c < of.size(); ++c) {
        if (of[c].count > 0) add(OperatorClasses()[c], of[c]);
      }
    } else if (code.op == EngineOp::kWork && code.work == WorkClass::kCompute && code.duration_ns.value > 0) {
      add(phase == static_cast<std::size_t>(Phase::kOptimizer) ? "optimizer" : "other",
          {1, code.duration_ns});
    }
  }
  for (std::size_t p = 0; p < kPhases; ++p) {
    Nanoseconds alone, passed, given;
    for (const auto& [kind, sum] : by_phase[p]) alone += sum.alone_ns;
    for (const auto& [kind, sum] : by_phase[p]) {
      passed += sum.alone_ns;
      const Nanoseconds until{MulDiv(result.compute_busy_ns[p].value, passed.value, alone.value)};
      report.operators.push_back({std::string(kind), std::string(kPhaseNames[p]), sum.count, until - given});
      given = until;
    }
  }
  std::ranges::sort(report.operators, [](const OperatorReport& a, const OperatorReport& b) {
    return std::tie(a.kind, a.phase) < std::tie(b.kind, b.phase);
  });
}

// Whether operators do matrix work, each name looked at once.
class MatmulNames {
 public:
  bool Contain(std::string_view name) {
    const auto [known, added] = known_.try_emplace(name, false);
    if (added) known->second = IsMatmulOperator(name);
    return known->second;
  }

 private:
  std::unordered_map<std::string_view, bool> known_;
};

// The sources of the figures.
void FillNotes(const Plan& plan, const Cluster& cluster, const EngineProgram& program,
               const MemoryProfile& memory, const MemoryProfile& memory_of_host, const ModelFlops& flops,
               Report& report) {
  report.notes.push_back(fmt::format(
      "operators: {} by roofline with the efficiency curve of {}, {} measured", program.modelled_operators,
      cluster.device.name.empty() ? cluster.name : cluster.device.name, program.measured_operators));
  for (const std::string& dtype : program.dtypes_without_rate) {
    report.notes.push_back(WithoutRateText(dtype));
  }
  report.notes.push_back(
      "every step begins with an idle device, as in a loop that reads its loss every step; one rank stands "
      "for all");
  report.notes.push_back(
      "peak memory is what torch.cuda.memory_allocated follows: blocks rounded to the allocator's "
      "granularity, "
      "without what kernels allocate inside; reserved memory has that, and fragmentation");
  if (NcclBufferBytes(plan).value > 0) {
    report.notes.push_back(
        "nccl_buffers is an estimate: 16 channels of the default buffers for each communicator");
  }
  if (flops.recomputed_flops > 0) {
    report.notes.push_back(
        fmt::format("{} TFLOP of matrix work is recomputation and left out of the utilization",
                    flops.recomputed_flops / 1'000'000'000'000));
  }
  const std::size_t last = plan.steps.size() - 1;
  if (memory.peak_at.step >= 0 && static_cast<std::size_t>(memory.peak_at.step) != last) {
    report.notes.push_back(fmt::format("the peak is in step \"{}\"; the peak of \"{}\" is {} bytes",
                                       plan.steps[static_cast<std::size_t>(memory.peak_at.step)].name,
                                       plan.steps[last].name, memory.step_peak_bytes[last].value));
  }
  if (memory_of_host.peak_bytes.value > 0) {
    report.notes.push_back(
        "what is offloaded is stepped and added by the host's thread, at the rate of its memory");
  }
  for (const std::string& note : program.notes) report.notes.push_back(note);
}

void Mark(StorageId storage, std::vector<bool>& marks) {
  if (storage < 0) return;
  const auto index = static_cast<std::size_t>(storage);
  if (index >= marks.size()) marks.resize(index + 1);
  marks[index] = true;
}
bool IsMarked(StorageId storage, const std::vector<bool>& marks) {
  return storage >= 0 && static_cast<std::size_t>(storage) < marks.size() &&
         marks[static_cast<std::size_t>(storage)];
}

template <typename Visit>
void ForEachSegment(const Plan& plan, std::size_t step, Visit visit) {
  for (const Trigger& trigger : plan.steps[step].triggers) {
    for (const Instruction& instruction : trigger.instructions) {
      if (instruction.kind == InstructionKind::kCompute) visit(static_cast<std::size_t>(instruction.segment));
    }
  }
}

// FLOPs of a step in which nothing is recomputed.
std::map<DType, std::int64_t> FlopsByDType(const Plan& plan, const EngineProgram& program, std::size_t step) {
  std::map<DType, std::int64_t> by_dtype;
  ForEachSegment(plan, step, [&](std::size_t segment) {
    for (const SegmentFlops& part : program.segment_flops[segment]) by_dtype[part.dtype] += part.flops;
  });
  return by_dtype;
}

// Recomputation is counted apart: it is the only thing in a backward that writes what is born in one.
std::map<DType, std::int64_t> FlopsByDType(const Plan& plan, std::size_t step,
                                           std::int64_t& recomputed_flops) {
  std::map<DType, std::int64_t> by_dtype;
  std::vector<bool> recomputed;  // by storage
  MatmulNames matmuls;
  ForEachSegment(plan, step, [&](std::size_t segment) {
    for (const SegmentEntry& entry : plan.segments[segment].entries) {
      if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
        if (born->role == StorageRole::kRecompute) Mark(born->storage, recomputed);
        continue;
      }
      const auto* event = std::get_if<OperatorEvent>(&entry);
      if (event == nullptr || event->flops == 0 || !matmuls.Contain(event->name)) continue;
      const bool again = std::ranges::any_of(
          event->writes, [&](StorageId storage) { return IsMarked(storage, recomputed); });
      (again ? recomputed_flops : by_dtype[event->dtype]) += event->flops;
    }
  });
  return by_dtype;
}

}  // namespace

void FillCollectives(const EngineStep& step, const EngineResult& result,
                     const std::function<std::string(CommunicatorId)>& name_of, Report& report) {
  SHARDPLAN_ASSERT(step.groups.size() == result.groups.size(), "the result is of this step");
  for (std::size_t g = 0; g < step.groups.size(); ++g) {
    const CollectiveGroup& group = step.groups[g];
    report.collectives.push_back({std::string(Name(group.kind)), name_of(group.communicator), group.count,
                                  group.full_tensor_bytes, result.groups[g].busy_ns,
                                  result.groups[g].exposed_ns, group.cost_source});
  }
  std::ranges::sort(report.collectives, [](const CollectiveReport& a, const CollectiveReport& b) {
    return std::tie(a.kind, a.communicator, a.cost_source) < std::tie(b.kind, b.communicator, b.cost_source);
  });
}

Nanoseconds AtPeak(const std::map<DType, std::int64_t>& flops, const Cluster& cluster) {
  Nanoseconds time;
  for (const auto& [dtype, count] : flops) {
    const auto rate = std::ranges::find(cluster.device.matmul, dtype, &ComputeRate::dtype);
    const std::int64_t peak =
        rate == cluster.device.matmul.end() ? cluster.device.vector_flops_per_second : rate->flops_per_second;
    if (peak > 0) time += Nanoseconds{MulDiv(count, kNanosecondsPerSecond, peak)};
  }
  return time;
}

ModelFlops CountModelFlops(const Plan& plan, const Cluster& cluster, const EngineProgram& program,
                           std::size_t step) {
  ModelFlops flops;
  const std::map<DType, std::int64_t> by_dtype = program.recomputes
                                                     ? FlopsByDType(plan, step, flops.recomputed_flops)
                                                     : FlopsByDType(plan, program, step);
  for (const auto& [dtype, count] : by_dtype) flops.flops += count;
  flops.peak_ns = AtPeak(by_dtype, cluster).value;
  return flops;
}

std::string WithoutRateText(const std::string& dtype) {
  return fmt::format("the cluster has no matrix rate for {}: its vector rate was used", dtype);
}

void FillTimes(const EngineStep& step, const EngineResult& result, const EngineResult& synchronized,
               Report& report) {
  report.step_ns = result.end_ns;
  FillPhases(step, synchronized, report);
  report.compute_ns = result.compute_ns;
  report.communication_ns = result.communication_ns;
  report.exposed_communication_ns = result.exposed_ns;
  report.overlap_ppm =
      result.communication_ns.value == 0
          ? kMillion
          : kMillion - MulDiv(result.exposed_ns.value, kMillion, result.communication_ns.value);
  report.host_ns = result.host_busy_ns;
  report.host_work_ns = result.host_work_ns;
  FillActivities(result, report);
}

Report BuildReport(const Plan& plan, const Cluster& cluster, const EngineProgram& program,
                   const EngineResult& result, const EngineResult& synchronized, const MemoryProfile& memory,
                   const MemoryProfile& host_memory, const DeviceFit& fit) {
  const std::size_t last = program.steps.size() - 1;
  const EngineStep& step = program.steps[last];
  Report report;
  report.model = plan.model;
  report.policy = plan.policy;
  report.cluster = cluster.name;
  report.world_size = plan.world_size;
  FillTimes(step, result, synchronized, report);
  const ModelFlops flops = CountModelFlops(plan, cluster, program, last);
  if (result.end_ns.value > 0) {
    report.tokens_per_second_per_rank =
        MulDiv(plan.tokens_per_step, kNanosecondsPerSecond, result.end_ns.value) / plan.ranks_per_batch;
    report.model_flops_utilization_ppm = MulDiv(flops.peak_ns, kMillion, result.end_ns.value);
  }
  const std::vector<std::string> streams = EngineStreams(plan);
  for (std::size_t s = 0; s < streams.size(); ++s) {
    report.streams.push_back({streams[s], result.stream_busy_ns[s], result.stream_operations[s]});
  }
  FillCollectives(
      step, result, [&](CommunicatorId id) { return plan.communicators[static_cast<std::size_t>(id)].name; },
      report);
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    report.units.push_back({UnitText(plan, static_cast<UnitId>(u)), ParameterBytes(plan.units[u]),
                            result.unit_forward_ns[u], result.unit_backward_ns[u],
                            result.unit_exposed_ns[u]});
  }
  FillOperators(plan, program, result, report);
  report.memory = BuildMemory(plan, cluster, memory, host_memory, fit);
  FillNotes(plan, cluster, program, memory, host_memory, flops, report);
  return report;
}

}  // namespace shardplan::internal

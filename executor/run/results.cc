// SPDX-License-Identifier: Apache-2.0
#include "results.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/printable.h"

namespace shardplan::run {
namespace {

std::string Milliseconds(Nanoseconds ns) {
  return fmt::format("{:.3f} ms", static_cast<double>(ns.value) / 1e6);
}
std::string Mebibytes(Bytes bytes) {
  return fmt::format("{:.2f} MiB", static_cast<double>(bytes.value) / (1 << 20));
}

// The median of the steps after the first, which makes connections and warms caches up.
Nanoseconds TypicalStep(std::vector<Nanoseconds> steps) {
  if (steps.empty()) return {};
  if (steps.size() > 1) steps.erase(steps.begin());
  std::ranges::sort(steps);
  return steps[steps.size() / 2];
}

const char* DeviceName(DeviceKind kind) {
  constexpr std::array<const char*, 3> kNames = {"cpu", "cuda", "virtual"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string CollectiveLines(const Plan& plan) {
  struct Total {
    std::int64_t count = 0;
    Bytes bytes;
  };
  std::map<std::string, Total> totals;
  for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (!IsCollective(i.kind)) continue;
      Total& total = totals[fmt::format("{} on {}", Name(i.kind), plan.communicators[i.communicator].name)];
      ++total.count;
      total.bytes += TensorBytesOf(plan, i);
    }
  }
  std::string lines;
  for (const auto& [name, total] : totals) {
    lines += fmt::format("{:<28}{:>6} x, {} in all (whole tensors, per step)\n", name, total.count,
                         Mebibytes(total.bytes));
  }
  return lines;
}

}  // namespace

std::string ResultTable(const Plan& plan, const RunOptions& options, const Measurement& measured,
                        const Report* report) {
  std::string text = fmt::format("{} {}: {} ranks on {}, {} steps, compute x {}\n", Printable(plan.model),
                                 Printable(plan.policy), plan.world_size, DeviceName(options.device),
                                 options.steps, options.compute_scale);
  text += fmt::format("{:<28}{:>18}{:>18}\n", "", "measured", report == nullptr ? "" : "simulated");
  const auto row = [&](const char* name, const std::string& left, const std::string& right) {
    text += fmt::format("{:<28}{:>18}{:>18}\n", name, left, report == nullptr ? "" : right);
  };
  const auto of = [&](Nanoseconds Report::*field) {
    return report == nullptr ? "" : Milliseconds(report->*field);
  };
  row("step", Milliseconds(TypicalStep(measured.steps_ns)), of(&Report::step_ns));
  row("compute", Milliseconds(measured.compute_ns), of(&Report::compute_ns));
  row("waiting for communication", Milliseconds(measured.waiting_ns), of(&Report::exposed_communication_ns));
  row("peak memory", Mebibytes(measured.peak_bytes),
      report == nullptr ? "" : Mebibytes(report->memory.peak_bytes));
  row("peak memory in bytes", fmt::format("{}", measured.peak_bytes.value),
      report == nullptr ? "" : fmt::format("{}", report->memory.peak_bytes.value));
  text += CollectiveLines(plan);
  if (report != nullptr && (options.device != DeviceKind::kCuda || options.compute_scale != 1.0)) {
    text += fmt::format("simulated: {} with unscaled compute\n", report->cluster);
  }
  return text;
}

}  // namespace shardplan::run

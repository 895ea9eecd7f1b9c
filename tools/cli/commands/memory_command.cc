// SPDX-License-Identifier: Apache-2.0
// `memory`: device memory of a plan or of a trace under a strategy, without any cost.
#include <fmt/format.h>

#include <optional>

#include "commands/commands.h"
#include "flags/file_flag.h"
#include "flags/memory_budget.h"
#include "memory_input.h"
#include "shardplan/simulator/memory_explanation.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"
#include "support.h"
#include "texts/memory_text.h"

namespace shardplan::cli {
namespace {

struct MemoryArguments {
  MemoryInput input;
  std::string rows, budget, plot, map;
  bool no_kernel_temporaries = false;
  bool reserved = false;
  std::string frees = "late";
  std::string addresses = "up";
  std::int32_t steps = 0;  // 0: until the allocator reserves no more
  bool quiet = false;
};

Result<FitOptions> FitOptionsOf(const MemoryArguments& options) {
  const Result<std::optional<Bytes>> budget = ParseMemoryBudget(options.budget);
  if (!budget) return std::unexpected(budget.error());
  return FitOptions{
      .budget_bytes = *budget,
      .completion = options.frees == "late" ? Completion::kWaitedFor : Completion::kAtOnce,
      .addresses = options.addresses == "up" ? AddressOrder::kUpwards : AddressOrder::kDownwards,
      .kernel_temporaries = !options.no_kernel_temporaries,
      .steps = options.steps};
}

// The bytes that the allocator would reserve on a device that is never behind the host.
Bytes ReservedAtOnce(const Plan& plan, const MemoryHistory& history, ReservedOptions options) {
  options.completion = Completion::kAtOnce;
  return ReserveMemory(plan, history, options).peak_reserved_bytes;
}

// The steps once, with what the pages draw: every block at its address.
ReservedMemory ReserveForMap(const Plan& plan, const MemoryHistory& history, ReservedOptions options) {
  options.record_addresses = true;
  return ReserveMemory(plan, history, options);
}

// `reserved`: of ReserveForMap, null without a map.
Status WritePages(const MemoryArguments& options, const Plan& plan, const MemoryHistory& history,
                  const ReservedMemory* reserved) {
  if (!options.plot.empty()) {
    if (Status written = WriteAndSay(options.plot, MemoryHtml(plan, history), options.quiet); !written)
      return written;
  }
  if (options.map.empty() || options.map == "-") return {};
  return WriteAndSay(options.map, MemoryHtml(plan, history, reserved), options.quiet);
}

// A document on standard output is in place of the table, and of the map that is a part of it.
bool HasTable(const MemoryArguments& options) {
  return !HasStandardOutput({{"--rows", options.rows}, {"--plot", options.plot}});
}

Status CheckFiles(const MemoryArguments& options) {
  const MemoryInput& input = options.input;
  return CheckOutputs({input.path, input.strategy, input.cluster.cluster},
                      {{"--rows", options.rows}, {"--plot", options.plot}, {"--map", options.map}},
                      HasTable(options) && options.map != "-");
}

Status RunMemory(const MemoryArguments& options, bool& fits) {
  if (Status checked = CheckFiles(options); !checked) return checked;
  const Result<Plan> plan = ReadMemoryInput(options.input);
  if (!plan) return std::unexpected(plan.error());
  const bool kernels = !options.no_kernel_temporaries;
  const MemoryRows rows = RowsOf(*plan,
                                 ProfileMemory(*plan, {.record_samples = true,
                                                       .first_sampled_step = plan->steady_step,
                                                       .kernel_temporaries = kernels}),
                                 plan->steady_step);
  if (rows.rows.empty()) return MakeError(ErrorCode::kBadInput, "the plan has no step");
  const DeferredGradients deferred = DeferredGradientsOf(*plan, plan->steady_step);
  std::optional<ReservedMemory> map;
  std::optional<SteadyReserved> steady;
  const Result<FitOptions> fit_options = FitOptionsOf(options);
  if (!fit_options) return std::unexpected(fit_options.error());
  const Result<ReservedOptions> reserved_options = AllocatorOptions(*plan, *fit_options);
  if (!reserved_options) return std::unexpected(reserved_options.error());
  const bool reserves = options.reserved || !options.map.empty() || options.input.flags.alloc_conf;
  MemoryHistory drawn;
  if (!options.map.empty() || !options.plot.empty()) {
    drawn = MemoryHistoryOf(*plan, {.kernel_temporaries = kernels});
  }
  if (!options.map.empty()) map = ReserveForMap(*plan, drawn, *reserved_options);
  if (reserves) {
    steady = ReserveUntilSteady(*plan, {.kernel_temporaries = kernels}, *reserved_options, options.steps);
  }
  Result<DeviceFit> fit =
      steady ? FitOf(*plan, *fit_options, steady->reserved) : FitDevice(*plan, *fit_options);
  if (!fit) return std::unexpected(fit.error());
  fits = fit->Fits(true);
  fit->reserved_bytes = ReservedToShow(*plan, *fit_options, *fit);
  if (!options.rows.empty()) {
    const std::string text = RowsJson(*plan, rows, deferred, steady ? &*steady : nullptr);
    if (Status written = WriteAndSay(options.rows, text, options.quiet); !written) return written;
  }
  if (Status written = WritePages(options, *plan, drawn, map ? &*map : nullptr); !written) return written;
  if (!HasTable(options)) return {};
  const std::string why = fits ? std::string() : WhyNoRanksFit(*plan, *fit_options);
  std::string text = MemoryTable(*plan, rows, deferred, *fit, why);
  if (steady) {
    const MemoryHistory& history = steady->history;  // what is compared passes the same steps
    std::vector<SettingsTrial> trials;
    if (options.reserved) trials = TryAllocatorSettings(*plan, history, *reserved_options);
    text += ReservedTable(*plan, steady->reserved, *fit, ReservedAtOnce(*plan, history, *reserved_options),
                          trials);
    if (options.map == "-") text += "\n" + AsciiMemoryMap(map->map_at_peak);
  }
  return PrintText(text);
}

}  // namespace

void AddMemoryCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      app.add_subcommand("memory", "Device memory by category at the peak and between steps; needs no costs");
  command->footer(
      "Examples: shardplan memory plan.json\n"
      "          shardplan memory trace.json --policy fsdp2 --ranks 64 --checkpoint 'model.layers.*'\n"
      "          shardplan memory trace.json --strategy s.json --ranks 8 --rows rows.json\n"
      "          shardplan memory plan.json --reserved --plot plot.html --map map.html\n"
      "Exit code: 1 when a plan does not verify, or when it does not fit into the budget or the device's "
      "memory "
      "(of a trace: with --cluster).");
  auto options = std::make_shared<MemoryArguments>();
  AddMemoryInput(*command, options->input);
  AddFile(*command, "--rows", options->rows,
          "Write bytes by category before and after every hook of every unit (JSON; '-': standard output, no "
          "table)");
  command->add_flag("--no-kernel-temporaries", options->no_kernel_temporaries,
                    "Leave out what kernels allocate inside themselves (estimated by formulas)");
  command->add_flag("--reserved", options->reserved,
                    "Reserved bytes of the caching allocator, and which settings would lower them");
  command
      ->add_option(
          "--frees", options->frees,
          "When memory that other streams use is free again: late (the host knows that they are done; "
          "a device that is behind), at-once (a device that never is)")
      ->check(CLI::IsMember({"late", "at-once"}))
      ->capture_default_str();
  command
      ->add_option(
          "--addresses", options->addresses,
          "Where the device puts its next segment, which decides between free blocks of one size: up (as "
          "CUDA's driver does), down (as Linux maps memory)")
      ->check(CLI::IsMember({"up", "down"}))
      ->capture_default_str();
  command->add_option("--memory-budget,--allocator-limit", options->budget,
                      std::string(kMemoryBudgetWords) + " (default)");
  command
      ->add_option("--steps", options->steps,
                   "Steps that the allocator is asked over (default: until it reserves no more)")
      ->check(CLI::Range(1, 100));
  AddFile(*command, "--plot", options->plot,
          "Write a page with the step's memory stacked by category (HTML)");
  AddFile(*command, "--map", options->map,
          "Write a page with that and the addresses over the step (HTML); '-': print the map at "
          "the reserved peak");
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  command->callback([options, &invocation] {
    bool fits = true;
    const Status status = RunMemory(*options, fits);
    if (!status) {
      invocation.exit_code = Fail(status.error());
    } else if (!fits) {
      invocation.exit_code = ExitCode(ErrorCode::kNegative);
    }
  });
}

}  // namespace shardplan::cli

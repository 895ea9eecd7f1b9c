// SPDX-License-Identifier: Apache-2.0
// `validate`: whether documents are well-formed, and whether plans are safe to run, alone or together.
#include <fmt/format.h>

#include <algorithm>
#include <type_traits>

#include "commands/commands.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/races/races.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/verifier/verifier.h"
#include "support.h"

namespace shardplan::cli {
namespace {

std::string Summary(const Trace& trace) {
  std::size_t events = 0;
  for (const Pass& pass : trace.forwards) events += pass.events.size();
  for (const Pass& pass : trace.backwards) events += pass.events.size();
  return fmt::format("trace of {}: {} modules, {} parameters, {} events", Printable(trace.model),
                     trace.modules.size(), trace.parameters.size(), events);
}
std::string Summary(const Cluster& cluster) {
  return fmt::format("cluster {}: {} ranks, {} per node, {} measured collective tables",
                     Printable(cluster.name), cluster.ranks, cluster.ranks_per_node,
                     cluster.collectives.size());
}
std::string Summary(const Strategy& strategy) {
  return fmt::format("strategy: policy {}, {} unit rules", Printable(strategy.policy), strategy.units.size());
}
std::string Summary(const Report& report) {
  return fmt::format("report of {} under {}: step {:.3f} ms", Printable(report.model),
                     Printable(report.policy), static_cast<double>(report.step_ns.value) / 1e6);
}
std::string Summary(const Plan& plan) {
  std::size_t triggers = 0, instructions = 0;
  for (const PlanStep& step : plan.steps) {
    triggers += step.triggers.size();
    for (const Trigger& trigger : step.triggers) instructions += trigger.instructions.size();
  }
  return fmt::format("plan of {} by {} for {} ranks: {} units, {} steps, {} triggers, {} instructions",
                     Printable(plan.model), Printable(plan.policy), plan.world_size, plan.units.size(),
                     plan.steps.size(), triggers, instructions);
}

std::string Summary(const StateLayout& layout) {
  return fmt::format("layout of a state: {}, {} tensors on {} ranks", Printable(layout.name),
                     layout.tensors.size(), RanksOf(layout));
}
std::string Summary(const ReshardPlan& plan) {
  return fmt::format("resharding of {} tensors in {} groups, {} -> {} ranks", plan.target.tensors.size(),
                     plan.groups.size(), RanksOf(plan.source), RanksOf(plan.target));
}

std::string Summary(const Recording& recording) {
  return fmt::format("recording of {}: rank {} of {}, {} threads, {} streams, {} events",
                     Printable(recording.job), recording.rank, recording.world_size, recording.threads.size(),
                     recording.streams.size(), recording.events.size());
}

std::string RemarksText(const std::string& path, const Plan& plan) {
  std::string text;
  for (const Remark& remark : Remarks(plan))
    text += fmt::format("{}: remark: {}: {}\n", path, Name(remark.kind), Printable(remark.message));
  return text;
}

std::string Count(std::size_t violations) {
  return fmt::format("{} violation{}", violations, violations == 1 ? "" : "s");
}

// Every violation in words; `good`: whether there is none.
std::string VerdictText(const std::string& path, const Plan& plan, bool& good) {
  const Judgement judgement = Judge(plan);
  std::string text;
  for (const std::string& fault : Explain(plan, judgement.carried))
    text +=
        fmt::format("{}: a fault of PyTorch's, which the plan carries: {}\n", path, PrintableLines(fault));
  for (const Violation& violation : judgement.violations)
    text += fmt::format("{}: {}\n", path, Explain(plan, violation));
  if (!judgement.distrust.empty()) text += fmt::format("{}: {}\n", path, judgement.distrust);
  good = judgement.good();
  if (!good) return text + fmt::format("{}: {}\n", path, Count(judgement.violations.size()));
  const std::size_t faults = judgement.carried.size();
  text += faults == 0 ? fmt::format("{}: verifies\n", path)
                      : fmt::format("{}: verifies, but for {} fault{} of PyTorch's\n", path, faults,
                                    faults == 1 ? "" : "s");
  return text + RemarksText(path, plan);
}

std::string VerdictText(const std::string& path, const ReshardPlan& plan, bool& good) {
  const std::vector<ReshardViolation> violations = VerifyReshard(plan);
  good = violations.empty();
  if (good) return fmt::format("{}: verifies\n", path);
  std::string text;
  for (const ReshardViolation& violation : violations)
    text += fmt::format("{}: {}: {}\n", path, violation.pointer, violation.message);
  return text + fmt::format("{}: {}\n", path, Count(violations.size()));
}

std::string VerdictText(const std::string& path, const Recording& recording, bool schedules, bool& good) {
  constexpr std::size_t kShown = 20;
  const RaceReport report = FindRaces(recording);
  good = report.races.empty();
  std::string text = RaceText(recording, report, kShown);
  if (schedules) {
    const std::vector<std::string> modes = RaceSchedules(recording, report);
    for (std::size_t race = 0; race < std::min(modes.size(), kShown); ++race) {
      text += fmt::format("race {} is shown by SHARDPLAN_DEVICE_MODE={}\n", race + 1,
                          modes[race].empty() ? "?" : modes[race]);
    }
  }
  if (report.unknown_launches > 0) {
    std::string names;
    for (const std::string& name : report.unknown_kernels) {
      names += (names.empty() ? "" : ", ") + Printable(name);
    }
    text += fmt::format("{}: not looked at: {} launches of kernels whose memory is not known: {}\n", path,
                        report.unknown_launches, names);
  }
  const std::size_t races = RaceGroups(recording, report);
  text += fmt::format("{}: {} ({} accesses to memory)\n", path,
                      good         ? "no races"
                      : races == 1 ? "1 race"
                                   : fmt::format("{} races", races),
                      report.accesses);
  return text;
}

std::string SummaryOf(const Document& document) {
  return std::visit([](const auto& value) { return Summary(value); }, document);
}

int ValidateFile(const std::string& path, bool schedules) {
  const Result<Document> document = ReadDocument(path);
  if (!document) return Fail(document.error());
  const std::string name = Printable(path);
  if (const auto* layout = std::get_if<StateLayout>(&*document)) {
    if (Status checked = CheckStateLayout(*layout); !checked) {
      checked.error().file = path;
      return Fail(checked.error());
    }
  }
  const Plan* plan = std::get_if<Plan>(&*document);
  const ReshardPlan* reshard = std::get_if<ReshardPlan>(&*document);
  const Recording* recording = std::get_if<Recording>(&*document);
  bool good = true;
  std::string verdict;
  if (plan != nullptr) verdict = VerdictText(name, *plan, good);
  if (reshard != nullptr) verdict = VerdictText(name, *reshard, good);
  if (recording != nullptr) verdict = VerdictText(name, *recording, schedules, good);
  const bool has_layouts = reshard == nullptr || CheckReshardLayouts(*reshard);
  const std::string summary = has_layouts ? SummaryOf(*document) : "resharding";
  const std::string text = fmt::format("{}: {}\n{}", name, summary, verdict);
  return PrintAnswer(text, good ? 0 : ExitCode(ErrorCode::kNegative));
}

// ---- several ranks ----

int FailUsage(std::string message) {
  return Fail({.code = ErrorCode::kUsage, .message = std::move(message)});
}

// The plans of the ranks 0, 1, ..., or the exit code of a failure.
std::expected<std::vector<Plan>, int> ReadPlansOfRanks(const std::vector<std::string>& files) {
  std::vector<Plan> plans;
  for (std::size_t rank = 0; rank < files.size(); ++rank) {
    Result<Document> document = ReadDocument(files[rank]);
    if (!document) return std::unexpected(Fail(document.error()));
    Plan* plan = std::get_if<Plan>(&*document);
    if (plan == nullptr) {
      return std::unexpected(FailUsage(fmt::format("--ranks-apart takes plans, but {} is a {}",
                                                   Printable(files[rank]), SummaryOf(*document))));
    }
    plans.push_back(std::move(*plan));
  }
  return plans;
}

std::string RanksText(const std::vector<std::string>& files, const std::vector<Plan>& plans,
                      const std::vector<Violation>& violations) {
  std::string text;
  for (std::size_t first = 0, next = 0; first < files.size(); first = next) {
    while (next < files.size() && files[next] == files[first]) ++next;
    const std::string who =
        next - first == 1 ? fmt::format("rank {}", first) : fmt::format("ranks {} to {}", first, next - 1);
    text += fmt::format("{}: {}: {}\n", who, Printable(files[first]), Summary(plans[first]));
  }
  for (const Violation& violation : violations) {
    const auto rank = static_cast<std::size_t>(violation.rank);
    text += fmt::format("{}: {}\n", Printable(files[rank]), Explain(plans[rank], violation));
  }
  if (!violations.empty())
    return text + fmt::format("{} ranks: {}\n", files.size(), Count(violations.size()));
  text += fmt::format(
      "{} ranks: the plans verify together: the same collectives in the same order, and no circle of waits\n",
      files.size());
  for (std::size_t rank = 0; rank < files.size(); ++rank) {
    const bool is_new = std::find(files.begin(), files.begin() + rank, files[rank]) == files.begin() + rank;
    if (is_new) text += RemarksText(Printable(files[rank]), plans[rank]);
  }
  return text;
}

int ValidateRanks(const std::vector<std::string>& files) {
  const std::expected<std::vector<Plan>, int> plans = ReadPlansOfRanks(files);
  if (!plans) return plans.error();
  const std::int64_t ranks = plans->front().world_size;
  if (std::ssize(files) != ranks) {
    return FailUsage(
        fmt::format("{} is a plan for {} ranks, but --ranks-apart is given {} file{}: give the plan of each "
                    "rank, 0 to {} in "
                    "this order (one file may stand for several ranks), or leave --ranks-apart out if all "
                    "ranks run one plan",
                    Printable(files.front()), ranks, files.size(), files.size() == 1 ? "" : "s", ranks - 1));
  }
  const std::vector<Violation> violations = VerifyRanks(*plans);
  return PrintAnswer(RanksText(files, *plans, violations),
                     violations.empty() ? 0 : ExitCode(ErrorCode::kNegative));
}

}  // namespace

void AddValidateCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "validate",
      "Check documents of any kind; for a plan, run the verifier and explain each violation; for "
      "a recording, prove that nothing races");
  command->footer(
      "Examples: shardplan validate trace.json plan.json\n"
      "          shardplan validate --ranks-apart rank0.json rank1.json\n"
      "          shardplan validate recording.json.gz\n"
      "Exit code: the worst of all files (0 fine, 1 a plan does not verify or a recording races, 2 not a "
      "plan for each rank,\n"
      "3 not a document).");
  struct Options {
    std::vector<std::string> files;
    bool ranks_apart = false;
    bool schedules = false;
  };
  auto options = std::make_shared<Options>();
  command->add_option("FILE", options->files, "Documents (JSON, or a plan as `shardplan show` prints it)")
      ->required();
  command->add_flag(
      "--ranks-apart", options->ranks_apart,
      "The files are the plans of the ranks 0, 1, ... of one job: verify each, and that all issue the "
      "same collectives in the same order and no rank waits for ever");
  command->add_flag(
      "--schedules", options->schedules,
      "Of each race in a recording, the mode of the device in software that shows it as a wrong "
      "number (shardplan rehearse --show runs it)");
  command->callback([options, &invocation] {
    if (options->ranks_apart) {
      invocation.exit_code = ValidateRanks(options->files);
      return;
    }
    for (const std::string& file : options->files) {
      invocation.exit_code = std::max(invocation.exit_code, ValidateFile(file, options->schedules));
    }
  });
}

}  // namespace shardplan::cli

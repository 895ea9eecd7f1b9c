// SPDX-License-Identifier: Apache-2.0
// `explain`: what a plan does unit by unit, where its step goes, and of an optimised one why, and what memory
// is worth.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "commands/commands.h"
#include "flags/file_flag.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "support.h"
#include "texts/curve_picture.h"
#include "texts/explain_time.h"
#include "verified_plan.h"

namespace shardplan::cli {
namespace {

struct ExplainArguments {
  std::string plan, report, plot;
  bool no_verify = false;
  bool quiet = false;
};

double Milliseconds(Nanoseconds time) { return static_cast<double>(time.value) / 1e6; }
double Gibibytes(Bytes bytes) { return static_cast<double>(bytes.value) / (1 << 30); }

// Work for one unit in the step that repeats.
struct UnitWork {
  std::int64_t modules = 0, gathers = 0, parts = 0, reductions = 0, all_reductions = 0;
  Bytes whole_bytes;
  Nanoseconds gather_ns, part_ns, reduce_ns, all_reduce_ns;
  Nanoseconds exposed_ns;
  std::int64_t ranks = 1;  // that it is sharded over
  // Alike in words: what waits for it may differ.
  auto Kind() const {
    return std::tuple(modules, gathers, parts, reductions, all_reductions, whole_bytes, ranks);
  }
};

// Collectives that the model issues itself, of one kind on one communicator.
struct OwnCollectives {
  std::int64_t count = 0;
  Nanoseconds duration_ns;
  Bytes size_bytes;
};

struct PlanWork {
  std::vector<UnitWork> units;
  std::map<std::pair<CommunicatorId, CollectiveKind>, OwnCollectives> own;
};

Result<PlanWork> WorkOf(const Plan& plan) {
  PlanWork made;
  std::vector<UnitWork>& works = made.units;
  works.resize(plan.units.size());
  const std::unique_ptr<CostModel> costs = MakeCostModel(plan.cluster);
  const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *costs);
  if (!program) return std::unexpected(program.error());
  const auto last = static_cast<std::int32_t>(plan.steps.size()) - 1;
  const Result<EngineResult> run = RunStep(*program, last, nullptr);
  if (!run) return std::unexpected(run.error());
  const EngineStep& step = program->steps.back();
  for (std::size_t c = 0; c < step.code.size(); ++c) {
    const InstructionOrigin& origin = step.origins[c];
    if (origin.instruction < 0) continue;
    const Instruction& i = plan.steps.back()
                               .triggers[static_cast<std::size_t>(origin.trigger)]
                               .instructions[static_cast<std::size_t>(origin.instruction)];
    if (origin.entry >= 0 && step.code[c].work == WorkClass::kCollective) {
      const SegmentEntry& entry =
          plan.segments[static_cast<std::size_t>(i.segment)].entries[static_cast<std::size_t>(origin.entry)];
      const ModelCollective& issued = *std::get<OperatorEvent>(entry).collective;
      OwnCollectives& own = made.own[{issued.communicator, issued.kind}];
      ++own.count;
      own.duration_ns += step.code[c].duration_ns;
      own.size_bytes += issued.size_bytes;
    }
    if (i.unit < 0) continue;
    UnitWork& work = works[static_cast<std::size_t>(i.unit)];
    const Nanoseconds duration = step.code[c].duration_ns;
    const Unit& unit = plan.units[static_cast<std::size_t>(i.unit)];
    if (!IsCollective(i.kind)) continue;
    switch (*DescriptionOf(i.kind).collective) {
      case CollectiveKind::kAllGather: {
        const bool of_part = i.communicator == unit.post_forward_communicator && i.communicator >= 0;
        (of_part ? work.part_ns : work.gather_ns) += duration;
        ++(of_part ? work.parts : work.gathers);
        break;
      }
      case CollectiveKind::kReduceScatter:
        work.reduce_ns += duration;
        ++work.reductions;
        break;
      case CollectiveKind::kAllReduce:
        work.all_reduce_ns += duration;
        ++work.all_reductions;
        break;
      case CollectiveKind::kAllToAll:
      case CollectiveKind::kBroadcast:
      case CollectiveKind::kReduce:
      case CollectiveKind::kGather:
      case CollectiveKind::kScatter:
      case CollectiveKind::kSend:
      case CollectiveKind::kReceive:
        break;  // the model's own alone
    }
  }
  for (std::size_t u = 0; u < works.size(); ++u) {
    works[u].modules = static_cast<std::int64_t>(plan.units[u].modules.size());
    works[u].exposed_ns = run->unit_exposed_ns[u];
    const CommunicatorId shards = plan.units[u].shard_communicator;
    if (shards >= 0) works[u].ranks = plan.communicators[static_cast<std::size_t>(shards)].size;
    for (const UnitParameter& parameter : plan.units[u].parameters) {
      works[u].whole_bytes.value += Numel(parameter) * SizeBytes(ComputeDType(plan.units[u], parameter));
    }
  }
  return made;
}

std::string Times(std::int64_t count, Nanoseconds in_all) {
  if (count == 0) return "never";
  return fmt::format("{} a step ({:.3f} ms each)", count == 1 ? "once" : fmt::format("{} times", count),
                     Milliseconds(in_all) / static_cast<double>(count));
}

std::string ReductionText(const UnitWork& work) {
  std::string text;
  if (work.reductions > 0 || work.all_reductions == 0)
    text += "; reduced " + Times(work.reductions, work.reduce_ns);
  if (work.all_reductions > 0)
    text += "; all-reduced over replicas " + Times(work.all_reductions, work.all_reduce_ns);
  return text;
}

std::string UnitsText(const Plan& plan, const std::vector<UnitWork>& works) {
  std::string text;
  for (std::size_t first = 0; first < works.size();) {
    std::size_t end = first + 1;
    while (end < works.size() && works[end].Kind() == works[first].Kind()) ++end;
    const UnitWork& work = works[first];
    Nanoseconds exposed;
    for (std::size_t u = first; u < end; ++u) exposed += works[u].exposed_ns;
    std::string name = Printable(DisplayName(plan.units[first].fqn));
    if (end - first > 1)
      name += fmt::format(" ... {} ({} alike)", Printable(DisplayName(plan.units[end - 1].fqn)), end - first);
    text += fmt::format("{}: {} module{}, {:.3f} GiB whole\n", name, work.modules,
                        work.modules == 1 ? "" : "s", Gibibytes(work.whole_bytes));
    if (work.whole_bytes.value == 0) {
      text += "  no parameters: nothing is gathered or reduced\n";
    } else {
      // Over a mesh without a dimension that shards, the gradients are all-reduced alone.
      text += work.gathers == 0 && work.parts == 0
                  ? "  whole on every rank, never gathered"
                  : fmt::format("  gathered from {} ranks {}",
                                work.ranks == plan.world_size ? "all" : std::to_string(work.ranks),
                                Times(work.gathers, work.gather_ns));
      if (work.parts > 0) text += ", from a part of them " + Times(work.parts, work.part_ns);
      text += ReductionText(work) + "\n";
    }
    if (work.gathers == 1 && work.parts == 0 && work.whole_bytes.value > 0) {
      text +=
          fmt::format("  kept whole between its reads: {:.3f} GiB that save {:.3f} ms of a link each time\n",
                      Gibibytes(work.whole_bytes), Milliseconds(work.gather_ns));
    }
    text += fmt::format("  the model waits {:.3f} ms for {}\n", Milliseconds(exposed),
                        end - first > 1 ? "them" : "it");
    first = end;
  }
  return text;
}

std::string OwnText(const Plan& plan, const PlanWork& work) {
  std::string text;
  for (const auto& [what, own] : work.own) {
    if (text.empty()) text = "\nthe model's own collectives\n";
    text += fmt::format("  {} on {}: {}, {:.3f} GiB in all\n", Name(what.second),
                        Printable(plan.communicators[static_cast<std::size_t>(what.first)].name),
                        Times(own.count, own.duration_ns), Gibibytes(own.size_bytes));
  }
  return text;
}

std::string CurveText(const Optimization& report) {
  std::string text = "\nwhat memory is worth (of the plans that were found)\n";
  const CurvePoint* before = nullptr;
  for (const CurvePoint& point : report.curve) {
    text += fmt::format("  {:8.2f} GiB {:12.3f} ms", Gibibytes(point.peak_reserved_bytes),
                        Milliseconds(point.step_ns));
    if (before != nullptr) {
      const double more = Gibibytes(point.peak_reserved_bytes - before->peak_reserved_bytes);
      text += fmt::format("   {:10.3f} ms for each GiB",
                          Milliseconds(before->step_ns - point.step_ns) / std::max(more, 1e-9));
    }
    if (point.peak_reserved_bytes == report.peak_reserved_bytes && point.step_ns == report.step_ns)
      text += "   this plan";
    text += "\n";
    before = &point;
  }
  return text;
}

std::string ReportText(const Optimization& report) {
  std::string text = "\ndecisions, and what each is worth\n";
  for (const DecisionReport& decision : report.decisions) {
    text += fmt::format("  {}: {}\n", Printable(decision.decision), Printable(decision.chosen));
    const bool smaller = decision.without_bytes < report.peak_reserved_bytes;
    const Bytes apart = smaller ? report.peak_reserved_bytes - decision.without_bytes
                                : decision.without_bytes - report.peak_reserved_bytes;
    if (decision.worth_ns.value == 0 && apart.value == 0) continue;
    text += fmt::format("    with FSDP2's default the step is {:.3f} ms {}, and needs {:.2f} GiB {}{}\n",
                        Milliseconds({std::abs(decision.worth_ns.value)}),
                        decision.worth_ns.value < 0 ? "shorter" : "longer", Gibibytes(apart),
                        smaller ? "less" : "more", decision.fits_without ? "" : ": not in the budget");
  }
  return text + CurveText(report);
}

Status RunExplain(const ExplainArguments& arguments) {
  const std::vector<OutputFile> outputs = {{"--plot", arguments.plot}};
  const bool prints = !HasStandardOutput(outputs);
  if (Status s = CheckOutputs({arguments.plan, arguments.report}, outputs, prints); !s) return s;
  if (arguments.report.empty() && !arguments.plot.empty())
    return MakeError(ErrorCode::kUsage, "--plot draws the curve of a report: give --report, too");
  const Result<Plan> plan = ReadVerifiedPlan(arguments.plan, arguments.no_verify);
  if (!plan) return std::unexpected(plan.error());
  Result<PlanWork> works = WorkOf(*plan);
  if (!works) {
    if (works.error().file.empty()) works.error().file = arguments.plan;
    return std::unexpected(std::move(works.error()));
  }
  const Result<std::string> time = TimeText(*plan);
  if (!time) return std::unexpected(time.error());
  std::string text = UnitsText(*plan, works->units) + OwnText(*plan, *works) + *time;
  if (!arguments.report.empty()) {
    const Result<Optimization> report = ReadOptimization(arguments.report);
    if (!report) return std::unexpected(report.error());
    if (report->plan_digest != DigestOfJson(*plan)) {
      return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                   .message = "the report is another plan's",
                                   .file = arguments.report,
                                   .pointer = "/plan_digest"});
    }
    text += ReportText(*report);
    if (!arguments.plot.empty()) {
      if (Status s = WriteAndSay(arguments.plot, CurvePicture(*report), arguments.quiet); !s) return s;
    }
  }
  return prints ? PrintText(text) : Status{};
}

}  // namespace

void AddExplainCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand("explain",
                                         "What a plan does unit by unit, and where its step's time goes; "
                                         "with the report of optimize: why, and what "
                                         "memory is worth");
  command->footer("Example: shardplan explain plan.json --report r.json --plot curve.svg");
  auto options = std::make_shared<ExplainArguments>();
  command->add_option("PLAN", options->plan, "The plan")->required();
  AddFile(*command, "--report", options->report, "As `shardplan optimize --report` writes it");
  AddFile(*command, "--plot", options->plot, "Write time against memory, with the baselines as points (SVG)");
  AddNoVerifyFlag(*command, options->no_verify);
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  command->callback([options, &invocation] {
    const Status status = RunExplain(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli

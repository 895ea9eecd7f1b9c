// SPDX-License-Identifier: Apache-2.0
// `compare`: why the step and the memory of two plans differ, and how a measured step differs from its plan.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <variant>
#include <vector>

#include "commands/commands.h"
#include "commands/recorded_time.h"
#include "flags/file_flag.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/critical_path.h"
#include "shardplan/simulator/measurements.h"
#include "shardplan/simulator/simulate.h"
#include "support.h"
#include "texts/measured_text.h"
#include "verified_plan.h"

namespace shardplan::cli {
namespace {

using Json = nlohmann::ordered_json;

struct CompareArguments {
  std::string a, b, cluster, json, html;
  bool no_verify = false;
  bool quiet = false;
};

struct Measure {
  double size;
  const char* name;
  int digits;
};
constexpr Measure kMilliseconds{1e6, "ms", 3};
constexpr Measure kGibibytes{1 << 30, "GiB", 3};

std::string Line(const std::string& label, const Difference& of, const Measure& unit) {
  const auto in = [&](std::int64_t value) { return static_cast<double>(value) / unit.size; };
  return fmt::format("  {:<28} {:>12.{}f} {:>12.{}f} {:>+12.{}f} {}\n", Printable(label), in(of.a),
                     unit.digits, in(of.b), unit.digits, in(of.b - of.a), unit.digits, unit.name);
}

// The causes, the largest difference first; their sum below them.
std::string Table(const std::string& title, std::vector<Difference> causes, const Difference& sum,
                  const Measure& unit) {
  std::ranges::stable_sort(causes, [](const Difference& x, const Difference& y) {
    return std::abs(x.b - x.a) > std::abs(y.b - y.a);
  });
  std::string text = fmt::format("{:<30} {:>12} {:>12} {:>12}\n", title, "A", "B", "B - A");
  for (const Difference& cause : causes) text += Line(cause.cause, cause, unit);
  return text + Line(sum.cause, sum, unit);
}

std::string OneWord(const Json& value) { return value.is_null() ? "-" : value.dump(); }

// Values of two documents that differ, by their place.
std::string DifferentValues(const std::string& a, const std::string& b) {
  const Json of_a = Json::parse(a).flatten(), of_b = Json::parse(b).flatten();
  std::string text;
  const auto say = [&](const std::string& place, const Json& x, const Json& y) {
    text += fmt::format("  strategy {}: {} -> {}\n", Printable(place), Printable(OneWord(x)),
                        Printable(OneWord(y)));
  };
  for (const auto& [place, value] : of_a.items()) {
    const auto other = of_b.find(place);
    if (other == of_b.end() || *other != value) say(place, value, other == of_b.end() ? Json() : *other);
  }
  for (const auto& [place, value] : of_b.items()) {
    if (!of_a.contains(place)) say(place, Json(), value);
  }
  return text;
}

std::string MadeFrom(const Plan& a, const Plan& b) {
  std::string text;
  const auto differ = [&](const char* what, const std::string& x, const std::string& y) {
    if (x != y) text += fmt::format("  {}: {} -> {}\n", what, Printable(x), Printable(y));
  };
  differ("model", a.model, b.model);
  differ("policy", a.policy, b.policy);
  differ("cluster", a.cluster.name, b.cluster.name);
  differ("ranks", std::to_string(a.world_size), std::to_string(b.world_size));
  differ("tokens a step", std::to_string(a.tokens_per_step), std::to_string(b.tokens_per_step));
  if (a.model == b.model && a.digests.trace != b.digests.trace) text += "  the traces differ\n";
  text += DifferentValues(ToJson(a.strategy), ToJson(b.strategy));
  return text.empty() ? "the plans are made from the same\n"
                      : "what the plans are made from, A -> B\n" + text;
}

std::string InUnits(std::int64_t value, const Measure& unit) {
  return fmt::format("{:.{}f}", static_cast<double>(value) / unit.size, unit.digits);
}

// "most of it: exposed all_gather (-30.200 ms)": the cause that moves most in the direction of the sum.
std::string LargestCause(const std::vector<Difference>& causes, const Difference& sum, const Measure& unit) {
  const auto along = [&](const Difference& d) { return sum.b > sum.a ? d.b - d.a : d.a - d.b; };
  const auto most = std::ranges::max_element(causes, {}, along);
  if (most == causes.end() || along(*most) <= 0) return "";
  const std::int64_t change = most->b - most->a;
  const char* part = 2 * along(*most) > std::abs(sum.b - sum.a) ? "most of it" : "the largest part";
  return fmt::format("; {}: {} ({}{} {})", part, Printable(most->cause), change > 0 ? "+" : "",
                     InUnits(change, unit), unit.name);
}

// Which is faster and which needs less, by how much, and from which cause.
std::string Verdict(const Comparison& c) {
  const Difference step{"step", c.step_a_ns.value, c.step_b_ns.value};
  const Difference memory{"needed", c.memory_a_bytes.value, c.memory_b_bytes.value};
  std::string text;
  if (step.a == step.b) {
    text += fmt::format("Both steps take {} ms.\n", InUnits(step.a, kMilliseconds));
  } else {
    const auto [faster, slower] = std::minmax(step.a, step.b);
    text += fmt::format(
        "{} is {:.2f} % faster: its step takes {} ms, the other one's {} ms{}.\n",
        step.b < step.a ? "B" : "A",
        100 * (static_cast<double>(slower) / static_cast<double>(std::max<std::int64_t>(faster, 1)) - 1),
        InUnits(faster, kMilliseconds), InUnits(slower, kMilliseconds),
        LargestCause(c.time_ns, step, kMilliseconds));
  }
  if (memory.a == memory.b) {
    text += fmt::format("Both need {} GiB of the device.\n", InUnits(memory.a, kGibibytes));
  } else {
    const auto [less, more] = std::minmax(memory.a, memory.b);
    text += fmt::format("{} needs {} GiB less: {} GiB of the device, the other one {} GiB{}.\n",
                        memory.b < memory.a ? "B" : "A", InUnits(more - less, kGibibytes),
                        InUnits(less, kGibibytes), InUnits(more, kGibibytes),
                        LargestCause(c.memory_bytes, memory, kGibibytes));
  }
  if (!c.fits_a && !c.fits_b) return text + "Neither fits its device.\n";
  if (!c.fits_a || !c.fits_b) text += fmt::format("{} does not fit its device.\n", c.fits_a ? "B" : "A");
  return text;
}

Json CausesJson(const Comparison& comparison) {
  const auto list = [](const std::vector<Difference>& causes) {
    Json entries = Json::array();
    for (const Difference& cause : causes)
      entries.push_back({{"cause", cause.cause}, {"a", cause.a}, {"b", cause.b}});
    return entries;
  };
  return {{"step_a_ns", comparison.step_a_ns.value},
          {"step_b_ns", comparison.step_b_ns.value},
          {"time_ns", list(comparison.time_ns)},
          {"memory_a_bytes", comparison.memory_a_bytes.value},
          {"memory_b_bytes", comparison.memory_b_bytes.value},
          {"memory_bytes", list(comparison.memory_bytes)},
          {"fits_a", comparison.fits_a},
          {"fits_b", comparison.fits_b}};
}

// On the named cluster, where one is.
Status MoveToCluster(const CompareArguments& arguments, const std::string& path, Plan& plan) {
  if (arguments.cluster.empty()) return {};
  Result<Cluster> cluster = ClusterForPlan(arguments.cluster, path, plan, arguments.quiet);
  if (!cluster) return std::unexpected(std::move(cluster.error()));
  plan.cluster = std::move(*cluster);
  return {};
}

Status RunMeasured(const CompareArguments& arguments, const Plan& plan, const std::string& plan_digest,
                   const Report& measured, bool prints) {
  Result<Simulation> simulation =
      Simulate(plan, {.record_timeline = !arguments.html.empty(), .fit = {}, .plan_digest = plan_digest});
  if (!simulation) {
    if (simulation.error().file.empty()) simulation.error().file = arguments.a;
    return std::unexpected(std::move(simulation.error()));
  }
  if (!plan.cluster.sources.empty()) {
    const Result<Sensitivity> sensitivity = AnalyseSensitivity(plan, plan.cluster);
    if (!sensitivity) return std::unexpected(sensitivity.error());
    FillInterval(*sensitivity, simulation->report);
  }
  Result<MeasuredComparison> comparison = CompareMeasured(simulation->report, measured);
  if (!comparison) {
    comparison.error().file = arguments.b;
    return std::unexpected(std::move(comparison.error()));
  }
  if (!arguments.json.empty()) {
    const std::string text = ToJson(*comparison).dump(2, ' ', true) + "\n";
    if (Status s = WriteAndSay(arguments.json, text, arguments.quiet); !s) return s;
  }
  if (!arguments.html.empty()) {
    const std::string page = MeasuredHtml(plan, *simulation, measured);
    if (Status s = WriteAndSay(arguments.html, page, arguments.quiet); !s) return s;
  }
  if (!prints) return {};
  const MeasuredReport& m = measured.measured;
  return PrintText(fmt::format("predicted: {} on {}\nmeasured:  {}: {}, rank {} of {}, {} steps\n\n",
                               Printable(arguments.a), Printable(plan.cluster.name), Printable(arguments.b),
                               Printable(m.device), m.rank, measured.world_size, m.steps_ns.size()) +
                   MeasuredText(*comparison, simulation->report, measured));
}

// A recording's time beside a measured step, row by row. It has no units to find causes in.
Status RunRecorded(const CompareArguments& arguments, const Recording& recording, const Document& other,
                   bool prints) {
  const auto* measured = std::get_if<Report>(&other);
  if (measured == nullptr) {
    return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                 .message = "a recording is compared with a measured report",
                                 .file = arguments.b,
                                 .pointer = "/schema",
                                 .found = "another document",
                                 .expected = "a report of import-profile"});
  }
  if (!arguments.json.empty() || !arguments.html.empty()) {
    return MakeError(ErrorCode::kUsage,
                     "--json and --html are of plans: a recording's step has no causes by unit");
  }
  const Result<RecordedTime> time = TimeOfRecordings({&recording}, {arguments.a}, arguments.cluster, 0);
  if (!time) return std::unexpected(time.error());
  return prints ? PrintText(ComparisonTable({time->simulations.front().report, *measured})) : Status{};
}

Status RunCompare(const CompareArguments& arguments) {
  const std::vector<OutputFile> outputs = {{"--json", arguments.json}, {"--html", arguments.html}};
  const bool prints = !HasStandardOutput(outputs);
  if (Status s = CheckOutputs({arguments.a, arguments.b, arguments.cluster}, outputs, prints); !s) return s;
  Result<std::variant<Plan, Recording>> first = ReadVerifiedPlanOrRecording(arguments.a, arguments.no_verify);
  if (!first) return std::unexpected(first.error());
  Result<Document> other = ReadDocument(arguments.b);
  if (!other) return std::unexpected(other.error());
  if (const auto* recording = std::get_if<Recording>(&*first)) {
    return RunRecorded(arguments, *recording, *other, prints);
  }
  Plan* const a = std::get_if<Plan>(&*first);
  if (const auto* measured = std::get_if<Report>(&*other)) {
    const std::string digest = DigestOfJson(*a);
    if (Status s = MoveToCluster(arguments, arguments.a, *a); !s) return s;
    return RunMeasured(arguments, *a, digest, *measured, prints);
  }
  auto* b = std::get_if<Plan>(&*other);
  if (b == nullptr) {
    return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                 .message = "this is no plan, and no measured report",
                                 .file = arguments.b,
                                 .pointer = "/schema",
                                 .found = "another document",
                                 .expected = "a plan, or a report of import-profile"});
  }
  if (!arguments.html.empty())
    return MakeError(ErrorCode::kUsage, "--html shows a measured step; for two plans: simulate A B --html");
  if (Status s = VerifyForUse(arguments.b, *b, arguments.no_verify); !s) return s;
  if (Status s = MoveToCluster(arguments, arguments.a, *a); !s) return s;
  if (!arguments.cluster.empty() && b->world_size == a->world_size) {
    b->cluster = a->cluster;  // a pipe is read once
  } else if (Status s = MoveToCluster(arguments, arguments.b, *b); !s) {
    return s;
  }
  const Result<Comparison> comparison = CompareSteps(*a, *b);
  if (!comparison) return std::unexpected(comparison.error());
  if (!arguments.json.empty()) {
    const std::string text = CausesJson(*comparison).dump(2, ' ', true) + "\n";
    if (Status s = WriteAndSay(arguments.json, text, arguments.quiet); !s) return s;
  }
  if (!prints) return {};
  const Difference step{"step", comparison->step_a_ns.value, comparison->step_b_ns.value};
  const Difference memory{"needed", comparison->memory_a_bytes.value, comparison->memory_b_bytes.value};
  return PrintText(fmt::format("A: {}\nB: {}\n\n", Printable(arguments.a), Printable(arguments.b)) +
                   Verdict(*comparison) + "\n" + MadeFrom(*a, *b) + "\n" +
                   Table("time, on the critical path", comparison->time_ns, step, kMilliseconds) + "\n" +
                   Table("memory, at the peak", comparison->memory_bytes, memory, kGibibytes));
}

}  // namespace

void AddCompareCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand("compare",
                                         "Why the step time and the memory of two plans differ, or a plan "
                                         "and a measured step: causes that add up "
                                         "exactly");
  command->footer(
      "Examples: shardplan compare fsdp1.json fsdp2.json\n"
      "          shardplan compare plan.json measured.json --html page.html\n"
      "measured.json: shardplan import-profile.");
  auto options = std::make_shared<CompareArguments>();
  command->add_option("A", options->a, "A plan, or a recording (with --cluster and a measured report)")
      ->required();
  command->add_option("B", options->b, "Another, or a measured report")->required();
  AddFile(*command, "--cluster", options->cluster,
          "Costs from this cluster (a file, a shipped one, or a device) instead of the plans' own");
  AddFile(*command, "--json", options->json, "Write the causes (JSON; '-': standard output, no table)");
  AddFile(*command, "--html", options->html,
          "Of a measured report: write a page with both steps on one timeline");
  AddNoVerifyFlag(*command, options->no_verify);
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  command->callback([options, &invocation] {
    const Status status = RunCompare(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli

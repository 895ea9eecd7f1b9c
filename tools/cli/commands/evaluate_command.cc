// SPDX-License-Identifier: Apache-2.0
// `evaluate`: many configurations in one process, what is equal between them made once.
#include <fmt/format.h>

#include <deque>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cluster_names.h"
#include "commands/commands.h"
#include "flags/cluster_choice.h"
#include "flags/default_cluster.h"
#include "flags/memory_budget.h"
#include "flags/plan_flags.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/simulate.h"
#include "support.h"
#include "trace_names.h"

namespace shardplan::cli {
namespace {

using Answer = nlohmann::ordered_json;

// Arguments of `plan` that change its plan.
struct Question {
  std::string trace;
  std::optional<std::int64_t> seq;
  std::string strategy;
  std::vector<std::string> skip;
  std::string budget;
  ClusterFlags cluster;
  PlanFlags flags;
};

Answer Refusal(std::string_view command, std::string_view text) {
  return {{"error", fmt::format("{}: {}", command, text)}};
}
Answer Refusal(std::string_view command, const Error& error) {
  return Refusal(command, fmt::format("shardplan: error: {}", ToString(error)));
}

// `budget`: of what the allocator may reserve for the plan. `why`: WhyNoRanksFit.
Answer AnswerOf(const Plan& plan, const Report& report, const std::optional<Bytes>& budget,
                std::string_view why) {
  return {{"step_ns", report.step_ns.value},
          {"world_size", report.world_size},
          {"tokens_per_step", plan.tokens_per_step * plan.world_size / plan.ranks_per_batch},  // of all ranks
          {"tokens_per_second_per_rank", report.tokens_per_second_per_rank},
          {"model_flops_utilization_ppm", report.model_flops_utilization_ppm},
          {"exposed_communication_ns", report.exposed_communication_ns.value},
          {"peak_bytes", report.memory.peak_bytes.value},
          {"reserved_bytes", report.memory.reserved_bytes.value},
          {"needed_bytes", NeededBytes(report.memory).value},
          {"budget_bytes", budget ? Answer(budget->value) : Answer()},
          {"cache_releases", report.memory.cache_releases},
          {"fits", report.memory.fits},
          {"no_ranks_fit", why}};
}

Result<Question> ParseQuestion(const std::vector<std::string>& arguments) {
  CLI::App app{"", "shardplan plan"};
  Question question;
  bool quiet = false;
  app.add_option("TRACE", question.trace)->required();
  AddSeqFlag(app, question.seq);
  AddClusterFlags(app, question.cluster, "");
  app.add_option("--strategy", question.strategy);
  app.add_option("--skip", question.skip)->allow_extra_args(false);
  app.add_option("--memory-budget", question.budget);
  app.add_flag("-q,--quiet", quiet);
  AddPlanFlags(app, question.flags);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ParseError& error) {
    return MakeError(ErrorCode::kUsage, error.what());
  }
  return question;
}

// [Note: what configurations share] Questions about one trace come one after the other, and a plan depends on
// nothing of a cluster but its number of ranks. So the last trace, every cluster and the last plan are kept.
// A plan is verified for the first number of ranks (one rank apart) of each trace and strategy.
class Evaluator {
 public:
  Answer operator()(const std::vector<std::string>& arguments) {
    const Result<Question> question = ParseQuestion(arguments);
    if (!question) return Refusal("plan", question.error());
    if (const Status planned = MakeThePlan(*question); !planned) return Refusal("plan", planned.error());
    const Result<std::optional<Bytes>> budget = ParseMemoryBudget(question->budget);
    if (!budget) return Refusal("plan", budget.error());
    const FitOptions fit{.budget_bytes = *budget};
    const Result<Simulation> simulation = Simulate(plan_, {.record_timeline = false, .fit = fit});
    if (!simulation) return Refusal("simulate", simulation.error());
    const bool fits = simulation->report.memory.fits;
    return AnswerOf(plan_, simulation->report, AllocatorBudget(plan_, fit),
                    fits ? std::string() : WhyNoRanksFit(plan_, fit));
  }

 private:
  // `plan_` is that of the question then.
  Status MakeThePlan(const Question& question) {
    const Result<std::string> path = ResolveTrace(question.trace, question.seq);
    if (!path) return std::unexpected(path.error());
    if (Status read = ReadTheTrace(*path); !read) return std::unexpected(std::move(read.error()));
    Result<GivenStrategy> strategy = StrategyOf(question.strategy, question.flags);
    if (!strategy) return std::unexpected(strategy.error());
    if (Status made = ApplyTraceFlags(question.flags, *trace_, trace_path_, strategy->strategy); !made)
      return std::unexpected(made.error());
    const ReadClusterFunction read = [this](const std::string& path) { return Read(path); };
    ClusterFlags flags = question.cluster;
    flags.traced_ranks = trace_->world_size;
    Result<ChosenCluster> chosen = ChooseClusterOrDefault(flags, strategy->strategy, question.strategy, read);
    if (!chosen) return std::unexpected(std::move(chosen.error()));
    const std::string same = fmt::format("{}\n{}\n{}", ToJson(strategy->strategy),
                                         question.flags.own_policy.library, fmt::join(question.skip, "\n"));
    const std::int64_t ranks = chosen->cluster.ranks;
    if (planned_ == std::pair(same, ranks)) {
      plan_.cluster = std::move(chosen->cluster);
      return {};
    }
    planned_.reset();
    // No figure of the answer depends on these passes.
    PlanOptions options{.verify = !verified_.contains({same, ranks == 1}),
                        .skip = {"build_graph", "linearise", "digest"}};
    options.skip.insert(options.skip.end(), question.skip.begin(), question.skip.end());
    Result<PlannerOutput> planned =
        PlanTrace(*trace_, trace_path_, *strategy, question.strategy, chosen->cluster, options);
    if (!planned) return std::unexpected(std::move(planned.error()));
    plan_ = std::move(planned->plan);
    planned_ = {same, ranks};
    verified_.insert({same, ranks == 1});
    return {};
  }

  Status ReadTheTrace(const std::string& path) {
    if (trace_ && trace_path_ == path) return {};
    trace_.reset();
    planned_.reset();
    verified_.clear();
    Result<Trace> read = ReadTrace(path);
    if (!read) return std::unexpected(std::move(read.error()));
    trace_ = std::move(*read);
    trace_path_ = path;
    return {};
  }

  Result<Cluster> Read(const std::string& path) {
    const auto known = clusters_.find(path);
    if (known != clusters_.end()) return known->second;
    Result<Cluster> read = ReadCluster(path);
    if (read) clusters_.emplace(path, *read);
    return read;
  }

  std::optional<Trace> trace_;
  std::string trace_path_;
  std::map<std::string, Cluster> clusters_;                      // by path
  std::optional<std::pair<std::string, std::int64_t>> planned_;  // strategy and ranks of `plan_`
  Plan plan_;
  std::set<std::pair<std::string, bool>> verified_;  // of the trace: strategy, and whether of one rank
};

// {"cluster": NAME, "ranks": N}: the file that `--cluster NAME --ranks N` reads. {"document": FILE}: the
// cluster of a file, as documents are written, and what NCCL takes for a communicator of several ranks.
std::optional<Answer> OfCluster(const Answer& question) {
  if (!question.is_object()) return std::nullopt;
  if (question.size() == 1 && question.contains("document") && question["document"].is_string()) {
    const Result<Cluster> cluster = ReadCluster(question["document"].get<std::string>());
    if (!cluster) return Refusal("cluster", cluster.error());
    return Answer{{"text", ToJson(*cluster)},
                  {"nccl_buffer_bytes", NcclBufferBytes(Communicator{.size = 2}).value}};
  }
  if (!question.contains("cluster") || !question.contains("ranks")) return std::nullopt;
  const Answer& name = question["cluster"];
  const Answer& ranks = question["ranks"];
  if (question.size() != 2 || !name.is_string() || !ranks.is_number_integer()) return std::nullopt;
  const Result<ClusterName> found = ResolveCluster(name.get<std::string>(), ranks.get<std::int64_t>());
  if (!found) return Refusal("cluster", found.error());
  return Answer{{"path", found->path}};
}

Status RunEvaluate() {
  Evaluator evaluate;
  for (std::string line; std::getline(std::cin, line);) {
    const auto question = Answer::parse(line, nullptr, false);
    if (const std::optional<Answer> of_cluster = OfCluster(question)) {
      const std::string answer = of_cluster->dump(-1, ' ', false, Answer::error_handler_t::replace) + "\n";
      if (Status written = WriteOutput("-", answer); !written) return written;
      continue;
    }
    std::vector<std::string> arguments;
    if (!question.is_array() || !std::ranges::all_of(question, [](const auto& a) { return a.is_string(); })) {
      return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                   .message = "a line of standard input is no question",
                                   .found = line.substr(0, 100),
                                   .expected = "a JSON list of arguments of `shardplan plan`"});
    }
    for (const auto& argument : question) arguments.push_back(argument.get<std::string>());
    const std::string answer =
        evaluate(arguments).dump(-1, ' ', false, Answer::error_handler_t::replace) + "\n";
    if (Status written = WriteOutput("-", answer); !written) return written;
  }
  return {};
}

}  // namespace

void AddEvaluateCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "evaluate", "Plan and simulate what each line of standard input asks for (as `sweep` does)");
  command->footer(
      "A line is a JSON list of arguments of `shardplan plan`; its answer is a line with the step's time and "
      "memory, or\nwhat was wrong.\n"
      "Example: echo '[\"trace.json\", \"--ranks\", \"64\", \"--cluster\", \"h100_sxm_64\"]' | shardplan "
      "evaluate ");
  command->callback([&invocation] {
    const Status status = RunEvaluate();
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli

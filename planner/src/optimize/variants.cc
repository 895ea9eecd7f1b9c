// SPDX-License-Identifier: Apache-2.0
// The variants of a job, and the fastest of their plans.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "optimize/outlook.h"
#include "optimize/prices.h"
#include "shardplan/planner/optimize.h"
#include "shardplan/schemas/program.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan {
namespace {

constexpr std::int64_t kMostMicrobatches = 100'000;  // of a step, as --accumulate has it

std::unexpected<Error> Refuse(std::string message, std::string found, std::string expected) {
  return std::unexpected(Error{.code = ErrorCode::kUsage,
                               .message = std::move(message),
                               .found = std::move(found),
                               .expected = std::move(expected)});
}

std::string MeshText(const std::vector<StrategyMeshDim>& mesh) {
  std::string text;
  for (const StrategyMeshDim& dim : mesh)
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", dim.name, dim.size);
  return text;
}

Error InTrace(const NamedTrace& trace, std::string pointer, std::string message, std::string found,
              std::string expected) {
  return {.code = ErrorCode::kBadInput,
          .message = std::move(message),
          .file = trace.path,
          .pointer = std::move(pointer),
          .found = std::move(found),
          .expected = std::move(expected)};
}

std::string ParameterText(const Parameter& parameter) {
  return fmt::format("{} {} {}", parameter.fqn, Name(parameter.dtype), fmt::join(parameter.shape, "x"));
}

// Which samples a step takes is comparable only between traces of one model, with samples of one size.
Status CheckAlike(const NamedTrace& first, std::int64_t first_size, const NamedTrace& other,
                  std::int64_t size) {
  const std::vector<Parameter>&a = first.trace->parameters, &b = other.trace->parameters;
  const std::string as_in = " as in " + first.path;
  for (std::size_t p = 0; p < std::max(a.size(), b.size()); ++p) {
    const std::string found = p < b.size() ? ParameterText(b[p]) : "no more parameters";
    const std::string expected = p < a.size() ? ParameterText(a[p]) : "no more parameters";
    if (found == expected) continue;
    return std::unexpected(InTrace(other, fmt::format("/parameters/{}", p), "the traces are of two models",
                                   found, expected + as_in));
  }
  const std::int64_t tokens = first.trace->tokens_per_batch / first_size;
  if (other.trace->tokens_per_batch != tokens * size)
    return std::unexpected(InTrace(other, "/tokens_per_batch", "the traces' samples are of two sizes",
                                   fmt::format("{} tokens in {}", other.trace->tokens_per_batch, size),
                                   fmt::format("{} in each,{}", tokens, as_in)));
  return {};
}

// Forward and backward of each micro-batch, then the optimizer.
StepProgram StepOf(std::int64_t microbatches, const Trace& trace, const Strategy& job) {
  StepProgram step;
  for (std::int32_t m = 0; m < microbatches; ++m) {
    AddMicrobatch(trace, m, step);
  }
  AddStepEnd(job.optimizer, step);
  return step;
}

bool IsPartOfAModel(const NamedTrace& trace) {
  return std::ranges::any_of(trace.trace->parameters,
                             [](const Parameter& parameter) { return !parameter.placements.empty(); });
}

// Every rank has samples of its own.
Status CheckIsDataParallel(const std::vector<NamedTrace>& traces, const Strategy& job,
                           std::string_view flag) {
  const auto is_own = [](const StrategyMeshDim& dim) {
    return dim.name == "shard" || dim.name == "replicate";
  };
  if (job.data_parallel || !std::ranges::all_of(job.mesh, is_own) ||
      std::ranges::any_of(traces, IsPartOfAModel))
    return Refuse(fmt::format("{}: the mesh has dimensions that are not FSDP's", flag), MeshText(job.mesh),
                  "a mesh of replicate and shard");
  return {};
}

// The figure that the search makes short.
Nanoseconds Judged(const Optimization& report) {
  return report.robust ? report.robust->worst_ns : report.step_ns;
}

class VariantsRun {
 public:
  VariantsRun(const std::vector<JobVariant>& variants, const Cluster& cluster, const OptimizeOptions& options)
      : variants_(variants), cluster_(cluster), options_(options), limit_(options.time_limit_ns.value) {
    for (const JobVariant& variant : variants) reports_.push_back(variant.says);
  }

  Result<OptimizeOutput> Run() {
    for (const std::size_t v : Order()) Try(v);
    if (!best_) return std::unexpected(WhyNothing());
    VariantReport& chosen = reports_[chosen_];
    chosen.outcome = VariantOutcome::kChosen;
    chosen.says.clear();
    Optimization& report = best_->report;
    report.variants_lower_bound_ns = LeastBound();
    report.variants = reports_;
    report.evaluations = evaluations_;
    report.complete =
        complete_ && std::ranges::count(reports_, VariantOutcome::kNotTried, &VariantReport::outcome) == 0;
    report.planning_ns.value = PassedNs();
    report.evaluations_per_second =
        evaluations_ * 1'000'000'000 / std::max<std::int64_t>(1, report.planning_ns.value);
    return std::move(*best_);
  }

 private:
  std::int64_t PassedNs() const {
    const auto passed = std::chrono::steady_clock::now() - begin_;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
  }

  // The most promising first: the others have to be faster than it.
  std::vector<std::size_t> Order() {
    std::vector<std::pair<Nanoseconds, std::size_t>> order;
    for (std::size_t v = 0; v < variants_.size(); ++v) {
      Result<optimize::Outlook> outlook =
          optimize::LookAt(*variants_[v].trace, variants_[v].job, cluster_, options_);
      if (outlook) {
        order.emplace_back(outlook->step_ns, v);
      } else {
        reports_[v].outcome = VariantOutcome::kRefused;
        Fail(v, std::move(outlook.error()));
      }
      outlooks_.push_back(outlook ? std::move(*outlook) : optimize::Outlook{});
    }
    std::ranges::sort(order);
    std::vector<std::size_t> in_order;
    for (const auto& [step_ns, v] : order) in_order.push_back(v);
    left_ = std::ssize(in_order);
    return in_order;
  }

  void Fail(std::size_t v, Error error) {
    reports_[v].says = ToString(error);
    if (!error_ || (error_->code != ErrorCode::kNegative && error.code == ErrorCode::kNegative))
      error_ = std::move(error);
  }

  // The first plan is made in any case: there is an answer to give.
  bool Ended() const {
    if (!best_ && !error_) return false;
    return (options_.stop != nullptr && options_.stop->load()) || (limit_ > 0 && PassedNs() >= limit_);
  }

  void Try(std::size_t v) {
    const std::int64_t share = limit_ > 0 ? std::max<std::int64_t>(1, (limit_ - PassedNs()) / left_) : 0;
    --left_;
    if (Ended()) {
      reports_[v].says = "the search ended before";
      return;
    }
    if (IsPassedOver(v)) return;
    if (options_.on_variant) options_.on_variant(VariantText(reports_[v]));
    OptimizeOptions options = options_;
    options.time_limit_ns = {share};
    Result<OptimizeOutput> output = Optimize(*variants_[v].trace, variants_[v].job, cluster_, options);
    if (!output) {
      reports_[v].outcome = output.error().code == ErrorCode::kNegative ? VariantOutcome::kDoesNotFit
                                                                        : VariantOutcome::kRefused;
      return Fail(v, std::move(output.error()));
    }
    const Optimization& report = output->report;
    evaluations_ += report.evaluations;
    complete_ = complete_ && report.complete;
    reports_[v].step_ns = report.step_ns;
    reports_[v].lower_bound_ns = report.lower_bound_ns;
    reports_[v].outcome = VariantOutcome::kSlower;
    const std::pair order{Judged(report), v};
    const bool is_better = !best_ || order < std::pair{Judged(best_->report), chosen_};
    const std::size_t slower = is_better ? chosen_ : v;
    if (best_) reports_[slower].says = "its fastest plan is slower";
    if (!is_better) return;
    best_ = std::move(*output);
    chosen_ = v;
  }

  bool IsPassedOver(std::size_t v) {
    const optimize::Outlook& outlook = outlooks_[v];
    VariantReport& report = reports_[v];
    if (!outlook.work) return false;
    if (const Bytes least = outlook.work->LeastMemory(); least > outlook.budget) {
      report.outcome = VariantOutcome::kCannotFit;
      Error error{.code = ErrorCode::kNegative,
                  .message = fmt::format("no plan of the class {} needs less than {} bytes, of {}",
                                         kPlanClass, least.value, outlook.budget.value)};
      Fail(v, std::move(error));
      return true;
    }
    if (!best_) return false;
    const Nanoseconds best_ns = Judged(best_->report);
    const Nanoseconds bound = BoundOf(outlook);
    if (bound < best_ns) return false;
    report.outcome = VariantOutcome::kCannotWin;
    report.lower_bound_ns = bound;
    report.says = "none of its plans is faster";
    return true;
  }

  Nanoseconds BoundOf(const optimize::Outlook& outlook) const {
    return optimize::LeastOf(optimize::FindBranches(*outlook.work, optimize::ChooseCuts(*outlook.work),
                                                    outlook.layouts, outlook.budget));
  }

  // A variant that cannot be planned or cannot fit has no plan that a bound could be about.
  Nanoseconds LeastBound() {
    Nanoseconds least = kLongestStep;
    for (std::size_t v = 0; v < reports_.size(); ++v) {
      VariantReport& report = reports_[v];
      if (report.outcome == VariantOutcome::kDoesNotFit && outlooks_[v].work)
        report.lower_bound_ns = BoundOf(outlooks_[v]);
      if (report.outcome == VariantOutcome::kRefused || report.outcome == VariantOutcome::kCannotFit)
        continue;
      if (report.lower_bound_ns.value == 0) return {};
      least = std::min(least, report.lower_bound_ns);
    }
    return least;
  }

  // The error of one of the variants, with a list of them all.
  Error WhyNothing() {
    Error error = error_.value_or(Error{.code = ErrorCode::kNegative, .message = "nothing was tried"});
    if (error.code != ErrorCode::kNegative || reports_.size() == 1) return error;
    error.message = "none of the variants has a plan that fits";
    for (const VariantReport& report : reports_)
      error.message += fmt::format("\n  {}: {}", VariantText(report), report.says);
    return error;
  }

  const std::vector<JobVariant>& variants_;
  const Cluster& cluster_;
  const OptimizeOptions& options_;
  const std::int64_t limit_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::vector<VariantReport> reports_;
  std::vector<optimize::Outlook> outlooks_;
  std::int64_t left_ = 0;  // variants to search
  std::optional<Error> error_;
  std::optional<OptimizeOutput> best_;
  std::size_t chosen_ = 0;
  std::int64_t evaluations_ = 0;
  bool complete_ = true;
};

}  // namespace

std::string VariantText(const VariantReport& variant) {
  std::string text = "mesh " + variant.mesh;
  if (variant.microbatches > 0)
    text += fmt::format(", micro-batch {} x {} a step", variant.microbatch_size, variant.microbatches);
  return text;
}

std::vector<std::vector<StrategyMeshDim>> MeshesOf(const Cluster& cluster) {
  std::vector<std::vector<StrategyMeshDim>> meshes;
  const std::int64_t node = std::max<std::int64_t>(1, cluster.ranks_per_node);
  for (std::int64_t shard = cluster.ranks; shard > 1; --shard) {
    if (cluster.ranks % shard != 0) continue;
    if (shard == cluster.ranks) {
      meshes.push_back({{"shard", shard}});
    } else if (shard % node == 0 || node % shard == 0) {
      meshes.push_back({{"replicate", cluster.ranks / shard}, {"shard", shard}});
    }
  }
  if (meshes.empty()) meshes.push_back({{"shard", cluster.ranks}});
  return meshes;
}

Result<std::int64_t> MicrobatchSizeOf(const Trace& trace) {
  std::optional<std::int64_t> size;
  for (std::size_t i = 0; i < trace.inputs.size(); ++i) {
    const TraceInput& input = trace.inputs[i];
    const std::int64_t first = input.shape.empty() ? 0 : input.shape.front();
    if (first < 1 || (size && first != *size) || trace.tokens_per_batch % first != 0) {
      return MakeInputError(
          fmt::format("/inputs/{}/shape", i),
          "how many samples a micro-batch has is read off the inputs' first dimension",
          fmt::format("{} of {}", input.shape.empty() ? "none" : std::to_string(first), input.name),
          size ? fmt::format("{}, as the inputs before it", *size)
               : fmt::format("a number that divides {} tokens", trace.tokens_per_batch));
    }
    size = first;
  }
  if (!size)
    return MakeInputError("/inputs",
                          "how many samples a micro-batch has is read off the inputs' first dimension",
                          "no input", "one at least");
  return *size;
}

Result<std::vector<JobVariant>> MakeVariants(const std::vector<NamedTrace>& traces, const Strategy& job,
                                             const Cluster& cluster, const VariantOptions& options) {
  std::vector<std::vector<StrategyMeshDim>> meshes = {job.mesh};
  if (options.meshes) {
    if (Status s = CheckIsDataParallel(traces, job, "--allow mesh"); !s) return std::unexpected(s.error());
    if (!job.mesh.empty())
      return Refuse("--allow mesh: the mesh is given, by --mesh or by the strategy", MeshText(job.mesh),
                    "no mesh, or no --allow mesh");
    meshes = MeshesOf(cluster);
  }
  if (traces.size() > 1 && !options.global_batch)
    return Refuse("several traces are micro-batches of one step: --global-batch says how many samples it has",
                  fmt::format("{} traces", traces.size()), "one trace, or --global-batch");
  std::vector<std::int64_t> sizes;
  if (options.global_batch) {
    if (Status s = CheckIsDataParallel(traces, job, "--global-batch"); !s) return std::unexpected(s.error());
    if (!job.program.empty())
      return Refuse("--global-batch: the training loop is given, by --accumulate or by the strategy",
                    "a loop", "none, or no --global-batch");
    for (const NamedTrace& trace : traces) {
      Result<std::int64_t> size = MicrobatchSizeOf(*trace.trace);
      if (!size) {
        size.error().file = trace.path;
        return std::unexpected(std::move(size.error()));
      }
      if (Status alike = CheckAlike(traces.front(), sizes.empty() ? *size : sizes.front(), trace, *size);
          !alike)
        return std::unexpected(std::move(alike.error()));
      if (std::ranges::find(sizes, *size) != sizes.end())
        return std::unexpected(InTrace(trace, "/inputs/0/shape", "two traces have the same micro-batch",
                                       std::to_string(*size), "another one in each"));
      const std::int64_t at_once = *size * cluster.ranks;  // samples
      if (*options.global_batch / at_once > kMostMicrobatches)
        return Refuse(fmt::format("--global-batch: a step of {} has too many micro-batches", trace.path),
                      std::to_string(*options.global_batch / at_once),
                      fmt::format("{} at most", kMostMicrobatches));
      if (*options.global_batch % at_once != 0)
        return Refuse(
            fmt::format("--global-batch: the ranks do not divide it into micro-batches of {}", trace.path),
            std::to_string(*options.global_batch),
            fmt::format("a multiple of {}: micro-batches of {} on {} ranks", at_once, *size, cluster.ranks));
      sizes.push_back(*size);
    }
  }
  std::vector<JobVariant> variants;
  for (std::size_t t = 0; t < traces.size(); ++t) {
    for (const std::vector<StrategyMeshDim>& mesh : meshes) {
      JobVariant variant{.trace = traces[t].trace, .job = job, .says = {.trace = traces[t].path}};
      variant.job.mesh = mesh;
      variant.says.mesh = mesh.empty() ? fmt::format("shard={}", cluster.ranks) : MeshText(mesh);
      if (options.global_batch) {
        variant.says.microbatch_size = sizes[t];
        variant.says.microbatches = *options.global_batch / (sizes[t] * cluster.ranks);
        if (variant.says.microbatches > 1) {
          variant.job.program = {StepOf(variant.says.microbatches, *traces[t].trace, job)};
        }
      }
      variants.push_back(std::move(variant));
    }
  }
  return variants;
}

Result<OptimizeOutput> OptimizeVariants(const std::vector<JobVariant>& variants, const Cluster& cluster,
                                        const OptimizeOptions& options) {
  if (variants.size() == 1 && variants.front().says.microbatches == 0)
    return Optimize(*variants.front().trace, variants.front().job, cluster, options);
  return VariantsRun(variants, cluster, options).Run();
}

}  // namespace shardplan

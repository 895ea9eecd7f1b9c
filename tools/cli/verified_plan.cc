// SPDX-License-Identifier: Apache-2.0
#include "verified_plan.h"

#include <fmt/format.h>

#include "cluster_names.h"
#include "flags/cluster_choice.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/verifier/verifier.h"
#include "support.h"

namespace shardplan::cli {

void AddNoVerifyFlag(CLI::App& command, bool& no_verify) {
  command.add_flag("--no-verify", no_verify, "Use the plan as it is, even one that does not verify");
}

Status VerifyForUse(const std::string& path, const Plan& plan, bool no_verify) {
  if (no_verify) {
    Progress(false, fmt::format("warning: {}: not verified (--no-verify)", path));
    return {};
  }
  Result<std::vector<std::string>> warnings = CheckForUse(plan, "--no-verify uses it as it is");
  if (!warnings) {
    warnings.error().file = path;
    return std::unexpected(std::move(warnings.error()));
  }
  for (const std::string& warning : *warnings) {
    Warn(fmt::format("warning: {}: the plan has a fault because PyTorch has it: {}", Printable(path),
                     warning));
  }
  return {};
}

Result<Plan> ReadVerifiedPlan(const std::string& path, bool no_verify) {
  Result<Plan> plan = ReadPlan(path);
  if (!plan) return plan;
  if (Status verified = VerifyForUse(path, *plan, no_verify); !verified)
    return std::unexpected(std::move(verified.error()));
  return plan;
}

Result<std::variant<Plan, Recording>> ReadVerifiedPlanOrRecording(const std::string& path, bool no_verify) {
  Result<std::variant<Plan, Recording>> read = ReadPlanOrRecording(path);
  if (!read) return read;
  if (const Plan* plan = std::get_if<Plan>(&*read)) {
    if (Status verified = VerifyForUse(path, *plan, no_verify); !verified)
      return std::unexpected(std::move(verified.error()));
  }
  return read;
}

Result<Cluster> ClusterForPlan(const std::string& named, const std::string& plan_path, const Plan& plan,
                               bool quiet) {
  const Result<Cluster> cluster = FindCluster(named, plan.world_size);
  if (!cluster) return cluster;
  Result<Cluster> resized = WithRanks(*cluster, plan.world_size);
  if (!resized) {
    resized.error().file = named;
    return resized;
  }
  if (cluster->ranks != plan.world_size) {
    Progress(quiet, fmt::format("{} has {} ranks: {} of its devices, as {} has ranks", cluster->name,
                                cluster->ranks, plan.world_size, plan_path));
  }
  return resized;
}

}  // namespace shardplan::cli

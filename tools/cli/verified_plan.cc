#include "verified_plan.h"

#include <fmt/format.h>

#include "shardplan/schemas/io.h"
#include "shardplan/schemas/known_faults.h"
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
    Progress(false,
             fmt::format("warning: {}: the plan has a fault because PyTorch has it: {}", path, warning));
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

}  // namespace shardplan::cli

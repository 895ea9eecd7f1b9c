// SPDX-License-Identifier: Apache-2.0
#include "flags/policy_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>

#include "shardplan/schemas/policy_knobs.h"

namespace shardplan::cli {
namespace {

constexpr double kMostExact = 9007199254740992.0;  // 2^53

std::optional<double> ToNumber(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole_text = error == std::errc{} && end == text.data() + text.size();
  return whole_text && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

// The text as a value of a knob's type; nullopt: it is none.
struct ValueOf {
  std::string_view text;

  std::optional<KnobValue> operator()(bool) const {
    if (text != "true" && text != "false") return std::nullopt;
    return text == "true";
  }
  std::optional<KnobValue> operator()(std::int64_t) const {
    const std::optional<double> number = ToNumber(text);
    if (!number || std::trunc(*number) != *number || std::abs(*number) > kMostExact) return std::nullopt;
    return static_cast<std::int64_t>(*number);
  }
  std::optional<KnobValue> operator()(double) const {
    const std::optional<double> number = ToNumber(text);
    return number ? std::optional(KnobNumber(*number)) : std::nullopt;
  }
  std::optional<KnobValue> operator()(const std::string&) const { return std::string(text); }
};

// "prefetch_bucket_size=50000000 (elements): The elements that are fetched ahead."
std::string KnobText(const PolicyKnob& knob) {
  const std::string value =
      std::visit([](const auto& v) { return fmt::format("{}", v); }, knob.default_value);
  const std::string unit = knob.unit.empty() ? "" : fmt::format(" ({})", knob.unit);
  return fmt::format("{}={}{}: {}", knob.name, value, unit, knob.help);
}

std::string KnobsText(const PolicyDescription& policy) {
  if (policy.knobs.empty()) return fmt::format("none, policy {} has no knobs", policy.name);
  std::vector<std::string> knobs;
  for (const PolicyKnob& knob : policy.knobs) knobs.push_back(KnobText(knob));
  return fmt::format("one of {}", fmt::join(knobs, " "));
}

}  // namespace

void AddPolicyFlags(FlagGroup& group, PolicyFlags& flags) {
  group
      .File("--policy-library", flags.library,
            "A policy that is not built in: a library made with shardplan_add_policy")
      ->excludes("--policy");
  group
      .Option("--policy-knob", flags.knobs,
              "NAME=VALUE of a knob of that policy; repeat it (default: what the library says)")
      ->allow_extra_args(false);
}

Result<std::optional<PolicyLibrary>> LoadPolicy(const PolicyFlags& flags) {
  if (flags.library.empty()) return std::optional<PolicyLibrary>();
  Result<PolicyLibrary> library = PolicyLibrary::Load(flags.library);
  if (!library) return std::unexpected(std::move(library.error()));
  return std::optional<PolicyLibrary>(std::move(*library));
}

Status ApplyPolicyFlags(const PolicyFlags& flags, const PolicyDescription* policy, Strategy& strategy) {
  if (policy == nullptr) {
    if (flags.knobs.empty()) return {};
    return MakeError(ErrorCode::kUsage, "--policy-knob is of --policy-library FILE");
  }
  strategy.policy = policy->name;
  for (const std::string& text : flags.knobs) {
    const std::size_t equals = text.find('=');
    const auto knob = std::ranges::find(policy->knobs, text.substr(0, equals), &PolicyKnob::name);
    const bool known = equals != std::string::npos && knob != policy->knobs.end();
    if (!known) return BadFlag("--policy-knob", text, KnobsText(*policy));
    const std::optional<KnobValue> value =
        std::visit(ValueOf{std::string_view(text).substr(equals + 1)}, knob->default_value);
    if (!value) return BadFlag("--policy-knob", text, "a value like that of " + KnobText(*knob));
    strategy.policy_knobs[knob->name] = *value;
  }
  return {};
}

}  // namespace shardplan::cli

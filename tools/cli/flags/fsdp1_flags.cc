// SPDX-License-Identifier: Apache-2.0
#include "flags/fsdp1_flags.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace shardplan::cli {
namespace {

constexpr std::pair<const char*, Fsdp1CommHook> kCommHooks[] = {
    {"none", Fsdp1CommHook::kNone},
    {"allreduce_hook", Fsdp1CommHook::kAllReduce},
    {"reduce_scatter_hook", Fsdp1CommHook::kReduceScatter},
    {"fp16_compress_hook", Fsdp1CommHook::kFp16Compress},
    {"bf16_compress_hook", Fsdp1CommHook::kBf16Compress}};

Status ApplyCommHook(const std::optional<std::string>& text, Strategy& strategy) {
  if (!text) return {};
  const auto* known = std::ranges::find_if(kCommHooks, [&](const auto& hook) { return *text == hook.first; });
  if (known == std::end(kCommHooks)) {
    return BadFlag("--comm-hook", *text,
                   "none, allreduce_hook, reduce_scatter_hook, fp16_compress_hook or bf16_compress_hook");
  }
  strategy.fsdp1.comm_hook = known->second;
  return {};
}

Status ApplyPrecision(const Fsdp1Flags& flags, Strategy& strategy) {
  if (!flags.buffer_dtype && !flags.keep_low_precision_grads) return {};
  if (!strategy.mixed_precision) strategy.mixed_precision = MixedPrecision{};
  if (flags.keep_low_precision_grads) strategy.mixed_precision->keep_low_precision_grads = true;
  if (!flags.buffer_dtype) return {};
  strategy.mixed_precision->buffer_dtype = DTypeFromName(*flags.buffer_dtype);
  if (strategy.mixed_precision->buffer_dtype) return {};
  return BadFlag("--buffer-dtype", *flags.buffer_dtype, "a dtype as torch names it, say bfloat16");
}

constexpr Switch<Fsdp1Knobs> kRareSwitches[] = {
    {"--full-precision-in-eval", &Fsdp1Knobs::full_precision_in_eval,
     "fsdp1: forwards in evaluation mode gather the original dtype"},
    {"--validate-order", &Fsdp1Knobs::validate_execution_order,
     "fsdp1: all ranks compare the order of units in the first iteration"},
};

}  // namespace

void AddFsdp1Flags(FlagGroup& group, Fsdp1Flags& flags) {
  FlagGroup rare = group.Rare();
  AddSwitches(rare, kRareSwitches, flags.switches);
  group.Option("--ignore-module", flags.ignored_modules,
               "fsdp1: modules that are left alone (rules as for --unit)");
  group
      .Option("--size-based-wrap", flags.size_based_wrap,
              "fsdp1: size_based_auto_wrap_policy with this min_num_params")
      ->check(CLI::NonNegativeNumber);
  rare.Option("--force-leaf", flags.force_leaf, "... classes below which nothing is wrapped");
  rare.Option("--exclude-wrap", flags.exclude_wrap, "... classes that are not wrapped themselves");
  group.Option("--comm-hook", flags.comm_hook,
               "fsdp1: allreduce_hook, reduce_scatter_hook, fp16_compress_hook or bf16_compress_hook");
  rare.Option("--predivide-factor", flags.predivide_factor,
              "fsdp1: what gradients are divided by before reduction")
      ->check(CLI::PositiveNumber);
  rare.Option("--postdivide-factor", flags.postdivide_factor, "fsdp1: ... and after")
      ->check(CLI::PositiveNumber);
  group.Option("--buffer-dtype", flags.buffer_dtype, "fsdp1: dtype of the model's floating-point buffers");
  rare.Flag("--keep-low-precision-grads", flags.keep_low_precision_grads,
            "fsdp1: gradient shards stay in the low precision");
  rare.Flag("--optimizer-in-backward", flags.optimizer_in_backward,
            "A parameter is stepped as soon as its gradient is reduced");
}

Status ApplyFsdp1Flags(const Fsdp1Flags& flags, Strategy& strategy) {
  Fsdp1Knobs& knobs = strategy.fsdp1;
  knobs.ignored_modules.insert(knobs.ignored_modules.end(), flags.ignored_modules.begin(),
                               flags.ignored_modules.end());
  if (flags.size_based_wrap) {
    if (!knobs.size_based_wrap) knobs.size_based_wrap = SizeBasedWrap{};
    knobs.size_based_wrap->min_num_params = *flags.size_based_wrap;
  }
  if (!flags.force_leaf.empty() || !flags.exclude_wrap.empty()) {
    if (!knobs.size_based_wrap) return BadFlag("--force-leaf", "", "--size-based-wrap beside it");
    if (!flags.force_leaf.empty()) knobs.size_based_wrap->force_leaf_modules = flags.force_leaf;
    if (!flags.exclude_wrap.empty()) knobs.size_based_wrap->exclude_wrap_modules = flags.exclude_wrap;
  }
  if (flags.predivide_factor) knobs.gradient_predivide_factor = flags.predivide_factor;
  if (flags.postdivide_factor) knobs.gradient_postdivide_factor = flags.postdivide_factor;
  ApplySwitches(kRareSwitches, flags.switches, knobs);
  if (flags.optimizer_in_backward) strategy.optimizer.in_backward = true;
  if (Status s = ApplyCommHook(flags.comm_hook, strategy); !s) return s;
  return ApplyPrecision(flags, strategy);
}

}  // namespace shardplan::cli

// SPDX-License-Identifier: Apache-2.0
#include "flags/fsdp2_flags.h"

#include <charconv>

namespace shardplan::cli {
namespace {

Result<ShardDimRule> ToShardDim(const std::string& text) {
  const std::size_t equals = text.rfind('=');
  ShardDimRule rule;
  if (equals != std::string::npos) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + equals + 1, end, rule.dim);
    rule.parameters = {text.substr(0, equals)};
    if (error == std::errc{} && stop == end) return rule;
  }
  return BadFlag("--shard-dim", text, "PARAMETER=DIM, say 'layers.*.weight=1'");
}

constexpr Switch<Fsdp2Knobs> kRareSwitches[] = {
    {"--force-sum-reduction", &Fsdp2Knobs::force_sum_reduction, "fsdp2: reductions are sums, divided apart"},
    {"--unshard-async-op", &Fsdp2Knobs::unshard_async_op,
     "fsdp2: asynchronous all-gathers, on the process group's own stream"},
    {"--process-group-memory", &Fsdp2Knobs::allocate_memory_from_process_group,
     "fsdp2: collectives' buffers from the communicator's own memory pool"},
    {"--post-optim-event", &Fsdp2Knobs::post_optim_event,
     "fsdp2: all-gathers wait for the optimizer's step alone"},
    {"--part-after-backward", &Fsdp2Knobs::part_after_backward,
     "fsdp2: units that set_reshard_after_backward(False) leaves stay on their smaller mesh, not whole"},
};

}  // namespace

void AddFsdp2Flags(FlagGroup& group, Fsdp2Flags& flags) {
  FlagGroup rare = group.Rare();
  AddSwitches(rare, kRareSwitches, flags.switches);
  rare.Option(
      "--shard-over", flags.shard_over,
      "fsdp2: the mesh dimensions that FSDP shards over, flattened into one (default: the one named shard)");
  rare.Option("--replicate-over", flags.replicate_over,
              "fsdp2: the mesh dimensions of replicas (default: the one named replicate)");
  rare.Option("--shard-dim", flags.shard_dims,
              "fsdp2: PARAMETER=DIM, the dimension that these parameters are cut along");
  group.Option("--ignore", flags.ignored_parameters, "Parameters that FSDP leaves alone, by FQN");
  group.Flag("--cpu-offload", flags.cpu_offload, "Shards live in host memory");
  rare.Flag("--no-pin-memory", flags.no_pin_memory, "... that is not pinned");
  rare.Option("--gradient-divide-factor", flags.gradient_divide_factor,
              "fsdp2: what gradients are divided by (default: the ranks)")
      ->check(CLI::PositiveNumber);
  group.Flag("--separate-reduce-scatter", flags.separate_reduce_scatter,
             "fsdp2: reduce-scatters have a communicator of their own");
  rare.Option("--reduce-scatter-inputs", flags.reduce_scatter_inputs,
              "fsdp2: reduce-scatter inputs in flight (default 1)")
      ->check(CLI::Range(1, 1000));
  rare.Option("--inner-reduce-ranks", flags.inner_reduce_ranks,
              "fsdp2: gradients are reduced over so many neighbouring ranks first, then between these groups")
      ->check(CLI::PositiveNumber);
  rare.Option("--all-reduce-hook", flags.all_reduce_hook,
              "fsdp2: a hook that averages reduced gradients over this mesh dimension");
  group.Flag("--no-root", flags.no_root, "fsdp2: fully_shard is not called on the root");
  rare.Flag("--share-comm-context", flags.share_comm_context,
            "fsdp2: with --no-root, the units given by --unit share one communication context");
}

Status ApplyFsdp2Flags(const Fsdp2Flags& flags, Strategy& strategy) {
  Fsdp2Knobs& knobs = strategy.fsdp2;
  if (!flags.shard_over.empty() || !flags.replicate_over.empty()) {
    strategy.data_parallel = DataParallelDims{flags.shard_over, flags.replicate_over};
  }
  for (const std::string& text : flags.shard_dims) {
    Result<ShardDimRule> rule = ToShardDim(text);
    if (!rule) return std::unexpected(rule.error());
    knobs.shard_dims.push_back(std::move(*rule));
  }
  strategy.ignored_parameters.insert(strategy.ignored_parameters.end(), flags.ignored_parameters.begin(),
                                     flags.ignored_parameters.end());
  if (flags.cpu_offload) strategy.cpu_offload = true;
  if (flags.no_pin_memory) strategy.pin_memory = false;
  if (flags.gradient_divide_factor) knobs.gradient_divide_factor = flags.gradient_divide_factor;
  ApplySwitches(kRareSwitches, flags.switches, knobs);
  if (flags.separate_reduce_scatter) knobs.separate_reduce_scatter_communicator = true;
  if (flags.reduce_scatter_inputs) knobs.reduce_scatter_inputs_in_flight = *flags.reduce_scatter_inputs;
  if (flags.inner_reduce_ranks) knobs.inner_reduce_ranks = *flags.inner_reduce_ranks;
  if (flags.all_reduce_hook) {
    knobs.all_reduce_hooks = {{.mesh_dim = *flags.all_reduce_hook, .reduce_op = ReduceOp::kAverage}};
  }
  if (flags.no_root) knobs.shard_root = false;
  if (flags.share_comm_context) {
    std::vector<std::string>& shared = knobs.shared_comm_contexts.emplace_back();
    for (const UnitRule& rule : strategy.units) {
      for (const std::string& module : rule.modules) {
        if (!module.empty()) shared.push_back(module);
      }
    }
    if (shared.empty())
      return BadFlag("--share-comm-context", "no unit", "the units that share, given by --unit");
  }
  return {};
}

}  // namespace shardplan::cli

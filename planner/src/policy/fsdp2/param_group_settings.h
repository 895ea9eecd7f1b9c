// SPDX-License-Identifier: Apache-2.0
// Settings of a parameter group by the user: attributes of FSDPParamGroup (_fsdp_param_group.py) that the
// setters of FSDPModule (fsdp_module.h) change, before the first step or in a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace shardplan::fsdp2 {

struct ParamGroupSettings {
  // Whether gradients are reduced at all, and whether HSDP's are all-reduced: set_requires_gradient_sync,
  // set_requires_all_reduce.
  bool reduce_grads = true;
  bool all_reduce_grads = true;
  bool reshard_after_backward = true;  // set_reshard_after_backward
  // Parameters that are not resharded after the backward, and have a smaller mesh, go there (the knob).
  bool part_after_backward = false;
  bool unshard_in_backward = true;  // set_unshard_in_backward
  bool unshard_async_op = false;    // _set_unshard_async_op, or the knob
  // set_force_sum_reduction_for_comms, or the knob.
  bool force_sum_reduction_for_comms = false;
  // set_separate_reduce_scatter_group, or the knob: the reduce-scatter has a communicator of its own.
  bool separate_reduce_scatter_group = false;
  // set_allocate_memory_from_process_group_for_comm, or the knob.
  bool allocate_memory_from_process_group = false;
  // set_keep_unsharded_storage: a reshard keeps the memory of the unsharded parameters.
  bool keep_unsharded_storage = false;
  // set_reduce_scatter_unused_params: a parameter without a gradient takes part with zeros.
  bool reduce_scatter_unused_params = false;
  // set_reduce_scatter_max_input_buffers, or the knob: inputs in flight when a reduce-scatter is issued.
  std::size_t reduce_scatter_max_input_buffers = 1;
  // set_gradient_divide_factor (before the first step), or the knob.
  std::optional<double> gradient_divide_factor;
  // post_forward_mesh_info, as the number of ranks that hold the parameters between forward and backward; 0:
  // they stay unsharded. set_reshard_after_forward, and the lazy init of a root.
  std::int64_t post_forward_ranks = 0;
  // Whether the backward prefetches what no list names (the knob backward_prefetch). Set once.
  bool default_backward_prefetch = true;

  bool operator==(const ParamGroupSettings&) const = default;
};

}  // namespace shardplan::fsdp2

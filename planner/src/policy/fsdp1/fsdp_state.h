// SPDX-License-Identifier: Apache-2.0
// The mutable state of FSDP1, all of it: the handles, and what _FSDPState shares between all units of a root
// (_common_utils.py, _share_state_and_init_handle_attrs).
//
// It is a value with a defaulted `==`: a step that begins in an equal state, and has the same events, is
// planned the same. So what a field holds comes back when a training loop repeats: what grows or counts is
// not kept here, and what is of one forward or backward is cleared at its end.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "policy/fsdp1/exec_order_data.h"
#include "policy/fsdp1/flat_param_handle.h"
#include "policy/fsdp1/free_event_queue.h"

namespace shardplan::fsdp1 {

// The backward that runs.
struct RunningBackward {
  UnitId unit = -1;                  // whose pre-backward hook ran last: what segments read
  std::vector<ForwardRun> forwards;  // that it covers
  bool accumulated = false;          // a flat parameter got a gradient in it
  bool operator==(const RunningBackward&) const = default;
};

struct FsdpState {
  std::vector<std::optional<FlatParamHandle>> handles;  // _all_handles, by unit; none without parameters
  ExecOrderData exec_order_data;                        // _exec_order_data
  FreeEventQueue free_event_queue;                      // _free_event_queue
  bool is_initialized = false;                          // _is_root is set; by the first LazyInit
  bool sync_gradients = true;                           // _sync_gradients; set by the user
  // _post_backward_callback_queued: set by the root's pre-backward hook, taken by the callback and by the
  // root's post-forward.
  bool post_backward_callback_queued = false;
  // The user has dropped the gradients of the original parameters; those of flat parameters are still there,
  // until ResetFlatParamGradInfoIfNeeded.
  bool grads_zeroed = false;
  std::map<UnitId, std::int32_t> calls;  // pre-forwards of each unit in the forward that runs
  RunningBackward backward;

  // The handle of a unit; null when it has no parameters (_module_handle).
  FlatParamHandle* HandleOf(UnitId unit) { return handles[unit] ? &*handles[unit] : nullptr; }

  bool operator==(const FsdpState&) const = default;
};

}  // namespace shardplan::fsdp1

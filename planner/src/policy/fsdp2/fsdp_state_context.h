// SPDX-License-Identifier: Apache-2.0
// State that the FSDPStates of one root share (FSDPStateContext in _fsdp_state.py).
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::fsdp2 {

class FsdpState;

// Every state has one of its own until its root's lazy init gives it the root's. All of it decides later
// steps, so it is a value with a defaulted comparison.
struct FsdpStateContext {
  // all_states: those under the root, in the order of named_modules. A state of two modules is there twice.
  // Set by FsdpState::LazyInit.
  std::vector<FsdpState*> all_states;
  // iter_forward_root: runs what is done once a forward. Set by its RootPreForward, cleared by its
  // PostForward.
  const FsdpState* iter_forward_root = nullptr;
  // post_backward_final_callback_queued: from the first PreBackward to the end of the backward.
  bool post_backward_final_callback_queued = false;
  // is_last_backward: whether the final callback waits and clears. Set by the user (set_is_last_backward).
  bool is_last_backward = true;
  // manual_backward_finalization: the user ends backwards (finalize_backward). Set by the setter of that
  // name.
  bool manual_backward_finalization = false;
  // gradient_reduction_pending: an asynchronous finalize_backward has not been waited for.
  bool gradient_reduction_pending = false;
  // post_optim_event: what the next forward's all-gathers wait for. Set by the user (set_post_optim_event) or
  // after the optimizer's step (the knob of that name), cleared by the next RootPreForward. -1: none.
  EventId post_optim_event = -1;

  bool operator==(const FsdpStateContext&) const = default;
};

}  // namespace shardplan::fsdp2

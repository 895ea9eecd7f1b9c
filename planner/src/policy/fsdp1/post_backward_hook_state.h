// SPDX-License-Identifier: Apache-2.0
// The post-backward hook of a flat parameter: which gradient it hangs on, and where in a backward it runs.
//
// [Note: when a flat parameter's gradient is done]
// The modules' parameters are views of the flat parameter, made when it is unsharded in the forward. The node
// that gathers the views' gradients into the flat gradient, and with it the hook, runs when everything made
// after the views has run backward (backward_times.h): normally the unit's own operators; for a unit with
// units inside, theirs too. A unit that was prefetched in the forward had its views made in the *previous*
// unit's pre-forward, so its hook waits for that unit's backward, too. A unit that is used several times, in
// one or in several forwards, counts with the first use that the backward reaches. But the hook is registered
// once, until a backward is over: where each unshard changes the dtype of the flat parameter, and with it the
// accumulator of its gradient, only the gradient of the first views has it. Gradients that arrive elsewhere,
// and those of a second backward, are added to the flat gradient and stay there.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "units/model_index.h"
#include "units/partition.h"

namespace shardplan::fsdp1 {

// A forward of a micro-batch, as HookPoint names it.
struct ForwardRun {
  std::int32_t microbatch = 0;
  std::int32_t run = 0;
  auto operator<=>(const ForwardRun&) const = default;
};

// A pre-forward: the `occurrence`-th of `unit` in `forward`. The default is none of any forward.
struct UnitCall {
  UnitId unit = -1;
  std::int32_t occurrence = 0;
  ForwardRun forward;
  auto operator<=>(const UnitCall&) const = default;
};

// A call of a unit, and the pre-forward in which the views that it uses were made.
struct UnitUse {
  UnitCall call;
  UnitCall views;
  bool operator==(const UnitUse&) const = default;
};

// Calls of units that a backward runs through.
struct UndoneCalls {
  std::set<UnitCall> reached;         // an output of the unit gets a gradient
  std::set<UnitCall> with_gradients;  // ... and parameters of the unit do
};

// `forwards`: that the backward covers, as in Pass::forwards.
UndoneCalls CallsUndoneBy(const Trace& trace, const ModelIndex& index, const Partition& partition,
                          const Pass& backward, const std::vector<ForwardRun>& forwards);

class PostBackwardHookState {
 public:
  // `casts_params`: each unshard makes an accumulator of its own, see the note.
  explicit PostBackwardHookState(bool casts_params) : casts_params_(casts_params) {}

  // This forward begins: what an earlier step's has left can no longer be undone.
  void OnForwardBegin(const ForwardRun& forward);
  // _register_post_backward_hook: `call` uses views made in `views`.
  void Register(const UnitCall& call, const UnitCall& views);
  // The same in a recomputation, behind an earlier backward.
  void RegisterInRecomputation();
  // Finds where in this backward the hook runs.
  void OnBackwardBegin(const UndoneCalls& undone, const std::vector<ForwardRun>& forwards);
  void OnBackwardEnd(const std::vector<ForwardRun>& forwards);
  // _finalize_params
  void Remove() { accumulator_.reset(); }

  bool Runs() const { return runs_at_.has_value(); }
  // When all is undone that was made since the pre-forward `call`.
  bool RunsAt(const UnitCall& call) const { return runs_at_ == call; }

  bool operator==(const PostBackwardHookState&) const = default;

 private:
  void FindWhereItRuns();

  bool casts_params_ = false;
  std::vector<UnitUse> uses_;            // that a backward may undo, in the order of the forwards
  std::vector<UnitUse> undone_;          // ... that the running one does, and brings gradients
  std::optional<UnitCall> accumulator_;  // the hook hangs on that of the views made there
  std::optional<UnitCall> runs_at_;      // when what was made since is undone; in the running backward
};

}  // namespace shardplan::fsdp1

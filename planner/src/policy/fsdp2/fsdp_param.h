// SPDX-License-Identifier: Apache-2.0
// The parameters of one group: their shards, what they put into an all-gather and their unsharded memory
// (FSDPParam in _fsdp_param.py, all those of a group together). Their gradients: unsharded_grads.h,
// sharded_grads.h.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "policy/fsdp2/unit_scope.h"

namespace shardplan::fsdp2 {

enum class ShardedState : std::uint8_t { kSharded, kShardedPostForward, kUnsharded };

class FsdpParams {
 public:
  struct State {
    // sharded_state, and FSDPParamGroup._sharded_state, which always is the same. Changed by the three To...
    ShardedState sharded_state = ShardedState::kSharded;
    // _sharded_post_forward_param_data: alive, one of each parameter. Made by ToShardedPostForward, freed by
    // the next ToUnsharded, or when they are made anew.
    std::vector<BufferId> sharded_post_forward_params;
    // The ranks that those shards are spread over; 0: there are none.
    std::int64_t post_forward_ranks = 0;
    bool operator==(const State&) const = default;
  };
  // The tensors of an all-gather on this rank, in order. Tensors made for it die when it has been issued.
  struct AllGatherInputs {
    std::vector<BufferId> sources;
    std::vector<BufferId> temporaries;
  };

  explicit FsdpParams(const UnitScope& scope);

  bool is_sharded() const { return state_.sharded_state == ShardedState::kSharded; }
  bool is_sharded_post_forward() const { return state_.sharded_state == ShardedState::kShardedPostForward; }
  bool is_unsharded() const { return state_.sharded_state == ShardedState::kUnsharded; }
  // They have been unsharded at some time: FSDPParam._unsharded_param exists. Not of the state: it decides
  // only whether PyTorch fails, and then no step follows.
  bool has_unsharded_params() const { return has_unsharded_params_; }

  AllGatherInputs GetAllGatherInputs(StreamId stream) const;
  void AllocAllGatherOutputs() const;
  // Copies what was gathered into that memory. Pieces of another dimension than the first are copied out rank
  // by rank, then put together.
  void CopyOut(BufferId all_gather_output) const;
  // The same on one rank, where nothing is gathered.
  void CopyOutOfShards() const;
  // Allocates the tensors of a post-all-gather extension.
  void InitUnshardedParams() const;

  void ToSharded();
  void ToShardedPostForward(std::int64_t ranks);
  // set_keep_unsharded_storage before the first step: the memory of the unsharded parameters is there all the
  // time, and each gather fills it again.
  void KeepStorage();
  void ToUnsharded();

  const State& state() const { return state_; }

 private:
  void MakeExtensionBuffers();
  bool Casts(std::int32_t parameter) const;
  BufferId CopyInto(const std::vector<BufferId>& sources, std::vector<Bytes> parts,
                    std::vector<std::int32_t> parameters, std::string_view suffix, StreamId stream) const;
  AllGatherInputs CopyShardsToDevice(StreamId stream) const;
  void MakeShardCasts() const;
  void FreeUnshardedParams() const;
  bool KeepsStorage() const { return scope_.program().plan().buffers[unsharded_].persistent; }

  const UnitScope& scope_;
  BufferId sharded_ = -1;
  BufferId unsharded_ = -1;
  // Buffers of parameters with an extension: their further gathered tensors, and what post-all-gather
  // allocates. -1: there is none.
  BufferId extension_gathered_ = -1;
  BufferId extension_unsharded_ = -1;
  BufferId chunks_ = -1;  // where CopyOut puts pieces of another dimension than the first; -1: there are none
  bool has_unsharded_params_ = false;
  State state_;
};

}  // namespace shardplan::fsdp2

// SPDX-License-Identifier: Apache-2.0
// A choice of every decision, and the strategy that it is.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "optimize/model_chain.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::optimize {

// When gradients are reduced, and parameters kept, over the micro-batches of a step. kEach, kLast: reduced in
// each micro-batch, or in the last. kRestLast: the inner level (the shards, or the inner ranks of two levels)
// in each, the outer level in the last. ...Kept: parameters that are kept after the forward, whole or in
// part, stay until the next forward.
enum class Accumulation : std::uint8_t { kEach, kEachKept, kLast, kLastKept, kRestLast, kRestLastKept };

// The ranks that may have a matrix of Muon's whole: none, as torch.optim.Muon; one of a replica's, or one of
// all; one of a replica's, exchanged as DistMuon does; or each of a replica's.
enum class MuonOwners : std::uint8_t { kNone, kShards, kReplicas, kDistMuon, kAll };

// A number of units: all that there are, and the root.
inline constexpr std::int32_t kAllUnits = std::numeric_limits<std::int32_t>::max();
// Choice::kept_apart: what is on other meshes is handled as its unit is.
inline constexpr std::int32_t kAsTheUnit = -1;

struct Choice {
  bool fsdp1 = false;
  // Numbers of neighbours of the chain in each unit, from the chain's begin; the root has the modules behind
  // them. A negative number: so many modules are the root's.
  std::vector<std::int32_t> units;
  bool in_parts = false;  // ModelChain::parts of each block are units of their own, handled as its unit is
  std::int32_t kept = 0;  // units from the end that are not freed after the forward
  std::int64_t part = 0;  // ranks of the smaller mesh that post_forward_units are kept on; 0: freed
  // Units before the kept ones, from the end, that are kept on the smaller mesh. The units before them are
  // freed.
  std::int32_t post_forward_units = kAllUnits;
  // Units from the end whose parameters on other meshes (experts) are not freed after the forward, whatever
  // the rest of the unit is.
  std::int32_t kept_apart = kAsTheUnit;
  bool root_freed = false;           // the root's own parameters are, too
  bool cuts_divisible_dims = false;  // parameters of few rows are cut along Job::divisible_dims
  std::int32_t prefetch = 0;         // units ahead, in both passes; 0: as PyTorch by default
  std::int32_t in_flight = 1;        // inputs of reduce-scatters
  bool own_communicator = false;     // of the reduce-scatters
  Accumulation accumulation = Accumulation::kEach;
  std::int64_t inner = 0;        // ranks of the first of two levels of reductions; 0: one level
  std::int32_t accumulated = 0;  // units from the end that are reduced in the last micro-batch all the same
  // kRestLast, kRestLastKept: units from the end whose outer level waits for the last micro-batch. The others
  // are reduced in each.
  std::int32_t outer_reduced_last = kAllUnits;
  std::int32_t recomputed = 0;        // blocks from the first that are recomputed
  std::vector<std::string> children;  // of which only these modules are; empty: they are as a whole
  std::vector<std::string> rest;      // these modules of the other blocks are, too
  // Operators whose results are kept: every so many-th of a module's is run again all the same, 0: none.
  std::map<std::string, std::int64_t> saved;
  // So many blocks, evenly spread from the first on, have their activations in host memory between forward
  // and backward; recomputed and rest are of the others.
  std::int32_t offloaded = 0;
  bool offload = false;
  // fsdp1
  bool grad_op = false;  // SHARD_GRAD_OP
  Fsdp1BackwardPrefetch backward_prefetch = Fsdp1BackwardPrefetch::kPre;
  MuonOwners owners = MuonOwners::kNone;
  std::int32_t exchanges = 1;          // of Muon's matrices, of about equal work
  bool exchanged_in_backward = false;  // they begin there
  // The job's strategy as it is; no other decision counts.
  bool as_given = false;
  auto operator<=>(const Choice&) const = default;
};

// Whether block `block` of `blocks` is one of those that are offloaded.
bool IsOffloaded(const Choice& choice, std::int32_t block, std::int32_t blocks);

// Parameters of a module that are on another mesh than most.
struct OtherMeshes {
  std::vector<ParameterMeshRule> rules;  // each parameter by its name
  std::vector<std::string> modules;      // that have such parameters and no others: they may be units
};

// Muon's matrices in a job whose owners the search decides.
struct MuonMatrices {
  struct Matrix {
    std::string fqn;
    std::int64_t work = 0;  // NewtonSchulzWork
  };
  std::vector<Matrix> matrices;    // in the model's order; empty: there is nothing to decide
  std::vector<MuonOwners> owners;  // that the trace has the steps for
  bool may_begin_in_backward = false;
};

// The job that a choice is made for.
struct Job {
  Strategy strategy;
  ModelChain chain;
  std::map<std::string, OtherMeshes> other_meshes;  // by module of the chain; "": outside of these
  MuonMatrices muon;
  std::int64_t shards = 1, replicas = 1;
  std::int64_t node_ranks = 8;
  std::int32_t microbatches = 1;
  // For parameters whose rows the ranks pad by a quarter and more: another dimension, which the ranks divide.
  std::vector<ShardDimRule> divisible_dims;
  bool of_pytorch = false;  // only what the planned release's FSDP2 has a call for
  bool plain_loop = false;  // the program is what `--accumulate` makes: it may be written anew
  bool keeps_units = false, keeps_reshard = false, keeps_prefetch = false, keeps_checkpoint = false,
       keeps_activations = false, keeps_accumulation = false, keeps_layout = false, keeps_reduction = false;
};

// Whether the search says when gradients are reduced over micro-batches.
bool DecidesAccumulation(const Job& job);
// Whether what is kept after the forward is kept over micro-batches.
bool KeepsOver(const Choice& choice);
// Whether the parts of blocks may be units of their own.
bool MayBeInParts(const Job& job, const Choice& choice);
// Whether reductions have a level that may wait for the last micro-batch: the outer one, or the replicas'.
bool HasRest(const Job& job, const Choice& choice);
// `keeps_owners`: Muon's matrices stay where the strategy has them.
Job MakeJob(const Trace& trace, const Strategy& strategy, std::int64_t ranks, bool keeps_owners = false);
Strategy StrategyOf(const Job& job, const Choice& choice);
// PyTorch has every knob of it.
bool IsOfPyTorch(const Choice& choice);
// The same for all choices that are the same strategy but for what is without effect. In a job that is
// of_pytorch: what FSDP2 does instead.
Choice Effective(const Job& job, Choice choice);
// The decision in words, one for each name in DecisionNames().
const std::vector<std::string>& DecisionNames();
std::string DecisionText(const Job& job, const Choice& choice, const std::string& decision);
// `choice` with that decision as `other` has it.
Choice WithDecision(Choice choice, const std::string& decision, const Choice& other);

// The chain cut into units of so many blocks. Modules before and behind them: as `ends` says.
enum class Ends : std::uint8_t { kRoot, kOwn, kJoined };
std::vector<std::int32_t> UnitsOfBlocks(const ModelChain& chain, std::int32_t size, Ends ends);

}  // namespace shardplan::optimize

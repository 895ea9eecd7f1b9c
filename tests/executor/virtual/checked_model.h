// SPDX-License-Identifier: Apache-2.0
// A model of one rank that checks every number it meets against ExpectedValues, on any backend.
//
// A segment compares all unsharded parameters of the units that it reads with what the last optimizer step
// gave, and makes its gradients; activations that the plan moves hold what the segment that made them wrote;
// the segments come in the order of the model, which the plan of ExpectedValues has; an optimizer step
// compares the reduced gradients and the shards, and steps the shards. Numbers that nobody wrote, or that
// were written too late or overwritten too early, are not equal.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "shardplan/executor/replayer.h"
#include "tests/executor/virtual/expected_values.h"
#include "tests/executor/virtual/number_memory.h"

namespace shardplan::test {

// The findings of the ranks of one run, or of one of them.
struct Findings {
  std::string failure;          // the first wrong number; "": none
  std::set<std::string> stale;  // units whose parameters are read as they were before an optimizer step
  // Nothing runs behind a failure. Not where ranks wait for each other.
  bool stops_at_failure = false;
};

class CheckedModel final : public executor::Model {
 public:
  // All outlive the model.
  // `runs`: the plan that is run, where it is another version of the one of ExpectedValues.
  CheckedModel(ExpectedValues& expected, NumberMemory& memory, std::int64_t rank, Findings& findings,
               const Plan* runs = nullptr);

  // Writes the initial shards; once, after the replayer is made.
  Status SetInitialShards();
  // After everything has run: the final shards, and that nothing was left out.
  Status CheckEnd();

  Status Compute(const executor::ComputeCall& call) override;
  Status BindUnsharded(UnitId unit, BufferId buffer) override;
  Status BindSharded(UnitId unit, BufferId buffer) override;
  Status ShardedGradientsReady(UnitId unit, BufferId buffer) override;
  Status OptimizerStep(UnitId unit, std::int32_t parameter, StreamId stream) override;
  Status ZeroGrad(UnitId unit) override;

  Status Update(const Instruction& instruction) override;

 private:
  // Bytes that have to be `expected`. `version`: of a parameter, -1: of a gradient.
  struct Piece {
    BytePlace at;
    std::span<const std::byte> expected;
    DType dtype = DType::kFloat32;
    UnitId unit = -1;
    std::int32_t parameter = -1;
    std::int64_t first = 0;  // element of the parameter
    std::int64_t version = -1;
  };
  // Checks, then writes.
  struct Work {
    std::vector<Piece> checks;
    std::vector<NumberWork::Write> writes;
  };

  DType DTypeOf(const Buffer& buffer, std::int32_t parameter) const;
  void WalkPlan();
  bool IsPoint(SegmentId id) const;
  void CheckOrder(const executor::ComputeCall& call);
  void AddReads(UnitId unit, BufferId buffer, std::vector<Piece>& pieces);
  Piece ShardPiece(const ShardRun& run, UnitId unit, BufferId buffer, std::span<const std::byte> whole);
  void AddActivations(const executor::ComputeCall& call, Work& work);
  std::span<const std::byte> ActivationOf(StorageId storage, std::int32_t microbatch, std::int64_t step,
                                          std::size_t bytes);
  // A stretch of a matrix of an exchange in a rank's buffer of it, in elements.
  struct Stretch {
    std::size_t matrix = 0;
    std::int64_t in_whole = 0;  // of the parameter
    std::int64_t in_buffer = 0;
    std::int64_t numel = 0;
  };
  std::vector<Stretch> GatheredIn(const Exchange& exchange, bool own_rank) const;
  std::vector<Stretch> PiecesIn(const Exchange& exchange) const;
  std::vector<Stretch> WholeIn(const Exchange& exchange) const;
  Stretch PieceOf(const Exchange& exchange, std::size_t matrix, std::int64_t rank) const;
  void ApplyUpdate(UnitId unit, std::int32_t parameter, Work& work);
  bool IsExchanged(UnitId unit, std::int32_t parameter) const;
  void StepParameter(UnitId unit, std::int32_t parameter, bool on_host, Work& work);
  void AddReduced(UnitId unit, std::int32_t parameter, bool on_host, std::vector<Piece>& checks);
  void AddScratch(UnitId only_unit, bool of_exchanged, Work& work);
  Status Enqueue(StreamId stream, Work work, const std::string& where);
  void Check(const Piece& piece, const std::byte* found, const std::string& where);
  void Fail(std::string message);
  std::string NameOf(UnitId unit, std::int32_t parameter) const;

  ExpectedValues& expected_;
  const Plan& plan_;
  const Plan& runs_;
  NumberMemory& memory_;
  const std::int64_t rank_;
  Findings& findings_;
  std::vector<BufferId> bound_;                                   // by unit, -1
  std::vector<BufferId> shard_of_;                                // by unit: param_sharded
  std::vector<std::vector<BufferId>> gradients_;                  // by unit: reduced ones since zero_grad
  std::vector<std::vector<std::int64_t>> versions_;               // by unit and parameter, in host order
  std::vector<std::vector<std::int64_t>> made_;                   // gradients, likewise
  std::vector<std::set<std::pair<std::int32_t, UnitId>>> reads_;  // by step
  // Facts of the plan of ExpectedValues: by step as run its segments and micro-batches, those without length
  // apart, and by optimizer step the optimizer's own memory.
  using Run = std::pair<SegmentId, std::int32_t>;
  std::vector<std::vector<Run>> order_;
  std::set<std::pair<std::int64_t, Run>> points_;
  std::vector<std::vector<BufferId>> optimizers_own_;
  std::vector<char> alive_at_end_;   // by buffer
  std::int64_t step_ = 0;            // of the latest segment
  std::size_t computed_ = 0;         // segments in it so far
  Run last_ = {-1, -1};              // the latest segment
  std::int64_t zero_grads_ = 0;      // still to come
  std::size_t optimizer_steps_ = 0;  // so far
  // By storage, micro-batch and step: the first bytes of an activation.
  std::map<std::tuple<StorageId, std::int32_t, std::int64_t>, std::vector<std::byte>> activations_;
  std::vector<std::byte> scratch_;  // what the optimizer leaves in its memory
};

}  // namespace shardplan::test

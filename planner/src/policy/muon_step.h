// SPDX-License-Identifier: Apache-2.0
// Muon's step: as torch.optim.Muon runs it on DTensors, one matrix after the other, or by exchanges.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "shardplan/planner/program_builder.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "units/partition.h"

namespace shardplan {

// [Note: the order of exchanges]
// Exchange k's results go back while exchange k + 1 is orthogonalised; its own matrices came while exchange
// k - 1 was. `E` is the stream of the exchanges, C the compute stream:
//
//   C   copy in 0, 1 | orthogonalize 0 | copy in 2 | orthogonalize 1 | apply 0 | ...
//   E   there 0 | there 1              | back 0 | there 2           | back 1 | ...
//
// The copies in and the sums are on C, or on E (Muon::dist_muon), as DistMuon has them. An exchange without
// owners has nothing to send back, and is applied right behind its iterations.
//
// Exchanges that begin in the backward (Muon::begin_in_backward) are copied in and sent on E there, behind
// the reductions of their gradients. They have a communicator of their own: collectives of one follow one
// another, and gathers and reductions of the backward would wait. The step goes on with them, in the order in
// which they began, and then with the others.
class MuonStep {
 public:
  MuonStep(const Trace& trace, const Strategy& strategy, const Partition& partition, ProgramBuilder& builder);

  // kBadInput, with the FQN: a matrix that cannot be stepped so, or whose step the trace does not have.
  Status Check() const;
  // Steps these matrices, in the order of the model's parameters.
  struct Matrix {
    UnitId unit = -1;
    std::int32_t parameter = -1;  // index into Unit::parameters
  };
  void Step(const std::vector<Matrix>& matrices);

  // Exchanges that begin in the backward. Ready: those whose units are all among these, and that have not
  // begun in this step. Each has its units.
  struct ReadyExchange {
    Exchange exchange;
    std::set<UnitId> units;
  };
  std::vector<ReadyExchange> Ready(const std::set<UnitId>& reduced);
  // `reduced`: events behind which its gradients are there.
  void Begin(const Exchange& exchange, const std::set<EventId>& reduced);

 private:
  // An exchange and the buffers and events of its passage.
  struct Passage {
    ExchangeId exchange = -1;
    bool owned = true;
    BufferId pieces = -1, whole = -1;
    EventId copied = -1, there = -1, done = -1, back = -1;
  };

  const UnitParameter& ParameterOf(const Matrix& matrix) const;
  struct Ranks {
    std::int64_t shards = 1;
    std::int64_t replicas = 1;
  };
  const TracedOptimizerStep* Traced(Ranks ranks, const std::vector<std::int64_t>& shape, DType dtype) const;
  Ranks RanksOf(const Matrix& matrix) const;
  Status CheckMatrix(const Matrix& matrix) const;
  // The error of a step that the trace does not have; it says which flags record it.
  Status NotTraced(const UnitParameter& parameter, const MatrixRule* rule,
                   const std::vector<std::int64_t>& shape, Ranks ranks) const;

  void StepSharded(const Matrix& matrix);
  SegmentId SegmentOf(const TracedOptimizerStep& step, const Matrix& matrix, bool whole);

  CommunicatorId CommunicatorOf(const Matrix& matrix, bool over_replicas, bool own = false);
  bool IsExchanged(const Matrix& matrix) const;
  std::vector<Matrix> AllExchanged() const;
  const std::vector<ReadyExchange>& WithOwners();
  std::vector<Exchange> ExchangesOf(const std::vector<Matrix>& matrices);
  ExchangeId AddExchange(Exchange exchange);
  void StepWhole(const std::vector<Matrix>& matrices);
  Passage CopyIn(ExchangeId exchange, StreamId update, const std::set<EventId>& reduced);
  void WaitFor(StreamId waiter, StreamId on, EventId event);
  void Orthogonalize(const Passage& passage);
  void SendBack(const Passage& passage);
  void EmitApply(const Passage& passage, StreamId stream);
  void Apply(const Passage& passage);

  const Trace& trace_;
  const Strategy& strategy_;
  const Partition& partition_;
  ProgramBuilder& builder_;
  std::map<std::tuple<const TracedOptimizerStep*, CommunicatorId, CommunicatorId, bool>, SegmentId> segments_;
  std::optional<std::vector<ReadyExchange>> with_owners_;
  std::vector<Passage> begun_;  // in this step's backward
};

}  // namespace shardplan

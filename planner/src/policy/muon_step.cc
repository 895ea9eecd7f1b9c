// SPDX-License-Identifier: Apache-2.0
#include "policy/muon_step.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>
#include <variant>

#include "policy/matrix_owners.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/optimizers.h"
#include "units/muon_matrices.h"
#include "units/unit_parameters.h"

namespace shardplan {
namespace {

const Muon& MuonOf(const Strategy& strategy) { return *strategy.optimizer.muon; }

DType ExchangeDType(const Muon& muon, const UnitParameter& parameter) {
  return muon.dist_muon ? parameter.dtype : DType::kBFloat16;
}

// The bucket of a parameter; one more than there are: of none.
std::size_t BucketOf(const Muon& muon, const UnitParameter& parameter) {
  const auto found = std::ranges::find_if(muon.buckets, [&](const std::vector<std::string>& patterns) {
    return MatchesAny(patterns, parameter.fqn, parameter.shared_with);
  });
  return static_cast<std::size_t>(found - muon.buckets.begin());
}

// The rows of the matrices of a parameter. 0: it is one.
std::int64_t RowsOfEach(const MatrixRule& rule, const UnitParameter& parameter) {
  if (rule.block_rows > 0) return rule.block_rows;
  return parameter.shape.size() == 3 ? parameter.shape[1] : 0;
}

// Ranks in the words of `shardplan trace --muon`.
std::string FlagOf(std::int64_t shards, std::int64_t replicas) {
  return replicas > 1 ? fmt::format("{}x{}", replicas, shards) : fmt::format("{}", shards);
}

}  // namespace

MuonStep::MuonStep(const Trace& trace, const Strategy& strategy, const Partition& partition,
                   ProgramBuilder& builder)
    : trace_(trace), strategy_(strategy), partition_(partition), builder_(builder) {}

const UnitParameter& MuonStep::ParameterOf(const Matrix& matrix) const {
  return partition_.units[static_cast<std::size_t>(matrix.unit)]
      .unit.parameters[static_cast<std::size_t>(matrix.parameter)];
}

MuonStep::Ranks MuonStep::RanksOf(const Matrix& matrix) const {
  const UnitChoice& choice = partition_.units[static_cast<std::size_t>(matrix.unit)];
  return {choice.unit.shard_communicator < 0 ? 1 : choice.shard_size,
          choice.unit.replicate_communicator < 0 ? 1 : choice.replicate_size};
}

const TracedOptimizerStep* MuonStep::Traced(Ranks ranks, const std::vector<std::int64_t>& shape,
                                            DType dtype) const {
  return TracedMuonStep(trace_, MuonOf(strategy_), ranks.shards, ranks.replicas, shape, dtype);
}

Status MuonStep::NotTraced(const UnitParameter& parameter, const MatrixRule* rule,
                           const std::vector<std::int64_t>& shape, Ranks ranks) const {
  const Muon& muon = MuonOf(strategy_);
  const bool without_nesterov = !muon.nesterov && ranks.shards > 1;
  std::string flags = "--muon " + FlagOf(ranks.shards, ranks.replicas);
  const auto traced = std::ranges::find(trace_.parameters, parameter.fqn, &Parameter::fqn);
  if (traced != trace_.parameters.end() && !traced->muon)
    flags += fmt::format(" --muon-matrices {}", parameter.fqn);
  if (rule != nullptr && rule->block_rows > 0)
    flags += fmt::format(" --muon-blocks {}={}", parameter.fqn, rule->block_rows);
  if (muon.ns_steps != Muon().ns_steps) flags += fmt::format(" --muon-ns-steps {}", muon.ns_steps);
  if (without_nesterov) flags += " --no-muon-nesterov";
  const auto words = [](const std::string& on, std::int64_t iterations, bool plain) {
    return fmt::format("on {} {}, {} iterations{}", on, on == "1" ? "rank" : "ranks", iterations,
                       plain ? ", without Nesterov momentum" : "");
  };
  std::vector<std::string> found;
  for (const TracedOptimizerStep& step : trace_.optimizer_steps) {
    if (step.shape == shape && step.dtype == parameter.dtype)
      found.push_back(words(FlagOf(step.ranks, step.replicas), step.ns_steps, !step.nesterov));
  }
  return MakeInputError(
      "/optimizer/muon",
      fmt::format("the trace has no step of Muon for {}: record it with `shardplan trace {}`", parameter.fqn,
                  flags),
      fmt::format("{} in {}: {}", fmt::join(shape, " x "), Name(parameter.dtype),
                  found.empty() ? "no step" : fmt::format("{}", fmt::join(found, "; "))),
      words(FlagOf(ranks.shards, ranks.replicas), muon.ns_steps, without_nesterov));
}

Status MuonStep::CheckMatrix(const Matrix& matrix) const {
  const UnitParameter& parameter = ParameterOf(matrix);
  const UnitChoice& choice = partition_.units[static_cast<std::size_t>(matrix.unit)];
  const Muon& muon = MuonOf(strategy_);
  const MatrixRule* rule = RuleOf(muon, parameter);
  const auto wrong = [&](std::string_view what, std::string found, std::string expected) {
    return MakeInputError("/optimizer/muon", fmt::format("{} {}", parameter.fqn, what), std::move(found),
                          std::move(expected));
  };
  const auto cut = std::ranges::find_if(parameter.placements,
                                        [](const ParameterPlacement& p) { return p.dim >= 0 && p.size > 1; });
  if (cut != parameter.placements.end() && parameter.shape.size() == 2)
    return wrong("is cut over another dimension of the mesh: no rank of FSDP's has whole rows of it",
                 cut->mesh_dim, "a matrix that FSDP alone cuts");
  if (choice.cpu_offload)
    return wrong("lives in host memory, and Muon steps on the device", "cpu_offload", "none");
  if (parameter.shard_dim != 0 && RanksOf(matrix).shards > 1)
    return wrong("is not cut by rows", fmt::format("Shard({})", parameter.shard_dim), "Shard(0)");
  const auto [ranks, replicas] = RanksOf(matrix);
  const std::int64_t block = rule == nullptr ? 0 : RowsOfEach(*rule, parameter);
  const std::int64_t all_rows = parameter.shape.back() == 0 ? 0 : Numel(parameter) / parameter.shape.back();
  if (rule != nullptr && rule->block_rows > 0 && parameter.shape.size() != 2)
    return wrong("is a batch of matrices, whose rows are no blocks",
                 fmt::format("block_rows {}", rule->block_rows),
                 "block_rows of parameters of two dimensions");
  if (rule != nullptr && rule->block_rows > 0 && all_rows % block != 0)
    return wrong("does not divide into blocks of rows", fmt::format("{} rows", all_rows),
                 fmt::format("a multiple of {}", rule->block_rows));
  if (rule != nullptr && rule->owner) {
    const std::int64_t group = ranks * (rule->over_replicas ? replicas : 1);
    if (*rule->owner < 0 || *rule->owner >= group)
      return wrong("has an owner outside of the mesh", fmt::format("{}", *rule->owner),
                   fmt::format("0 to {}", group - 1));
  }
  if (rule == nullptr && parameter.shape[0] < ranks)
    return wrong("has fewer rows than ranks, which torch.optim.Muon refuses on DTensors",
                 fmt::format("{} rows on {} ranks", parameter.shape[0], ranks),
                 "an owner (compute: \"owned\")");
  if (parameter.grad_dtype)
    return wrong("has gradients of another dtype than its own", std::string(Name(*parameter.grad_dtype)),
                 std::string(Name(parameter.dtype)));
  const bool exchanged = IsExchanged(matrix);
  if (!exchanged && block > 0)
    return wrong("is several matrices, and no rank shares them with another", "1 rank",
                 "ranks that exchange them");
  const std::vector<std::int64_t> shape =
      exchanged && block > 0 ? std::vector<std::int64_t>{block, parameter.shape.back()} : parameter.shape;
  const Ranks traced = exchanged ? Ranks{} : RanksOf(matrix);
  if (Traced(traced, shape, parameter.dtype) == nullptr) return NotTraced(parameter, rule, shape, traced);
  return {};
}

Status MuonStep::Check() const {
  if (!strategy_.optimizer.muon) return {};
  for (std::size_t u = 0; u < partition_.units.size(); ++u) {
    const Unit& unit = partition_.units[u].unit;
    for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
      if (!unit.parameters[p].muon) continue;
      if (Status s = CheckMatrix({static_cast<UnitId>(u), static_cast<std::int32_t>(p)}); !s) return s;
    }
  }
  return {};
}

namespace {

// Without what the momentum's update has made: what the iterations take is the exchange's.
void KeepOwnStorages(Segment& segment) {
  std::set<StorageId> born, dead;
  for (const SegmentEntry& entry : segment.entries) {
    if (const auto* made = std::get_if<AllocateEvent>(&entry)) born.insert(made->storage);
    if (const auto* freed = std::get_if<FreeEvent>(&entry)) dead.insert(freed->storage);
  }
  const auto foreign = [&](StorageId storage) { return !born.contains(storage); };
  std::erase_if(segment.entries, [&](const SegmentEntry& entry) {
    const auto* freed = std::get_if<FreeEvent>(&entry);
    return freed != nullptr && foreign(freed->storage);
  });
  for (SegmentEntry& entry : segment.entries) {
    auto* op = std::get_if<OperatorEvent>(&entry);
    if (op == nullptr) continue;
    std::erase_if(op->reads, foreign);
    std::erase_if(op->writes, foreign);
  }
  // The result lives until it is copied into the exchange's buffer, behind the last operator.
  for (const StorageId storage : born) {
    if (!dead.contains(storage)) segment.entries.emplace_back(FreeEvent{storage});
  }
}

}  // namespace

// `whole`: the iterations alone, as an owner runs them.
SegmentId MuonStep::SegmentOf(const TracedOptimizerStep& step, const Matrix& matrix, bool whole) {
  const Unit& unit = partition_.units[static_cast<std::size_t>(matrix.unit)].unit;
  const CommunicatorId shards = whole ? -1 : unit.shard_communicator;
  const CommunicatorId replicas = whole ? -1 : unit.replicate_communicator;
  const auto [found, added] = segments_.try_emplace({&step, shards, replicas, whole}, SegmentId{-1});
  if (!added) return found->second;
  Segment segment{.name = fmt::format("muon {} {}{}", fmt::join(step.shape, "x"), Name(step.dtype),
                                      whole ? "" : fmt::format(" on {}", step.ranks)),
                  .phase = SegmentPhase::kOptimizer};
  if (shards >= 0) segment.name += " " + builder_.plan().communicators[static_cast<std::size_t>(shards)].name;
  const auto add = [&](const std::vector<SegmentEntry>& entries) {
    for (SegmentEntry entry : entries) {
      if (auto* op = std::get_if<OperatorEvent>(&entry); op != nullptr && op->collective) {
        const CommunicatorId traced = op->collective->communicator;
        op->collective->communicator = traced == kOfShards     ? shards
                                       : traced == kOfReplicas ? replicas
                                                               : CommunicatorOf(matrix, true);
      }
      segment.entries.push_back(std::move(entry));
    }
  };
  if (!whole) add(step.update);
  add(step.orthogonalize);
  if (!whole) add(step.apply);
  if (whole) KeepOwnStorages(segment);
  return found->second = builder_.AddSegment(std::move(segment));
}

void MuonStep::StepSharded(const Matrix& matrix) {
  const UnitParameter& parameter = ParameterOf(matrix);
  const TracedOptimizerStep* step = Traced(RanksOf(matrix), parameter.shape, parameter.dtype);
  if (step == nullptr) return builder_.Refuse(fmt::format("Muon's step of {} is not traced", parameter.fqn));
  builder_.SetUnit(-1);
  builder_.RunSegment(SegmentOf(*step, matrix, /*whole=*/false));
  builder_.SetUnit(matrix.unit);
  builder_.Emit(InstructionKind::kOptimizerStep, kCompute).parameter = matrix.parameter;
}

// Shards alone, or replicas x shards as one group. `own`: one that only exchanges use.
CommunicatorId MuonStep::CommunicatorOf(const Matrix& matrix, bool over_replicas, bool own) {
  const UnitChoice& choice = partition_.units[static_cast<std::size_t>(matrix.unit)];
  const CommunicatorId shard = choice.unit.shard_communicator, replicate = choice.unit.replicate_communicator;
  std::vector<Communicator>& communicators = builder_.plan().communicators;
  const auto add = [&](Communicator group) {
    const auto known = std::ranges::find(communicators, group);
    if (known != communicators.end()) return static_cast<CommunicatorId>(known - communicators.begin());
    communicators.push_back(std::move(group));
    return static_cast<CommunicatorId>(communicators.size()) - 1;
  };
  if (!over_replicas || RanksOf(matrix).replicas == 1 || shard < 0) {
    const CommunicatorId group = over_replicas && shard < 0 ? replicate : shard;
    if (!own) return group;
    Communicator copy = communicators[static_cast<std::size_t>(group)];
    copy.name += "_update";
    return add(std::move(copy));
  }
  Communicator both = ReplicasOfShards(communicators[static_cast<std::size_t>(replicate)],
                                       communicators[static_cast<std::size_t>(shard)]);
  if (own) both.name += "_update";
  return add(std::move(both));
}

ExchangeId MuonStep::AddExchange(Exchange exchange) {
  std::vector<Exchange>& exchanges = builder_.plan().exchanges;
  const auto known = std::ranges::find_if(exchanges, [&](const Exchange& other) {
    return other.communicator == exchange.communicator && other.dtype == exchange.dtype &&
           other.matrices == exchange.matrices;
  });
  if (known != exchanges.end()) return static_cast<ExchangeId>(known - exchanges.begin());
  exchange.name = fmt::format("muon.{}", exchanges.size());
  exchanges.push_back(std::move(exchange));
  return static_cast<ExchangeId>(exchanges.size()) - 1;
}

// By bucket, communicator and dtype, with owners and without, each in the order of FQNs.
std::vector<Exchange> MuonStep::ExchangesOf(const std::vector<Matrix>& matrices) {
  const Muon& muon = MuonOf(strategy_);
  std::map<std::tuple<std::size_t, CommunicatorId, DType, MatrixCompute>, std::vector<Matrix>> grouped;
  for (const Matrix& matrix : matrices) {
    const UnitParameter& parameter = ParameterOf(matrix);
    const MatrixRule& rule = *RuleOf(muon, parameter);
    const bool early = muon.begin_in_backward && rule.compute == MatrixCompute::kOwned;
    const CommunicatorId communicator = CommunicatorOf(matrix, rule.over_replicas, early);
    grouped[{BucketOf(muon, parameter), communicator, ExchangeDType(muon, parameter), rule.compute}]
        .push_back(matrix);
  }
  std::map<CommunicatorId, std::vector<std::int64_t>> earlier_work;
  std::vector<Exchange> exchanges;
  for (auto& [group, of_group] : grouped) {
    std::ranges::stable_sort(of_group, {}, [&](const Matrix& matrix) { return ParameterOf(matrix).fqn; });
    const auto [bucket, communicator, dtype, compute] = group;
    const std::int64_t ranks = builder_.plan().communicators[static_cast<std::size_t>(communicator)].size;
    Exchange exchange{.communicator = communicator, .dtype = dtype};
    std::vector<MatrixLoad> loads;
    for (const Matrix& matrix : of_group) {
      const UnitParameter& parameter = ParameterOf(matrix);
      const MatrixRule& rule = *RuleOf(muon, parameter);
      const std::int64_t columns = ColumnsOf(parameter), all = Numel(parameter) / columns;
      const std::int64_t each = RowsOfEach(rule, parameter), rows = each == 0 ? all : each;
      const std::int64_t shards = RanksOf(matrix).shards;
      const std::int64_t chunk = (parameter.shape[0] + shards - 1) / shards * (all / parameter.shape[0]);
      for (std::int64_t first = 0; first < all; first += rows) {
        exchange.matrices.push_back({matrix.unit, matrix.parameter, first, each});
        if (compute == MatrixCompute::kReplicated) continue;
        MatrixLoad load{NewtonSchulzWork(rows, columns, muon.ns_steps),
                        rows * columns * SizeBytes(parameter.dtype),
                        parameter.fqn,
                        {}};
        if (rule.owner) {
          load.ranks = {*rule.owner};
        } else if (muon.dist_muon && each > 0) {
          // DistMuon gives blocks to ranks as Shard(0) would, and does not weigh them against other matrices.
          const std::int64_t blocks = all / rows;
          load.ranks = {static_cast<std::int32_t>(first / rows / ((blocks + shards - 1) / shards))};
          load.work = load.bytes = 0;
        } else if (first / chunk == (first + rows - 1) / chunk) {
          // A rank has it whole already: it, or the same of another replica.
          for (std::int64_t rank = first / chunk; rank < ranks; rank += shards)
            load.ranks.push_back(static_cast<std::int32_t>(rank));
        }
        loads.push_back(std::move(load));
      }
    }
    if (!loads.empty()) {
      std::vector<std::int64_t>& earlier =
          earlier_work.try_emplace(communicator, static_cast<std::size_t>(ranks), std::int64_t{0})
              .first->second;
      const std::vector<std::int32_t> owners = AssignOwners(loads, earlier);
      for (std::size_t m = 0; m < owners.size(); ++m) exchange.matrices[m].owner = owners[m];
    }
    exchanges.push_back(std::move(exchange));
  }
  return exchanges;
}

// `update`: the stream that the momentum is updated on.
MuonStep::Passage MuonStep::CopyIn(ExchangeId id, StreamId update, const std::set<EventId>& reduced) {
  const Plan& plan = builder_.plan();
  const Exchange& exchange = plan.exchanges[static_cast<std::size_t>(id)];
  const ExchangeLayout layout(plan, exchange);
  const StreamId stream = builder_.Stream("update_exchange");
  const auto buffer = [&](BufferRole role, std::int64_t numel) {
    return builder_.AddBuffer({.name = fmt::format("{}.{}", exchange.name, Name(role)),
                               .role = role,
                               .dtype = exchange.dtype,
                               .parts_bytes = {Bytes{numel * SizeBytes(exchange.dtype)}}});
  };
  const auto event = [&](const char* what) {
    return builder_.Event(fmt::format("{}.{}", exchange.name, what));
  };
  const bool owned = HasOwners(exchange);
  const Passage passage{.exchange = id,
                        .owned = owned,
                        .pieces = buffer(BufferRole::kUpdatePieces, layout.PiecesNumel(0)),
                        .whole = buffer(BufferRole::kUpdateWhole, layout.WholeNumel(layout.LargestOwner())),
                        .copied = event("copied_in"),
                        .there = event("there"),
                        .done = owned ? event("orthogonalized") : -1,
                        .back = owned ? event("back") : -1};
  const CommunicatorId communicator = exchange.communicator;
  builder_.Allocate(passage.pieces, kCompute);
  builder_.Allocate(passage.whole, kCompute);
  if (update == stream) WaitFor(stream, kCompute, passage.copied);
  for (const EventId event : reduced) builder_.Wait(event, update);
  Instruction& copy = builder_.Emit(InstructionKind::kUpdateCopyIn, update);
  copy.dst = passage.pieces;
  copy.exchange = id;
  if (update != stream) WaitFor(stream, update, passage.copied);
  Instruction& there =
      builder_.Emit(owned ? InstructionKind::kAllToAll : InstructionKind::kUpdateGather, stream);
  there.src = passage.pieces;
  there.dst = passage.whole;
  there.communicator = communicator;
  there.exchange = id;
  builder_.Record(passage.there, stream);
  return passage;
}

void MuonStep::WaitFor(StreamId waiter, StreamId on, EventId event) {
  builder_.Record(event, on);
  builder_.Wait(event, waiter);
}

void MuonStep::Orthogonalize(const Passage& passage) {
  builder_.Wait(passage.there, kCompute);
  if (!passage.owned) builder_.Free(passage.pieces, kCompute);
  const std::vector<ExchangedMatrix> matrices =
      builder_.plan().exchanges[static_cast<std::size_t>(passage.exchange)].matrices;
  for (std::size_t m = 0; m < matrices.size(); ++m) {
    const UnitParameter& parameter = ParameterOf({matrices[m].unit, matrices[m].parameter});
    const TracedOptimizerStep* step = Traced({}, ShapeOf(builder_.plan(), matrices[m]), parameter.dtype);
    if (step == nullptr)
      return builder_.Refuse(fmt::format("Muon's step of {} is not traced", parameter.fqn));
    const SegmentId segment = SegmentOf(*step, {matrices[m].unit, matrices[m].parameter}, /*whole=*/true);
    Instruction& orthogonalize = builder_.Emit(InstructionKind::kOrthogonalize, kCompute);
    orthogonalize.dst = passage.whole;
    orthogonalize.exchange = passage.exchange;
    orthogonalize.matrix = static_cast<std::int32_t>(m);
    orthogonalize.segment = segment;
  }
  if (passage.owned) builder_.Record(passage.done, kCompute);
}

void MuonStep::SendBack(const Passage& passage) {
  const StreamId stream = builder_.Stream("update_exchange");
  builder_.Wait(passage.done, stream);
  Instruction& back = builder_.Emit(InstructionKind::kAllToAll, stream);
  back.src = passage.whole;
  back.dst = passage.pieces;
  back.communicator = builder_.plan().exchanges[static_cast<std::size_t>(passage.exchange)].communicator;
  back.exchange = passage.exchange;
  if (MuonOf(strategy_).dist_muon) EmitApply(passage, stream);
  builder_.Record(passage.back, stream);
}

void MuonStep::EmitApply(const Passage& passage, StreamId stream) {
  Instruction& apply = builder_.Emit(InstructionKind::kUpdateApply, stream);
  apply.src = passage.owned ? passage.pieces : passage.whole;
  apply.exchange = passage.exchange;
}

void MuonStep::Apply(const Passage& passage) {
  if (passage.owned) builder_.Wait(passage.back, kCompute);
  if (!MuonOf(strategy_).dist_muon) EmitApply(passage, kCompute);
  builder_.Free(passage.whole, kCompute);
  if (passage.owned) builder_.Free(passage.pieces, kCompute);
}

void MuonStep::StepWhole(const std::vector<Matrix>& matrices) {
  std::vector<Passage> passages = std::exchange(begun_, {});
  const std::size_t begun = passages.size();
  std::vector<ExchangeId> exchanges;
  for (Exchange& exchange : ExchangesOf(matrices)) exchanges.push_back(AddExchange(std::move(exchange)));
  builder_.SetUnit(-1);
  // A unit's states are one buffer, which what has begun writes on the stream of the exchanges.
  const bool on_exchanges = MuonOf(strategy_).dist_muon || begun > 0;
  const StreamId update = on_exchanges ? builder_.Stream("update_exchange") : kCompute;
  const std::size_t all = begun + exchanges.size();
  const auto come = [&](std::size_t count) {
    if (count <= all && passages.size() < count)
      passages.push_back(CopyIn(exchanges[passages.size() - begun], update, {}));
  };
  come(1);
  for (std::size_t e = 0; e < all; ++e) {
    come(e + 2);
    Orthogonalize(passages[e]);
    if (passages[e].owned) SendBack(passages[e]);
    if (e > 0 && passages[e - 1].owned) Apply(passages[e - 1]);
    if (!passages[e].owned) Apply(passages[e]);
  }
  if (passages.back().owned) Apply(passages.back());
}

// One rank has every matrix whole, and nobody to exchange it with.
bool MuonStep::IsExchanged(const Matrix& matrix) const {
  const MatrixRule* rule = RuleOf(MuonOf(strategy_), ParameterOf(matrix));
  const auto [shards, replicas] = RanksOf(matrix);
  return rule != nullptr && (shards > 1 || (rule->over_replicas && replicas > 1));
}

void MuonStep::Step(const std::vector<Matrix>& matrices) {
  std::set<std::pair<UnitId, std::int32_t>> begun;
  for (const Passage& passage : begun_) {
    for (const ExchangedMatrix& matrix :
         builder_.plan().exchanges[static_cast<std::size_t>(passage.exchange)].matrices)
      begun.emplace(matrix.unit, matrix.parameter);
  }
  std::vector<Matrix> whole;
  for (const Matrix& matrix : matrices) {
    if (!IsExchanged(matrix)) {
      StepSharded(matrix);
    } else if (!begun.contains({matrix.unit, matrix.parameter})) {
      whole.push_back(matrix);
    }
  }
  if (!whole.empty() || !begun_.empty()) StepWhole(whole);
}

std::vector<MuonStep::Matrix> MuonStep::AllExchanged() const {
  std::vector<Matrix> matrices;
  for (std::size_t u = 0; u < partition_.units.size(); ++u) {
    const std::vector<UnitParameter>& parameters = partition_.units[u].unit.parameters;
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const Matrix matrix{static_cast<UnitId>(u), static_cast<std::int32_t>(p)};
      if (parameters[p].muon && IsExchanged(matrix)) matrices.push_back(matrix);
    }
  }
  return matrices;
}

// The exchanges of all matrices that have owners: the same in every step.
const std::vector<MuonStep::ReadyExchange>& MuonStep::WithOwners() {
  if (with_owners_) return *with_owners_;
  with_owners_.emplace();
  for (Exchange& exchange : ExchangesOf(AllExchanged())) {
    if (!HasOwners(exchange)) continue;
    std::set<UnitId> units;
    for (const ExchangedMatrix& matrix : exchange.matrices) units.insert(matrix.unit);
    with_owners_->push_back({std::move(exchange), std::move(units)});
  }
  return *with_owners_;
}

std::vector<MuonStep::ReadyExchange> MuonStep::Ready(const std::set<UnitId>& reduced) {
  std::vector<ReadyExchange> ready;
  for (const ReadyExchange& planned : WithOwners()) {
    const bool began = std::ranges::any_of(begun_, [&](const Passage& passage) {
      return builder_.plan().exchanges[static_cast<std::size_t>(passage.exchange)].matrices ==
             planned.exchange.matrices;
    });
    if (!began && std::ranges::includes(reduced, planned.units)) ready.push_back(planned);
  }
  return ready;
}

void MuonStep::Begin(const Exchange& exchange, const std::set<EventId>& reduced) {
  builder_.SetUnit(-1);
  begun_.push_back(CopyIn(AddExchange(exchange), builder_.Stream("update_exchange"), reduced));
}

}  // namespace shardplan

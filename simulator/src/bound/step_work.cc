// SPDX-License-Identifier: Apache-2.0
// Work of a step that every plan of the class has: read off the trace.
#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <variant>

#include "bound/cost_lines.h"
#include "bound/muon_work.h"
#include "bound/step_parts.h"
#include "cost/operator_costs.h"
#include "cost/optimizer_cost.h"
#include "shardplan/schemas/collective_kinds.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/program.h"
#include "shardplan/simulator/lower_bound.h"

namespace shardplan {

using internal::Int128;

class StepWorkBuilder {
 public:
  StepWorkBuilder(const Trace& trace, const Plan& job, bool recomputation, bool activation_offload,
                  bool shared_pools)
      : trace_(trace),
        job_(job),
        leaves_(recomputation || activation_offload),
        keeps_(!activation_offload),
        costs_(MakeCostModel(job.cluster)) {
    work_.cluster = job.cluster;
    work_.pools_apart = !shared_pools;
  }

  Result<StepWork> Run() {
    if (Status added = AddParameters(); !added) return std::unexpected(added.error());
    if (Status walked = WalkProgram(); !walked) return std::unexpected(walked.error());
    SetStretches();
    SetLines();
    SetOptimizer();
    SetLeastMemory();
    return StepWork(std::make_shared<const StepWork::Parts>(std::move(work_)));
  }

 private:
  using StorageKey = std::pair<StorageId, std::int32_t>;  // and its micro-batch

  std::int64_t operators() const { return std::ssize(work_.durations_ns); }

  // The units that parameters are in, by their indices in the trace.
  Result<std::vector<const Unit*>> UnitsOfParameters() const {
    std::vector<const Unit*> units(trace_.parameters.size(), nullptr);
    std::size_t in_units = 0;
    for (const Unit& unit : job_.units) {
      in_units += unit.parameters.size();
      for (const UnitParameter& parameter : unit.parameters) {
        if (std::cmp_less(parameter.index, units.size())) units[parameter.index] = &unit;
      }
    }
    if (in_units != units.size() || std::ranges::count(units, nullptr) > 0) {
      return MakeError(ErrorCode::kNegative,
                       "the plan is not of the class: a parameter is in several units, or in none");
    }
    return units;
  }

  // The mesh of the unit's parameters, added if no unit before has it.
  std::size_t MeshOf(const Unit& unit) {
    const auto same = [&](CommunicatorId a, CommunicatorId b) {
      return a == b || (a >= 0 && b >= 0 && SameRanks(job_.communicators[a], job_.communicators[b]));
    };
    const auto known = std::ranges::find_if(unit_of_mesh_, [&](const Unit* other) {
      return same(unit.shard_communicator, other->shard_communicator) &&
             same(unit.replicate_communicator, other->replicate_communicator);
    });
    if (known != unit_of_mesh_.end()) return static_cast<std::size_t>(known - unit_of_mesh_.begin());
    unit_of_mesh_.push_back(&unit);
    work_.meshes.push_back({.shards = ShardCount(job_, unit)});
    return work_.meshes.size() - 1;
  }

  Status AddParameters() {
    const Result<std::vector<const Unit*>> units = UnitsOfParameters();
    if (!units) return std::unexpected(units.error());
    for (std::size_t p = 0; p < units->size(); ++p) {
      const Unit& unit = *(*units)[p];
      const shardplan::Parameter& parameter = trace_.parameters[p];
      const UnitParameter cut_by_rows{.shape = parameter.shape};
      StepWork::Parts::Parameter& added = work_.parameters.emplace_back();
      added.mesh = MeshOf(unit);
      const std::int64_t shards = work_.meshes[added.mesh].shards;
      if (shards <= 1) continue;
      added.numel = Numel(cut_by_rows);
      added.padded_numel = PaddedPieceNumel(cut_by_rows, shards) * shards;
      added.stored = SizeBytes(parameter.dtype);
      added.gathered = SizeBytes(unit.param_dtype);
      added.reduced = SizeBytes(unit.reduce_dtype);
    }
    return {};
  }

  // The step that repeats: its passes in order, and then the optimizer.
  Status WalkProgram() {
    for (const ProgramCall& call : ProgramOfStep(job_.strategy, std::ssize(job_.strategy.program))) {
      const Pass* pass = nullptr;
      if (const auto* forward = std::get_if<ForwardCall>(&call)) {
        if (std::cmp_less(forward->trace, trace_.forwards.size())) pass = &trace_.forwards[forward->trace];
        microbatch_ = forward->microbatch;
      } else if (const auto* backward = std::get_if<BackwardCall>(&call)) {
        if (std::cmp_less(backward->trace, trace_.backwards.size()))
          pass = &trace_.backwards[backward->trace];
        microbatch_ = backward->microbatches.size() == 1 ? backward->microbatches.front() : -1;
      } else {
        continue;
      }
      if (pass == nullptr)
        return MakeInputError("/forwards", "the plan runs a pass that this trace does not have");
      WalkPass(*pass);
    }
    return {};
  }

  void WalkPass(const Pass& pass) {
    work_.pass_begins.push_back(operators());
    first_storages_.push_back(work_.storages.size());
    own_.clear();
    under_way_.clear();
    const std::map<const OperatorEvent*, Transfers> transfers = TransfersOf(pass);
    for (const TraceEvent& event : pass.events) {
      if (const auto* allocate = std::get_if<AllocateEvent>(&event)) {
        own_.insert(allocate->storage);
        if (allocate->role == StorageRole::kParameterGrad) continue;  // counted as a gradient
        const StorageKey key{allocate->storage, microbatch_};
        index_of_[key] = work_.storages.size();
        work_.storages.push_back({.size_bytes = allocate->size_bytes.value});
      } else if (const auto* op = std::get_if<OperatorEvent>(&event)) {
        AddOperator(*op);
        if (const auto group = transfers.find(op); group != transfers.end()) {
          AddCollective(*op, group->second);
        } else if (op->collective && !IsGrouped(*op)) {
          AddCollective(*op, {op->collective->size_bytes, Bytes{}, {op->collective->work}});
        }
      } else if (const auto* wait = std::get_if<CollectiveWaitEvent>(&event)) {
        Await(wait->work);
      } else if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) {
        if (operators() > 0) Mark(work_.parameters[grad->parameter].grads, operators() - 1);
      }
    }
  }

  // Transfers that are issued as one group: a kernel, both directions at once.
  struct Transfers {
    Bytes sent, received;
    std::vector<std::int32_t> works;  // ModelCollective::work of each
  };

  static bool IsGrouped(const OperatorEvent& op) {
    return op.collective->batch >= 0 &&
           DescriptionOf(op.collective->kind).movement == CollectiveMovement::kTransfer;
  }

  // By the first of each group. Units' hooks may cut a group that other events interrupt into several
  // kernels: these are left out.
  static std::map<const OperatorEvent*, Transfers> TransfersOf(const Pass& pass) {
    std::map<std::int32_t, const OperatorEvent*> first;  // by number
    std::set<std::int32_t> interrupted;
    std::map<const OperatorEvent*, Transfers> groups;
    std::int32_t running = -1;
    for (const TraceEvent& event : pass.events) {
      const auto* op = std::get_if<OperatorEvent>(&event);
      if (op == nullptr || !op->collective || !IsGrouped(*op)) {
        const bool only_memory = std::holds_alternative<AllocateEvent>(event) ||
                                 std::holds_alternative<FreeEvent>(event) ||
                                 std::holds_alternative<ReleaseEvent>(event);
        if (!only_memory) running = -1;
        continue;
      }
      const ModelCollective& moved = *op->collective;
      const auto [group, is_new] = first.try_emplace(moved.batch, op);
      if (!is_new && running != moved.batch) interrupted.insert(moved.batch);
      running = moved.batch;
      Transfers& all = groups[group->second];
      (moved.kind == CollectiveKind::kSend ? all.sent : all.received) += moved.size_bytes;
      all.works.push_back(moved.work);
    }
    for (const std::int32_t batch : interrupted) groups.erase(first.at(batch));
    return groups;
  }

  // A kernel of the model's collectives, which is the operator that was added last. One that is not waited
  // for in its pass may run beside the optimizer, and is left out.
  void AddCollective(const OperatorEvent& op, const Transfers& moved) {
    ++collective_kernels_;
    const Result<CollectiveCost> cost =
        internal::CostOfTraced(*costs_, job_.cluster, trace_.communicators[op.collective->communicator],
                               job_.world_size, *op.collective, std::max(moved.sent, moved.received));
    if (!cost) return;
    StepWork::Parts::ModelCollective added{
        .op = operators() - 1, .duration_ns = cost->duration_ns.value, .loads = cost->loads};
    if (op.duration_ns.value >= 0) added.duration_ns = op.duration_ns.value;
    if (std::ranges::min(moved.works) < 0) {
      work_.model_collectives.push_back(added);
      return;
    }
    for (const std::int32_t work : moved.works) under_way_[work] = added;
  }

  void Await(std::int32_t work) {
    const auto waited = under_way_.find(work);
    if (waited == under_way_.end()) return;
    StepWork::Parts::ModelCollective collective = waited->second;
    collective.until = operators();
    std::erase_if(under_way_, [&](const auto& other) { return other.second.op == collective.op; });
    work_.model_collectives.push_back(collective);
  }

  static void Mark(std::vector<std::int64_t>& positions, std::int64_t position) {
    if (positions.empty() || positions.back() != position) positions.push_back(position);
  }

  void AddOperator(const OperatorEvent& op) {
    const std::int64_t index = operators();
    // A collective of the model is no work of the compute stream: see AddCollective.
    const std::int64_t op_ns = op.collective ? 0 : costs_->Operator(op).value;
    work_.durations_ns.push_back(op_ns);
    if (op.collective) ++collectives_;
    for (const ParameterId parameter : op.parameters) Mark(work_.parameters[parameter].reads, index);
    std::set<StorageId> used(op.reads.begin(), op.reads.end());
    used.insert(op.writes.begin(), op.writes.end());
    std::int64_t remade_bytes = 0;
    for (const StorageId id : used) {
      const auto found = index_of_.find({id, microbatch_});
      if (found == index_of_.end()) continue;
      StepWork::Parts::Storage& storage = work_.storages[found->second];
      // A storage of an earlier pass may be there again, made anew or brought back; in a backward over
      // several micro-batches nobody knows whose it is.
      const bool earlier = !own_.contains(id);
      if (earlier && (leaves_ || microbatch_ < 0)) {
        if (microbatch_ < 0) continue;
        remade_bytes += storage.size_bytes;
        later_uses_.push_back({found->second, index});
        continue;
      }
      if (storage.first < 0) storage.first = index;
      storage.last = index;
    }
    remade_bytes_.push_back(remade_bytes);
    if (leaves_) uses_.push_back({op_ns, OwnOf(op.reads), OwnOf(op.writes)});
  }

  // The storages that the pass makes itself, counted in it.
  std::vector<std::int32_t> OwnOf(std::span<const StorageId> ids) const {
    std::vector<std::int32_t> own;
    for (const StorageId id : ids) {
      const auto found = index_of_.find({id, microbatch_});
      if (found != index_of_.end() && own_.contains(id))
        own.push_back(static_cast<std::int32_t>(found->second - first_storages_.back()));
    }
    return own;
  }

  void SetStretches() {
    if (!leaves_) return;
    work_.used_later_bytes.assign(work_.durations_ns.size(), 0);
    if (!keeps_) {
      for (const auto& [storage, index] : later_uses_)
        work_.used_later_bytes[index] += work_.storages[storage].size_bytes;
      return;
    }
    std::vector<internal::PassTensor> all;
    for (const StepWork::Parts::Storage& storage : work_.storages)
      all.push_back({.bytes = storage.size_bytes, .last_use = storage.last});
    for (const auto& [storage, index] : later_uses_) {
      if (all[storage].first_later_use < 0) all[storage].first_later_use = index;
      all[storage].last_later_use = index;
    }
    internal::StretchMaker stretches;
    for (std::size_t p = 0; p < first_storages_.size(); ++p) {
      const bool last = p + 1 == first_storages_.size();
      const std::int64_t begin = work_.pass_begins[p], end = last ? operators() : work_.pass_begins[p + 1];
      const auto from = all.begin() + static_cast<std::ptrdiff_t>(first_storages_[p]);
      const auto to = last ? all.end() : all.begin() + static_cast<std::ptrdiff_t>(first_storages_[p + 1]);
      std::vector<internal::PassTensor> tensors(from, to);
      stretches.Add(begin, {uses_.begin() + begin, uses_.begin() + end}, tensors, work_.stretches);
      std::ranges::copy(tensors, from);
    }
    for (const auto& [storage, index] : later_uses_) {
      if (index >= all[storage].chosen_until) work_.used_later_bytes[index] += all[storage].bytes;
    }
  }

  void SetLines() {
    work_.copy_slope = internal::CopySlope(*costs_);
    for (std::size_t m = 0; m < work_.meshes.size(); ++m) SetLines(m);
  }

  void SetLines(std::size_t index) {
    StepWork::Parts::Mesh& mesh = work_.meshes[index];
    const Unit& unit = *unit_of_mesh_[index];
    if (mesh.shards <= 1) return;
    struct Moved {
      Int128 bytes = 0, padded_bytes = 0;
    };
    Moved gathered, reduced;
    for (const StepWork::Parts::Parameter& p : work_.parameters) {
      if (p.mesh != index) continue;
      gathered.bytes += Int128{p.numel} * p.gathered;
      gathered.padded_bytes += Int128{p.padded_numel} * p.gathered;
      reduced.bytes += Int128{p.numel} * p.reduced;
      reduced.padded_bytes += Int128{p.padded_numel} * p.reduced;
    }
    // Twice: what is aligned.
    const auto sizes = [](const Moved& moved) {
      const auto twice = [](Int128 bytes) {
        return static_cast<std::int64_t>(std::min<Int128>(2 * bytes + (1 << 20), Int128{1} << 50));
      };
      return internal::CollectiveSizes{.usual_bytes = twice(moved.bytes),
                                       .most_bytes = twice(std::max(moved.bytes, moved.padded_bytes))};
    };
    const Communicator& shard = job_.communicators[unit.shard_communicator];
    mesh.gather = LineOf(CollectiveKind::kAllGather, shard, sizes(gathered));
    mesh.reduce = LineOf(CollectiveKind::kReduceScatter, shard, sizes(reduced));
    if (unit.replicate_communicator >= 0) {
      mesh.all_reduce =
          LineOf(CollectiveKind::kAllReduce, job_.communicators[unit.replicate_communicator], sizes(reduced));
    }
    if (!shard.dims.empty()) return;
    for (std::int64_t ranks = 2; ranks < shard.size; ++ranks) {
      if (shard.size % ranks != 0) continue;
      const Communicator part{.name = "part", .size = ranks, .stride = shard.stride};
      mesh.sub_meshes.push_back({ranks, LineOf(CollectiveKind::kAllGather, part, sizes(gathered))});
      const Communicator outer{.name = "outer", .size = shard.size / ranks, .stride = shard.stride * ranks};
      mesh.two_levels.push_back({ranks, LineOf(CollectiveKind::kReduceScatter, part, sizes(reduced)),
                                 LineOf(CollectiveKind::kReduceScatter, outer, sizes(reduced))});
    }
  }

  StepWork::Parts::Line LineOf(CollectiveKind kind, const Communicator& group,
                               const internal::CollectiveSizes& sizes) const {
    const internal::CostLines lines =
        internal::LinesBelow(*costs_, job_.cluster, kind, group, job_.world_size, sizes);
    StepWork::Parts::Line line;
    for (std::size_t l = 0; l < line.size(); ++l) line[l] = {lines[l].fixed_ns, lines[l].per_byte};
    return line;
  }

  // Pieces are padded, so the first rank has no less than its share of the parameters: less what is left free
  // between those of a flat one, 16 bytes at most. The first rank may have frozen elements alone of a flat
  // parameter that is frozen in part.
  void SetOptimizer() {
    constexpr std::int64_t kAlignment = 16;
    const Optimizer& optimizer = job_.strategy.optimizer;
    const bool all_train = std::ranges::all_of(trace_.parameters, &shardplan::Parameter::requires_grad);
    std::int64_t shard_bytes = 0, trained_bytes = 0, state_bytes = 0, gradient_bytes = 0;
    for (std::size_t p = 0; p < work_.parameters.size(); ++p) {
      const StepWork::Parts::Parameter& parameter = work_.parameters[p];
      const std::int64_t share = parameter.numel / work_.MeshOf(parameter).shards;
      shard_bytes += share * parameter.stored;
      const std::int64_t stepped = share - kAlignment;
      if (!all_train || stepped <= 0) continue;
      const shardplan::Parameter& traced = trace_.parameters[p];
      const bool muon = MuonSteps(optimizer, traced.fqn, traced.shared_with);
      gradient_bytes += stepped * parameter.stored;
      if (!muon) trained_bytes += stepped * parameter.stored;
      if (!muon && !StatesHaveParameterShapes(optimizer.kind)) continue;  // as large as rows and columns
      const OptimizerShard shard{.shape = {stepped}, .dtype = traced.dtype, .muon = muon};
      for (const Bytes state : OptimizerStates(optimizer, shard)) state_bytes += state.value;
    }
    const OptimizerCost cost = CostOf(optimizer, {trained_bytes}, 1);
    if (trained_bytes > 0) work_.optimizer_ns = costs_->DeviceCopy(cost.read_bytes, cost.written_bytes);
    if (all_train && optimizer.muon) {
      const Unit* mesh = unit_of_mesh_.size() == 1 ? unit_of_mesh_[0] : nullptr;
      work_.optimizer_ns = internal::LeastMuonTime(trace_, job_, *costs_, mesh, work_.optimizer_ns);
    }
    work_.static_bytes.value = shard_bytes + state_bytes;
    work_.least_memory.value = work_.static_bytes.value + gradient_bytes;
    const Host& host = job_.cluster.host;
    work_.host_ns = internal::IssueOfOperator(host) * (operators() - collectives_) +
                    host.collective_issue_ns * collective_kernels_ + work_.optimizer_ns;
    // Behind Muon's work the rest is issued while that runs.
    if (!optimizer.muon) work_.host_ns += OptimizerIssue(host) * cost.kernels;
  }

  // While an operator runs, there is what it reads and writes, whole parameters and gradients among it, and
  // what is kept for later.
  void SetLeastMemory() {
    std::vector<std::int64_t> needed(remade_bytes_.begin(), remade_bytes_.end());
    std::vector<std::int64_t> change(needed.size() + 1, 0);
    for (const StepWork::Parts::Storage& storage : work_.storages) {
      if (storage.first < 0) continue;
      change[storage.first] += storage.size_bytes;
      change[storage.last + 1] -= storage.size_bytes;
    }
    for (const StepWork::Parts::Parameter& parameter : work_.parameters) {
      for (const std::int64_t read : parameter.reads) needed[read] += parameter.numel * parameter.gathered;
      if (parameter.grads.empty()) continue;
      const std::int64_t waiting_bytes = parameter.WaitingBytes(work_.MeshOf(parameter).shards);
      change[parameter.grads.front() + 1] += waiting_bytes;
      for (const std::int64_t made : parameter.grads) {
        needed[made] += parameter.numel * std::min(parameter.gathered, parameter.reduced);
        if (made > parameter.grads.front()) needed[made] -= waiting_bytes;
      }
    }
    std::int64_t kept = work_.static_bytes.value, most = 0;
    auto pass = work_.pass_begins.begin();
    for (std::size_t i = 0; i < needed.size(); ++i) {
      kept += change[i];
      work_.least_memory.value = std::max(work_.least_memory.value, kept + needed[i]);
      if (pass != work_.pass_begins.end() && std::cmp_equal(*pass, i)) {
        ++pass;
        work_.peak_operators.push_back(static_cast<std::int64_t>(i));
        most = kept + needed[i];
      } else if (!work_.peak_operators.empty() && kept + needed[i] > most) {
        work_.peak_operators.back() = static_cast<std::int64_t>(i);
        most = kept + needed[i];
      }
    }
  }

  const Trace& trace_;
  const Plan& job_;
  const bool leaves_;  // what a pass leaves to later ones need not be there in between
  const bool keeps_;   // ... but then it is computed again
  const std::unique_ptr<CostModel> costs_;
  StepWork::Parts work_;
  std::vector<const Unit*> unit_of_mesh_;                               // one of its units
  std::map<std::int32_t, StepWork::Parts::ModelCollective> under_way_;  // by ModelCollective::work
  std::int64_t collectives_ = 0, collective_kernels_ = 0;               // of the model
  std::int32_t microbatch_ = 0;                                         // -1: of several
  std::set<StorageId> own_;                                             // storages that the pass allocates
  std::map<StorageKey, std::size_t> index_of_;
  std::vector<std::size_t> first_storages_;  // by pass
  std::vector<std::pair<std::size_t, std::int64_t>>
      later_uses_;                            // a storage, and an operator of a later pass
  std::vector<internal::PassOperator> uses_;  // by operator
  std::vector<std::int64_t>
      remade_bytes_;  // by operator: what it uses of earlier passes, if that is made anew
};

std::int64_t StepWork::operators() const { return std::ssize(parts_->durations_ns); }
const std::vector<std::int64_t>& StepWork::durations_ns() const { return parts_->durations_ns; }
const std::vector<std::int64_t>& StepWork::pass_begins() const { return parts_->pass_begins; }
const Cluster& StepWork::cluster() const { return parts_->cluster; }
std::vector<std::int64_t> StepWork::PeakOperators() const { return parts_->peak_operators; }
Bytes StepWork::LeastMemory() const { return parts_->least_memory; }
Nanoseconds StepWork::HostBound() const { return parts_->host_ns; }

std::vector<std::int64_t> StepWork::Meshes() const {
  std::vector<std::int64_t> ranks;
  for (const Parts::Mesh& mesh : parts_->meshes) ranks.push_back(mesh.shards);
  return ranks;
}

Nanoseconds StepWork::ModelWait() const {
  Nanoseconds waits;
  for (const Parts::ModelCollective& collective : parts_->model_collectives) {
    if (collective.until < 0) waits.value += collective.duration_ns;
  }
  return waits;
}

std::int64_t StepWork::PassBehind(std::int64_t op) const { return parts_->PassBehind(op); }

std::map<std::int64_t, std::int64_t> StepWork::Deadlines() const {
  std::map<std::int64_t, std::int64_t> bytes;
  for (const Parts::Parameter& parameter : parts_->parameters) {
    if (!parameter.reads.empty()) bytes[2 * parameter.reads.front() + 1] += parameter.numel;
    if (!parameter.grads.empty()) bytes[2 * parameter.grads.back() + 2] += parameter.numel;
  }
  return bytes;
}

Result<StepWork> StepWork::Make(const Trace& trace, const Plan& job, bool recomputation,
                                bool activation_offload, bool shared_pools) {
  return StepWorkBuilder(trace, job, recomputation, activation_offload, shared_pools).Run();
}

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
// Work of a step that every plan of the class has: read off the trace.
#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "bound/cost_lines.h"
#include "bound/step_parts.h"
#include "cost/operator_costs.h"
#include "cost/optimizer_cost.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/program.h"
#include "shardplan/simulator/lower_bound.h"

namespace shardplan {

using internal::Int128;

class StepWorkBuilder {
 public:
  StepWorkBuilder(const Trace& trace, const Plan& job, bool recomputation, bool activation_offload)
      : trace_(trace),
        job_(job),
        leaves_(recomputation || activation_offload),
        keeps_(!activation_offload),
        costs_(MakeCostModel(job.cluster)) {
    work_.cluster = job.cluster;
  }

  Result<StepWork> Run() {
    std::size_t in_units = 0;
    for (const Unit& unit : job_.units) in_units += unit.parameters.size();
    if (in_units != trace_.parameters.size()) {
      return MakeError(ErrorCode::kNegative,
                       "the plan is not of the class: a parameter is in several units, or in none");
    }
    AddParameters();
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

  const Unit* AnyUnit() const {
    const auto found = std::ranges::find_if(job_.units, [](const Unit& u) { return !u.parameters.empty(); });
    return found == job_.units.end() ? nullptr : &*found;
  }

  void AddParameters() {
    const Unit* unit = AnyUnit();
    if (unit != nullptr) work_.shards = ShardCount(job_, *unit);
    for (const shardplan::Parameter& parameter : trace_.parameters) {
      const UnitParameter cut_by_rows{.shape = parameter.shape};
      const std::int64_t numel = Numel(cut_by_rows);
      StepWork::Parts::Parameter& added = work_.parameters.emplace_back();
      if (unit == nullptr || work_.shards <= 1) continue;
      added = {.numel = numel,
               .padded_numel = PaddedPieceNumel(cut_by_rows, work_.shards) * work_.shards,
               .stored = SizeBytes(parameter.dtype),
               .gathered = SizeBytes(unit->param_dtype),
               .reduced = SizeBytes(unit->reduce_dtype)};
    }
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
    for (const TraceEvent& event : pass.events) {
      if (const auto* allocate = std::get_if<AllocateEvent>(&event)) {
        own_.insert(allocate->storage);
        if (allocate->role == StorageRole::kParameterGrad) continue;  // counted as a gradient
        const StorageKey key{allocate->storage, microbatch_};
        index_of_[key] = work_.storages.size();
        work_.storages.push_back({.size_bytes = allocate->size_bytes.value});
      } else if (const auto* op = std::get_if<OperatorEvent>(&event)) {
        AddOperator(*op);
      } else if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) {
        if (operators() > 0) Mark(work_.parameters[grad->parameter].grads, operators() - 1);
      }
    }
  }

  static void Mark(std::vector<std::int64_t>& positions, std::int64_t position) {
    if (positions.empty() || positions.back() != position) positions.push_back(position);
  }

  void AddOperator(const OperatorEvent& op) {
    const std::int64_t index = operators();
    // A collective of the model is no work of the compute stream. The bound leaves it out.
    const std::int64_t op_ns = op.collective ? 0 : costs_->Operator(op).value;
    work_.durations_ns.push_back(op_ns);
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
    const Unit* unit = AnyUnit();
    if (unit == nullptr || work_.shards <= 1) return;
    struct Moved {
      Int128 bytes = 0, padded_bytes = 0;
    };
    Moved gathered, reduced;
    for (const StepWork::Parts::Parameter& p : work_.parameters) {
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
    const Communicator& shard = job_.communicators[unit->shard_communicator];
    work_.gather = LineOf(CollectiveKind::kAllGather, shard, sizes(gathered));
    work_.reduce = LineOf(CollectiveKind::kReduceScatter, shard, sizes(reduced));
    if (unit->replicate_communicator >= 0) {
      work_.all_reduce = LineOf(CollectiveKind::kAllReduce, job_.communicators[unit->replicate_communicator],
                                sizes(reduced));
    }
    if (!shard.dims.empty()) return;
    for (std::int64_t ranks = 2; ranks < shard.size; ++ranks) {
      if (shard.size % ranks != 0) continue;
      const Communicator part{.name = "part", .size = ranks, .stride = shard.stride};
      work_.sub_meshes.push_back({ranks, LineOf(CollectiveKind::kAllGather, part, sizes(gathered))});
      const Communicator outer{.name = "outer", .size = shard.size / ranks, .stride = shard.stride * ranks};
      work_.two_levels.push_back({ranks, LineOf(CollectiveKind::kReduceScatter, part, sizes(reduced)),
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
    std::int64_t shard_bytes = 0, trained_bytes = 0, state_bytes = 0;
    for (std::size_t p = 0; p < work_.parameters.size(); ++p) {
      const StepWork::Parts::Parameter& parameter = work_.parameters[p];
      const std::int64_t share = parameter.numel / work_.shards;
      shard_bytes += share * parameter.stored;
      const std::int64_t stepped = share - kAlignment;
      if (!all_train || stepped <= 0) continue;
      trained_bytes += stepped * parameter.stored;
      if (!StatesHaveParameterShapes(optimizer.kind)) continue;  // as large as rows and columns
      const OptimizerShard shard{.shape = {stepped}, .dtype = trace_.parameters[p].dtype};
      for (const Bytes state : OptimizerStates(optimizer, shard)) state_bytes += state.value;
    }
    const OptimizerCost cost = CostOf(optimizer, {trained_bytes}, 1);
    if (trained_bytes > 0) work_.optimizer_ns = costs_->DeviceCopy(cost.read_bytes, cost.written_bytes);
    work_.static_bytes.value = shard_bytes + state_bytes;
    work_.least_memory.value = work_.static_bytes.value + trained_bytes;
    const Host& host = job_.cluster.host;
    work_.host_ns = internal::IssueOfOperator(host) * operators() + OptimizerIssue(host) * cost.kernels +
                    work_.optimizer_ns;
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
      const std::int64_t waiting_bytes = parameter.WaitingBytes(work_.shards);
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
  std::int32_t microbatch_ = 0;  // -1: of several
  std::set<StorageId> own_;      // storages that the pass allocates
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
                                bool activation_offload) {
  return StepWorkBuilder(trace, job, recomputation, activation_offload).Run();
}

}  // namespace shardplan

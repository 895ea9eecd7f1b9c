// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/verifier/oracle_program.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

namespace shardplan::test {
namespace {

// A gradient as a sum: contribution -> coefficient, and the communicators that it was summed over.
struct Sum {
  std::map<int, double> terms;
  std::set<CommunicatorId> reduced;
  bool operator==(const Sum&) const = default;
};

enum class Filled : std::uint8_t { kNo, kSlot, kYes };

class Reader {
 public:
  explicit Reader(const Plan& plan) : plan_(plan) {
    for (const PlanStep& step : plan.steps) {
      for (const Trigger& trigger : step.triggers) {
        for (const Instruction& i : trigger.instructions) {
          if (!i.parts.empty()) freed_in_parts_.insert(i.src);
        }
      }
    }
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      if (!plan.buffers[b].persistent) continue;
      const int instance = NewInstance(static_cast<BufferId>(b), -1);
      alive_[static_cast<BufferId>(b)] = instance;
      filled_[instance] = Filled::kYes;
    }
  }

  Program Read() {
    const std::size_t steady = static_cast<std::size_t>(plan_.steady_step);
    for (std::size_t s = 0; s < steady; ++s) ReadStep(plan_.steps[s]);
    const State before = Now();
    for (std::size_t s = steady; s < plan_.steps.size(); ++s) ReadStep(plan_.steps[s]);
    if (Now() != before) Problem("not_steady");
    used_.clear();
    for (std::size_t s = steady; s < plan_.steps.size(); ++s) ReadStep(plan_.steps[s]);
    for (const auto& [buffer, instance] : alive_) {
      if (!plan_.buffers[buffer].persistent && !used_.contains(instance)) Problem("alive_for_nothing");
    }
    return std::move(program_);
  }

 private:
  // State that has to be the same before and after the steps that repeat.
  struct State {
    std::map<BufferId, std::pair<Filled, std::size_t>> buffers;  // and how many gradients are in it
    std::map<UnitId, BufferId> bound;
    bool operator==(const State&) const = default;
  };
  State Now() const {
    State state;
    for (const auto& [buffer, instance] : alive_) {
      const auto sum = sums_.find(instance);
      const std::size_t gradients = sum == sums_.end() ? 0 : sum->second.terms.size();
      state.buffers[buffer] = {filled_.at(instance), gradients};
    }
    for (const auto& [unit, instance] : bound_) state.bound[unit] = program_.instances[instance].buffer;
    return state;
  }

  bool IsFinal(BufferId buffer) const {
    const BufferRole role = plan_.buffers[buffer].role;
    return role == BufferRole::kGradSharded || role == BufferRole::kGradHost;
  }

  void Problem(const std::string& what) { program_.problems.insert(what); }

  int NewInstance(BufferId buffer, StreamId pool) {
    program_.instances.push_back({buffer, pool});
    const int instance = static_cast<int>(program_.instances.size()) - 1;
    filled_[instance] = Filled::kNo;
    return instance;
  }

  int Use(BufferId buffer) {  // -1 where it is not alive
    if (freed_parts_.contains(buffer)) Problem("used_without_all_parts");
    return Find(buffer);
  }
  // The reads of src by a copy between the two: where src goes part by part, those of the parameters that
  // both hold.
  std::vector<int> ReadBy(const Instruction& i, int src) {
    if (!parts_.contains(src)) return {src};
    const std::vector<std::int32_t>& held = plan_.buffers[i.src].parameters;
    const std::vector<std::int32_t>& wanted = plan_.buffers[i.dst].parameters;
    if (held.size() != parts_[src].size()) {  // not one for each parameter
      if (freed_parts_.contains(i.src)) Problem("used_without_all_parts");
      return parts_[src];
    }
    std::vector<int> read;
    for (std::size_t part = 0; part < held.size(); ++part) {
      if (std::ranges::find(wanted, held[part]) == wanted.end()) continue;
      if (freed_parts_[i.src].contains(static_cast<std::int32_t>(part))) Problem("used_without_all_parts");
      read.push_back(parts_[src][part]);
    }
    return read;
  }
  int Find(BufferId buffer) {
    const auto found = alive_.find(buffer);
    if (found != alive_.end()) return found->second;
    Problem("used_while_not_alive");
    return -1;
  }

  void ReadStep(const PlanStep& step) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) ReadInstruction(i);
    }
    if (!under_way_.empty()) Problem("exchange_without_end");
    under_way_.clear();
  }

  void ReadInstruction(const Instruction& i) {
    using enum InstructionKind;
    switch (i.kind) {
      case kCompute:
        return Compute(i);
      case kAllocate:
        if (plan_.buffers[i.dst].role == BufferRole::kActivation) {
          const std::vector<StorageId>& storages = plan_.buffers[i.dst].storages;
          storages_[i.dst] = {storages.begin(), storages.end()};
        }
        return Allocate(i.dst, i.stream);
      case kFree:
        storages_.erase(i.src);
        return i.parts.empty() ? Free(i.src, i.safe_after) : FreeParts(i);
      case kBindUnsharded:
        if (const int instance = Use(i.src); instance >= 0) {
          bound_[i.unit] = instance;
        } else {
          bound_.erase(i.unit);
        }
        return;
      case kBindSharded:
        Use(i.src);
        bound_.erase(i.unit);
        return;
      case kRecord:
        latest_[i.event] = records_;
        program_.items.push_back({.kind = Item::Kind::kRecord, .stream = i.stream, .record = records_++});
        return;
      case kWait:
      case kHostWait:
        if (!latest_.contains(i.event)) return Problem("wait_before_record");
        program_.items.push_back({.kind = i.kind == kWait ? Item::Kind::kWait : Item::Kind::kHostWait,
                                  .stream = i.stream,
                                  .record = latest_[i.event]});
        return;
      case kUpdateCopyIn:
      case kAllToAll:
      case kUpdateGather:
      case kOrthogonalize:
      case kUpdateApply:
        return Exchanged(i);
      case kOptimizerStep:
        return OptimizerStep(i);
      case kZeroGrad:
        for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
          const BufferId buffer = static_cast<BufferId>(b);
          if (IsFinal(buffer) && alive_.contains(buffer)) Free(buffer, {});
        }
        made_.clear();
        return;
      case kGradZero:
        return Zero(i.dst, i.stream);
      case kCopyIn:
      case kAllGather:
      case kCopyOut:
      case kReshardPostForward:
      case kGradCopyIn:
      case kGradScale:
      case kReduceScatter:
      case kAllReduce:
      case kGradCast:
      case kGradAccumulate:
      case kCopyToHost:
      case kCopyToDevice:
        return Move(i);
    }
  }

  void Allocate(BufferId buffer, StreamId stream) {
    if (alive_.contains(buffer)) return Problem("allocated_twice");
    const int instance = alive_[buffer] = NewInstance(buffer, stream);
    if (freed_in_parts_.contains(buffer)) {
      for (std::size_t part = 0; part < plan_.buffers[buffer].parts_bytes.size(); ++part) {
        parts_[instance].push_back(NewInstance(buffer, stream));
      }
    }
    for (const int each : WithParts(instance)) {
      program_.items.push_back({.kind = Item::Kind::kAllocate, .instance = each});
    }
  }

  void Free(BufferId buffer, const std::vector<StreamId>& safe_after) {
    const int instance = Find(buffer);
    if (instance < 0) return;
    const std::set<std::int32_t> gone = std::exchange(freed_parts_[buffer], {});
    freed_parts_.erase(buffer);
    for (const auto& [unit, bound] : bound_) {
      if (bound == instance) Problem("freed_while_bound");
    }
    alive_.erase(buffer);
    for (const auto& [other, shared] : alive_) {
      if (shared == instance) return;  // another name keeps it
    }
    const std::vector<int> all = WithParts(instance);
    for (std::size_t k = 0; k < all.size(); ++k) {
      if (k > 0 && gone.contains(static_cast<std::int32_t>(k) - 1)) continue;
      program_.items.push_back({.kind = Item::Kind::kFree, .instance = all[k], .safe_after = safe_after});
    }
  }

  // The memory as a whole, then its parts if it has some.
  std::vector<int> WithParts(int instance) const {
    std::vector<int> all = {instance};
    const auto parts = parts_.find(instance);
    if (parts != parts_.end()) all.insert(all.end(), parts->second.begin(), parts->second.end());
    return all;
  }

  void FreeParts(const Instruction& i) {
    const int instance = Find(i.src);
    if (instance < 0) return;
    std::set<std::int32_t>& freed = freed_parts_[i.src];
    for (const std::int32_t part : i.parts) {
      if (!freed.insert(part).second) {
        Problem("part_freed_twice");
        continue;
      }
      program_.items.push_back(
          {.kind = Item::Kind::kFree, .instance = parts_[instance][part], .safe_after = i.safe_after});
    }
    for (const auto& [unit, bound] : bound_) {
      if (bound == instance) Problem("freed_while_bound");
    }
  }

  std::vector<int> AllWithParts(const std::vector<int>& instances) const {
    std::vector<int> all;
    for (const int instance : instances) {
      const std::vector<int> each = WithParts(instance);
      all.insert(all.end(), each.begin(), each.end());
    }
    return all;
  }

  void AddWork(StreamId stream, std::vector<int> reads, std::vector<int> writes) {
    reads = AllWithParts(reads);
    writes = AllWithParts(writes);
    for (const int instance : reads) {
      if (filled_[instance] == Filled::kNo) Problem("read_unwritten");
    }
    used_.insert(reads.begin(), reads.end());
    used_.insert(writes.begin(), writes.end());
    for (const int instance : writes) filled_[instance] = Filled::kYes;
    program_.items.push_back({.kind = Item::Kind::kWork,
                              .stream = stream,
                              .reads = std::move(reads),
                              .writes = std::move(writes)});
  }

  void Compute(const Instruction& i) {
    // The model's own tensors: allocated, used and freed by the compute itself.
    const int own = NewInstance(-1, i.stream);
    program_.items.push_back({.kind = Item::Kind::kAllocate, .instance = own});
    std::vector<int> reads;
    std::vector<int> writes = {own};
    const Segment& segment = plan_.segments[i.segment];
    for (const UnitId unit : segment.reads) {
      if (!bound_.contains(unit)) {
        Problem("read_sharded_parameters");
        continue;
      }
      reads.push_back(bound_[unit]);
    }
    for (const SegmentGrad& grad : segment.grads) {
      const BufferId buffer = GradBuffer(grad);
      if (!alive_.contains(buffer)) Allocate(buffer, i.stream);
      if (freed_parts_.contains(buffer)) Problem("used_without_all_parts");
      const int instance = alive_[buffer];
      if (filled_[instance] == Filled::kYes) reads.push_back(instance);  // adds to it
      writes.push_back(instance);
      made_[contributions_] = grad;
      sums_[instance].terms[contributions_++] = 1.0;
    }
    const std::vector<BufferId> ended = UseActivations(segment, i.stream, reads, writes);
    AddWork(i.stream, std::move(reads), std::move(writes));
    program_.items.push_back({.kind = Item::Kind::kFree, .instance = own});
    for (const BufferId buffer : ended) Free(buffer, {});
  }

  // Activations that the plan moves: the model makes, reads and ends their storages. Returns those that it
  // ends here.
  std::vector<BufferId> UseActivations(const Segment& segment, StreamId stream, std::vector<int>& reads,
                                       std::vector<int>& writes) {
    std::vector<BufferId> ended;
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      if (plan_.buffers[b].role != BufferRole::kActivation) continue;
      const auto buffer = static_cast<BufferId>(b);
      const std::vector<StorageId>& storages = plan_.buffers[b].storages;
      const auto is_of = [&](StorageId s) { return std::ranges::find(storages, s) != storages.end(); };
      bool makes = false, uses = false;
      std::set<StorageId>& there = storages_[buffer];
      for (const SegmentEntry& entry : segment.entries) {
        if (const auto* born = std::get_if<AllocateEvent>(&entry); born != nullptr && is_of(born->storage)) {
          makes = true;
          there.insert(born->storage);
        } else if (const auto* dead = std::get_if<FreeEvent>(&entry);
                   dead != nullptr && is_of(dead->storage)) {
          uses = true;
          if (there.erase(dead->storage) == 0) Problem("storage_is_not_there");
        } else if (const auto* op = std::get_if<OperatorEvent>(&entry)) {
          uses = uses || std::ranges::any_of(op->reads, is_of) || std::ranges::any_of(op->writes, is_of);
        }
      }
      if (makes && !alive_.contains(buffer)) Allocate(buffer, stream);
      if (!makes && !uses) continue;
      const int instance = Use(buffer);
      if (instance < 0) continue;
      (makes ? writes : reads).push_back(instance);
      if (there.empty()) ended.push_back(buffer);
    }
    return ended;
  }

  BufferId GradBuffer(const SegmentGrad& grad) const {
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      const Buffer& buffer = plan_.buffers[b];
      if (buffer.role == BufferRole::kGradUnsharded && buffer.unit == grad.unit)
        return static_cast<BufferId>(b);
    }
    return -1;
  }

  // A term whose value is nothing.
  void Zero(BufferId buffer, StreamId stream) {
    const int dst = Use(buffer);
    if (dst < 0) return;
    AddWork(stream, {}, {dst});
    sums_[dst] = {};
  }

  void Move(const Instruction& i) {
    using enum InstructionKind;
    const bool copies = i.kind == kCopyIn || i.kind == kCopyOut || i.kind == kReshardPostForward;
    const int src = copies ? Find(i.src) : Use(i.src);
    if (src < 0) return;
    if (i.kind == kGradCast && !alive_.contains(i.dst) &&
        plan_.buffers[i.src].dtype == plan_.buffers[i.dst].dtype) {
      alive_[i.dst] = src;  // a view
      return;
    }
    const int dst = i.kind == kAllReduce || i.kind == kGradScale ? src : Use(i.dst);
    if (dst < 0) return;
    const Filled before = filled_[dst];
    const bool own_slot = i.kind == kAllGather && src == dst;
    if (filled_[src] == Filled::kSlot && !own_slot) Problem("read_own_slot_only");
    std::vector<int> reads = copies ? ReadBy(i, src) : std::vector{src};
    const bool adds = i.kind == kGradAccumulate && filled_[dst] == Filled::kYes;
    if (adds) reads.push_back(dst);
    AddWork(i.stream, std::move(reads), {dst});
    if (i.kind == kCopyIn && plan_.buffers[i.dst].role == BufferRole::kAllGatherOutput)
      filled_[dst] = Filled::kSlot;
    if (copies && !BringsAll(i, dst)) filled_[dst] = before;
    MoveSum(i, src, dst, adds);
  }

  // Has dst all its parameters, after this copy and those before it?
  bool BringsAll(const Instruction& i, int dst) {
    std::set<std::int32_t>& brought = brought_[dst];
    brought.insert(plan_.buffers[i.src].parameters.begin(), plan_.buffers[i.src].parameters.end());
    return std::ranges::includes(brought, plan_.buffers[i.dst].parameters);
  }

  void MoveSum(const Instruction& i, int src, int dst, bool adds) {
    using enum InstructionKind;
    Sum sum = sums_[src];
    double factor = 1.0;
    if (i.kind == kGradScale || i.kind == kReduceScatter || i.kind == kAllReduce) factor = 1.0 / i.divisor;
    if (i.kind == kReduceScatter || i.kind == kAllReduce) {
      if (!sum.reduced.insert(i.communicator).second && !sum.terms.empty()) Problem("reduced_twice");
      const auto size = static_cast<double>(plan_.communicators[i.communicator].size);
      if (i.reduce_op == ReduceOp::kAverage) factor /= size;
    }
    for (auto& [term, coefficient] : sum.terms) coefficient *= factor;
    if (adds) {
      if (sum.reduced != sums_[dst].reduced) Problem("adds_unlike_gradients");
      for (const auto& [term, coefficient] : sums_[dst].terms) sum.terms[term] += coefficient;
    }
    sums_[dst] = std::move(sum);
  }

  // A buffer of an exchange says of each matrix: rows of an update, all of it, all of the result, rows of it.
  enum class Word : std::uint8_t { kUpdate, kWholeUpdate, kWholeResult, kResult };
  using Words = std::map<std::int32_t, Word>;

  void Exchanged(const Instruction& i) {
    const std::vector<ExchangedMatrix>& matrices = plan_.exchanges[i.exchange].matrices;
    const auto count = static_cast<std::int32_t>(matrices.size());
    std::vector<int> reads, writes;
    const int src = i.src < 0 ? -1 : Use(i.src), dst = i.dst < 0 ? -1 : Use(i.dst);
    if ((i.src >= 0 && src < 0) || (i.dst >= 0 && dst < 0)) return;
    if (src >= 0) reads.push_back(src);
    if (dst >= 0) writes.push_back(dst);
    const auto move = [&](int from, int to, Word expected, Word made) {
      const Words before = words_[from];
      for (std::int32_t m = 0; m < count; ++m) {
        const auto word = before.find(m);
        if (word == before.end() || word->second != expected) return Problem("wrong_word");
        words_[to][m] = made;
      }
    };
    const auto touch = [&](BufferRole role) {
      for (const ExchangedMatrix& matrix : matrices) {
        for (const auto& [buffer, instance] : alive_) {
          const Buffer& b = plan_.buffers[buffer];
          if (b.unit != matrix.unit || b.role != role) continue;
          if (filled_[instance] == Filled::kYes) reads.push_back(instance);
          writes.push_back(instance);
        }
      }
    };
    if (i.kind == InstructionKind::kUpdateCopyIn) {
      for (const ExchangedMatrix& matrix : matrices) TakeGradient(matrix, reads);
      touch(BufferRole::kOptimizerState);
      words_[dst].clear();
      for (std::int32_t m = 0; m < count; ++m) words_[dst][m] = Word::kUpdate;
      if (!under_way_.insert(i.exchange).second) Problem("exchanged_twice");
    } else if (i.kind == InstructionKind::kAllToAll) {
      plan_.buffers[i.src].role == BufferRole::kUpdatePieces
          ? move(src, dst, Word::kUpdate, Word::kWholeUpdate)
          : move(src, dst, Word::kWholeResult, Word::kResult);
      if (matrices.front().owner < 0) Problem("no_owner");
    } else if (i.kind == InstructionKind::kUpdateGather) {
      move(src, dst, Word::kUpdate, Word::kWholeUpdate);
      if (matrices.front().owner >= 0) Problem("has_owner");
    } else if (i.kind == InstructionKind::kOrthogonalize) {
      const auto word = words_[dst].find(i.matrix);
      const bool is_there = word != words_[dst].end() && word->second == Word::kWholeUpdate;
      is_there ? static_cast<void>(word->second = Word::kWholeResult) : Problem("wrong_word");
      reads.push_back(dst);
    } else {
      const Word result = matrices.front().owner < 0 ? Word::kWholeResult : Word::kResult;
      for (std::int32_t m = 0; m < count; ++m) {
        if (!words_[src].contains(m) || words_[src][m] != result) Problem("wrong_word");
      }
      words_[src].clear();
      if (under_way_.erase(i.exchange) == 0) Problem("applied_twice");
      touch(BufferRole::kParamSharded);
    }
    AddWork(i.stream, std::move(reads), std::move(writes));
  }

  // There is one, of this step, reduced over all ranks.
  void TakeGradient(const ExchangedMatrix& matrix, std::vector<int>& reads) {
    bool found = false;
    for (const auto& [buffer, instance] : alive_) {
      if (!IsFinal(buffer) || plan_.buffers[buffer].unit != matrix.unit) continue;
      reads.push_back(instance);
      const Unit& unit = plan_.units[matrix.unit];
      std::set<CommunicatorId> needed = {unit.shard_communicator};
      if (unit.replicate_communicator >= 0) needed.insert(unit.replicate_communicator);
      if (!sums_[instance].terms.empty() && sums_[instance].reduced != needed) Problem("not_reduced");
      for (const auto& [term, coefficient] : sums_[instance].terms) {
        const auto made = made_.find(term);
        if (made == made_.end()) Problem("stale_gradient");
        found = found || (made != made_.end() && made->second.parameter == matrix.parameter);
        if (std::abs(coefficient * static_cast<double>(plan_.world_size) - 1) > 1e-6)
          Problem("wrong_division");
      }
    }
    if (!found) Problem("lost_gradient");
  }

  // Each gradient made since the last zero_grad has to be there once, summed over all ranks and divided
  // right.
  void OptimizerStep(const Instruction& i) {
    std::vector<int> reads, writes;
    Sum all;
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      bool has_grad = false;
      for (const auto& [buffer, instance] : alive_) {
        const Buffer& b = plan_.buffers[buffer];
        if (!IsFinal(buffer) || b.unit != static_cast<UnitId>(u)) continue;
        has_grad = true;
        reads.push_back(instance);
        const Unit& unit = plan_.units[u];
        std::set<CommunicatorId> needed = {unit.shard_communicator};
        if (unit.replicate_communicator >= 0) needed.insert(unit.replicate_communicator);
        if (!sums_[instance].terms.empty() && sums_[instance].reduced != needed) Problem("not_reduced");
        for (const auto& [term, coefficient] : sums_[instance].terms) all.terms[term] += coefficient;
      }
      if (!has_grad) continue;
      for (const auto& [buffer, instance] : alive_) {
        const Buffer& b = plan_.buffers[buffer];
        if (b.unit != static_cast<UnitId>(u)) continue;
        if (b.role != BufferRole::kParamSharded && b.role != BufferRole::kOptimizerState) continue;
        if (filled_[instance] == Filled::kYes) reads.push_back(instance);
        writes.push_back(instance);
      }
    }
    for (const auto& [contribution, grad] : made_) {
      if (!all.terms.contains(contribution)) Problem("lost_gradient");
    }
    for (const auto& [contribution, coefficient] : all.terms) {
      if (!made_.contains(contribution)) Problem("stale_gradient");
      if (std::abs(coefficient * static_cast<double>(plan_.world_size) - 1) > 1e-6) Problem("wrong_division");
    }
    AddWork(i.stream, std::move(reads), std::move(writes));
  }

  const Plan& plan_;
  Program program_;
  std::map<BufferId, int> alive_;                     // buffer -> instance
  std::map<BufferId, std::set<StorageId>> storages_;  // of activations: those that are there
  std::map<BufferId, std::set<std::int32_t>> freed_parts_;
  std::map<int, std::set<std::int32_t>> brought_;  // instance -> parameters that were copied to it
  std::set<BufferId> freed_in_parts_;              // buffers of which some free names parts
  std::map<int, std::vector<int>> parts_;          // instance of such a buffer -> instances of its parts
  std::map<int, Filled> filled_;
  std::map<int, Sum> sums_;
  std::map<UnitId, int> bound_;
  std::map<EventId, int> latest_;
  std::map<int, SegmentGrad> made_;  // contributions since the last zero_grad
  std::map<int, Words> words_;       // by instance of an exchange's buffer
  std::set<ExchangeId> under_way_;
  std::set<int> used_;  // instances, since the steps that repeat began again
  int contributions_ = 0;
  int records_ = 0;
};

}  // namespace

Program ReadInHostOrder(const Plan& plan) { return Reader(plan).Read(); }

}  // namespace shardplan::test

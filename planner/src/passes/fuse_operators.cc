// SPDX-License-Identifier: Apache-2.0
// [Note: what is fused]
// A compiled model runs neighbouring elementwise operators, and the reductions of rows in a norm or softmax,
// as one kernel: what only they pass to each other is never in memory, and everything else is read and
// written once. A run is a sequence of such operators with nothing between them but allocations, frees and
// the borders of modules without parameters: a module with parameters may be a unit, whose hooks nothing
// moves across. The kernel stands where the run's last operator stood; what was freed inside is freed behind
// it.
#include "passes/fuse_operators.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace shardplan {
namespace {

constexpr std::array<std::string_view, 46> kElementwise = {"_softmax",
                                                           "_softmax_backward_data",
                                                           "_to_copy",
                                                           "abs",
                                                           "add",
                                                           "add_",
                                                           "addcdiv",
                                                           "addcmul",
                                                           "bitwise_and",
                                                           "cat",
                                                           "clamp",
                                                           "copy",
                                                           "copy_",
                                                           "cos",
                                                           "div",
                                                           "div_",
                                                           "eq",
                                                           "exp",
                                                           "fill",
                                                           "ge",
                                                           "gelu",
                                                           "gelu_backward",
                                                           "gt",
                                                           "le",
                                                           "log",
                                                           "lt",
                                                           "masked_fill",
                                                           "mean",
                                                           "mul",
                                                           "mul_",
                                                           "neg",
                                                           "pow",
                                                           "reciprocal",
                                                           "relu",
                                                           "rsqrt",
                                                           "sigmoid",
                                                           "sigmoid_backward",
                                                           "silu",
                                                           "silu_backward",
                                                           "sin",
                                                           "sqrt",
                                                           "sub",
                                                           "sum",
                                                           "tanh",
                                                           "threshold_backward",
                                                           "where"};

bool IsElementwise(const OperatorEvent& op) {
  std::string_view name = op.name;
  if (op.duration_ns.value >= 0 || !name.starts_with("aten.")) return false;
  name.remove_prefix(5);
  name = name.substr(0, name.find('.'));
  return std::ranges::binary_search(kElementwise, name);
}

class Fuser {
 public:
  explicit Fuser(const Trace& trace) : has_parameters_(trace.modules.size(), false) {
    std::map<std::string_view, std::size_t> by_fqn;
    for (std::size_t m = 0; m < trace.modules.size(); ++m) by_fqn[trace.modules[m].fqn] = m;
    for (std::size_t m = 0; m < trace.modules.size(); ++m) {
      // One that is registered twice is taken for one with parameters: which they are, the other name says.
      if (trace.modules[m].parameters.empty() && trace.modules[m].same_module_as.empty()) continue;
      for (std::string_view fqn = trace.modules[m].fqn;;) {
        if (const auto above = by_fqn.find(fqn); above != by_fqn.end()) has_parameters_[above->second] = true;
        if (fqn.empty()) break;
        const std::size_t dot = fqn.rfind('.');
        fqn = dot == std::string_view::npos ? std::string_view() : fqn.substr(0, dot);
      }
    }
    for (const std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
      for (const Pass& pass : *passes) {
        for (const TraceEvent& event : pass.events) {
          if (const auto* born = std::get_if<AllocateEvent>(&event)) bytes_[born->storage] = born->size_bytes;
        }
      }
    }
  }

  std::vector<TraceEvent> Rewrite(const std::vector<TraceEvent>& events) {
    std::vector<TraceEvent> made;
    for (std::size_t i = 0; i < events.size();) {
      const auto [end, count] = RunFrom(events, i);
      if (count < 2) {
        made.push_back(events[i++]);
        continue;
      }
      // Storages that were allocated for the first operator belong to the run.
      while (i > 0 && std::holds_alternative<AllocateEvent>(events[i - 1])) {
        made.pop_back();
        --i;
      }
      Fuse(events, i, end, made);
      changed_ = true;
      i = end;
    }
    return made;
  }

  bool changed() const { return changed_; }

 private:
  bool MayCross(const TraceEvent& event) const {
    if (std::holds_alternative<AllocateEvent>(event)) {
      return std::get<AllocateEvent>(event).role != StorageRole::kParameterGrad;
    }
    if (std::holds_alternative<FreeEvent>(event)) return true;
    ModuleId module = -1;
    if (const auto* enter = std::get_if<EnterEvent>(&event)) module = enter->module;
    if (const auto* exit = std::get_if<ExitEvent>(&event)) module = exit->module;
    if (const auto* ready = std::get_if<OutputGradReadyEvent>(&event)) module = ready->module;
    if (const auto* done = std::get_if<InputsGradDoneEvent>(&event)) module = done->module;
    return module >= 0 && !has_parameters_[static_cast<std::size_t>(module)];
  }

  // The run that begins with the operator at `begin`: the event behind its last operator, and how many it
  // has.
  std::pair<std::size_t, int> RunFrom(const std::vector<TraceEvent>& events, std::size_t begin) const {
    const auto* first = std::get_if<OperatorEvent>(&events[begin]);
    if (first == nullptr || !IsElementwise(*first)) return {begin + 1, 0};
    std::size_t end = begin + 1;
    int count = 1;
    for (std::size_t i = end; i < events.size(); ++i) {
      if (const auto* op = std::get_if<OperatorEvent>(&events[i])) {
        if (!IsElementwise(*op)) break;
        end = i + 1;
        ++count;
      } else if (!MayCross(events[i])) {
        break;
      }
    }
    return {end, count};
  }

  Bytes BytesOf(StorageId storage) const {
    const auto found = bytes_.find(storage);
    return found == bytes_.end() ? Bytes{} : found->second;
  }

  // Bytes of an operator that are of one storage: all of it, but never more than the operator moves.
  static void Take(Bytes& from, Bytes bytes) { from.value -= std::min(from.value, bytes.value); }

  void Fuse(const std::vector<TraceEvent>& events, std::size_t begin, std::size_t end,
            std::vector<TraceEvent>& made) const {
    std::set<StorageId> born, dead;
    for (std::size_t i = begin; i < end; ++i) {
      if (const auto* allocate = std::get_if<AllocateEvent>(&events[i])) born.insert(allocate->storage);
      const auto* free = std::get_if<FreeEvent>(&events[i]);
      if (free != nullptr && born.contains(free->storage)) dead.insert(free->storage);
    }
    OperatorEvent fused{.name = "compiled.elementwise"};
    std::set<StorageId> written, read;
    std::vector<TraceEvent> frees;
    for (std::size_t i = begin; i < end; ++i) {
      if (const auto* op = std::get_if<OperatorEvent>(&events[i])) {
        Join(*op, dead, written, read, fused);
      } else if (const auto* free = std::get_if<FreeEvent>(&events[i])) {
        if (!dead.contains(free->storage)) frees.push_back(*free);
      } else if (const auto* allocate = std::get_if<AllocateEvent>(&events[i]);
                 allocate == nullptr || !dead.contains(allocate->storage)) {
        made.push_back(events[i]);
      }
    }
    made.push_back(std::move(fused));
    std::ranges::move(frees, std::back_inserter(made));
  }

  // An operator's reads of the run's own storages, or repeated ones, do not count; nor do its writes for the
  // run alone.
  void Join(const OperatorEvent& op, const std::set<StorageId>& dead, std::set<StorageId>& written,
            std::set<StorageId>& read, OperatorEvent& fused) const {
    Bytes reads = op.bytes_read, writes = op.bytes_written;
    for (const StorageId storage : std::set<StorageId>(op.reads.begin(), op.reads.end())) {
      const bool inside = written.contains(storage);
      if (inside || !read.insert(storage).second) {
        Take(reads, BytesOf(storage));
      } else if (!dead.contains(storage)) {
        fused.reads.push_back(storage);
      }
    }
    for (const StorageId storage : std::set<StorageId>(op.writes.begin(), op.writes.end())) {
      const bool again = !written.insert(storage).second;
      if (dead.contains(storage) || again) {
        Take(writes, BytesOf(storage));
      } else {
        fused.writes.push_back(storage);
      }
    }
    for (const ParameterId parameter : op.parameters) {
      if (std::ranges::find(fused.parameters, parameter) == fused.parameters.end())
        fused.parameters.push_back(parameter);
    }
    fused.module = op.module;
    fused.dtype = op.dtype;
    fused.flops += op.flops;
    fused.bytes_read += reads;
    fused.bytes_written += writes;
  }

  std::vector<bool> has_parameters_;  // by module: it, or one below it
  std::map<StorageId, Bytes> bytes_;
  bool changed_ = false;
};

}  // namespace

std::optional<Trace> FuseOperators(const Trace& trace) {
  Fuser fuser(trace);
  Trace made = trace;
  for (std::vector<Pass>* passes : {&made.forwards, &made.backwards}) {
    for (Pass& pass : *passes) pass.events = fuser.Rewrite(pass.events);
  }
  if (!fuser.changed()) return std::nullopt;
  return made;
}

}  // namespace shardplan

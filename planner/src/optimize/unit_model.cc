// SPDX-License-Identifier: Apache-2.0
#include "optimize/unit_model.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "shardplan/simulator/cost_model.h"

namespace shardplan::optimize {
namespace {

constexpr std::int64_t kFullRatePpm = 1'000'000;
// Cuts into more units are not improved one border at a time.
constexpr std::int32_t kMostImproved = 24;
constexpr int kSweeps = 12;

// Which module of the chain an operator or a parameter belongs to: the outermost on the way to it.
std::vector<std::int32_t> ChainOf(const Trace& trace, const ModelChain& chain) {
  std::map<std::string, std::int32_t> by_fqn;
  for (std::size_t i = 0; i < chain.modules.size(); ++i)
    by_fqn[chain.modules[i].fqn] = static_cast<std::int32_t>(i);
  std::vector<std::int32_t> of(trace.modules.size(), -1);
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    const std::string& fqn = trace.modules[m].fqn;
    for (std::size_t end = fqn.find('.');; end = fqn.find('.', end + 1)) {
      const auto found = by_fqn.find(fqn.substr(0, end));
      if (found != by_fqn.end()) of[m] = found->second;
      if (found != by_fqn.end() || end == std::string::npos) break;
    }
  }
  return of;
}

void SumUp(std::vector<std::int64_t>& of_each) {
  std::int64_t sum = 0;
  for (std::int64_t& value : of_each) sum = std::exchange(value, sum) + sum;
}

}  // namespace

void UnitModel::AddModules(const Trace& trace, const Job& job, const Plan& like) {
  const std::unique_ptr<CostModel> costs = MakeCostModel(like.cluster);
  const std::vector<std::int32_t> chain_of = ChainOf(trace, job.chain);
  const auto count = static_cast<std::size_t>(modules_) + 1;
  for (auto* of : {&forward_ns_, &backward_ns_, &gathered_bytes_, &reduced_bytes_}) of->assign(count, 0);
  // An operator of no module of the chain runs with the module before it.
  const auto add = [&](const std::vector<Pass>& passes, std::vector<std::int64_t>& to, std::int32_t at) {
    if (passes.empty()) return;
    for (const TraceEvent& event : passes.front().events) {
      const auto* op = std::get_if<OperatorEvent>(&event);
      if (op == nullptr || op->collective) continue;
      if (op->module >= 0 && chain_of[op->module] >= 0) at = chain_of[op->module];
      to[at] += costs->Operator(*op).value;
    }
  };
  add(trace.forwards, forward_ns_, 0);
  add(trace.backwards, backward_ns_, modules_ - 1);
  const auto unit = std::ranges::find_if(like.units, [](const Unit& u) { return !u.parameters.empty(); });
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    if (chain_of[m] < 0 || !trace.modules[m].same_module_as.empty()) continue;
    for (const NamedParameter& named : trace.modules[m].parameters) {
      std::int64_t numel = 1;
      for (const std::int64_t size : trace.parameters[named.parameter].shape) numel *= size;
      gathered_bytes_[chain_of[m]] += numel * SizeBytes(unit->param_dtype);
      reduced_bytes_[chain_of[m]] += numel * SizeBytes(unit->reduce_dtype);
    }
  }
  for (auto* of : {&forward_ns_, &backward_ns_, &gathered_bytes_, &reduced_bytes_}) SumUp(*of);
  copied_per_mib_ns_ = costs->DeviceCopy({std::int64_t{1} << 30}, {std::int64_t{1} << 30}).value / 1024;
}

Result<UnitModel::Table> UnitModel::CostsOf(CollectiveKind kind, const Communicator& group,
                                            std::int64_t world_size,
                                            const std::vector<std::int64_t>& bytes_before,
                                            const CostModel& costs) const {
  const std::vector<GroupPlacement> placements = PlaceGroups(cluster_, group, world_size);
  Table table;
  table.cost_ns.assign(static_cast<std::size_t>((modules_ + 1) * (modules_ + 1)), 0);
  if (group.size <= 1) return table;
  for (std::int32_t begin = 0; begin < modules_; ++begin) {
    for (std::int32_t end = begin + 1; end <= modules_; ++end) {
      const Bytes bytes{bytes_before[end] - bytes_before[begin]};
      if (bytes.value <= 0) continue;
      const Result<CollectiveCost> cost = costs.Collective(
          {.kind = kind, .ranks = group.size, .placements = placements, .full_tensor_bytes = bytes});
      if (!cost) return std::unexpected(cost.error());
      table.cost_ns[static_cast<std::size_t>(begin * (modules_ + 1) + end)] = cost->duration_ns.value;
    }
  }
  return table;
}

Status UnitModel::AddCosts(const Plan& like) {
  const auto unit = std::ranges::find_if(like.units, [](const Unit& u) { return !u.parameters.empty(); });
  const std::unique_ptr<CostModel> costs = MakeCostModel(like.cluster);
  const Communicator& shards = like.communicators[unit->shard_communicator];
  const auto set = [&](Table& table, CollectiveKind kind, const Communicator& group,
                       const std::vector<std::int64_t>& bytes) -> Status {
    Result<Table> made = CostsOf(kind, group, like.world_size, bytes, *costs);
    if (!made) return std::unexpected(made.error());
    table = *std::move(made);
    return {};
  };
  if (Status s = set(gather_, CollectiveKind::kAllGather, shards, gathered_bytes_); !s) return s;
  if (Status s = set(reduce_, CollectiveKind::kReduceScatter, shards, reduced_bytes_); !s) return s;
  if (unit->replicate_communicator >= 0) {
    std::vector<std::int64_t> share = reduced_bytes_;
    for (std::int64_t& bytes : share) bytes /= std::max<std::int64_t>(shards.size, 1);
    Table replicas;
    const Communicator& group = like.communicators[unit->replicate_communicator];
    if (Status s = set(replicas, CollectiveKind::kAllReduce, group, share); !s) return s;
    for (std::size_t i = 0; i < replicas.cost_ns.size(); ++i) reduce_.cost_ns[i] += replicas.cost_ns[i];
  }
  if (!shards.dims.empty()) return {};
  for (std::int64_t ranks = 2; ranks < shards.size; ranks *= 2) {
    if (shards.size % ranks != 0) continue;
    const Communicator part{.name = "part", .size = ranks, .stride = shards.stride, .dims = {}};
    parts_.emplace_back(ranks, Table{});
    if (Status s = set(parts_.back().second, CollectiveKind::kAllGather, part, gathered_bytes_); !s) return s;
  }
  return {};
}

std::optional<UnitModel> UnitModel::Make(const Trace& trace, const Job& job, const Plan& like) {
  const auto unit = std::ranges::find_if(like.units, [](const Unit& u) { return !u.parameters.empty(); });
  if (unit == like.units.end() || unit->shard_communicator < 0 || job.chain.modules.size() < 2)
    return std::nullopt;
  if (RanksSpanned(like.communicators[unit->shard_communicator]) > kMaxRanks) return std::nullopt;
  UnitModel model;
  model.modules_ = static_cast<std::int32_t>(job.chain.modules.size());
  model.cluster_ = like.cluster;
  model.compute_rate_ppm_ = like.cluster.compute_rate_while_communicating_ppm;
  model.link_rate_ppm_ = like.cluster.communication_rate_while_computing_ppm;
  model.AddModules(trace, job, like);
  if (!model.AddCosts(like)) return std::nullopt;
  return model;
}

// Two queues, each in order. If both have work, each goes at its rate beside the other.
std::int64_t UnitModel::Run(const std::vector<Piece>& compute, const std::vector<Piece>& link) const {
  std::size_t done[2] = {0, 0};
  const std::vector<Piece>* queues[2] = {&compute, &link};
  std::int64_t left[2];  // nanoseconds x kFullRatePpm
  for (int q : {0, 1}) left[q] = queues[q]->empty() ? 0 : queues[q]->front().duration_ns * kFullRatePpm;
  std::int64_t now_ns = 0;
  while (done[0] < compute.size() || done[1] < link.size()) {
    bool runs[2];
    for (int q : {0, 1}) {
      runs[q] = done[q] < queues[q]->size() && std::cmp_less((*queues[q])[done[q]].behind, done[1 - q]);
    }
    if (!runs[0] && !runs[1]) return std::numeric_limits<std::int64_t>::max();  // it never ends
    const std::int64_t beside[2] = {compute_rate_ppm_, link_rate_ppm_};
    std::int64_t rate[2], until = std::numeric_limits<std::int64_t>::max();
    for (int q : {0, 1}) {
      rate[q] = runs[1 - q] ? beside[q] : kFullRatePpm;
      if (runs[q] && rate[q] > 0) until = std::min(until, (left[q] + rate[q] - 1) / rate[q]);
    }
    now_ns += until;
    for (int q : {0, 1}) {
      if (!runs[q]) continue;
      left[q] -= until * rate[q];
      if (left[q] > 0) continue;
      if (++done[q] < queues[q]->size()) left[q] = (*queues[q])[done[q]].duration_ns * kFullRatePpm;
    }
  }
  return now_ns;
}

std::int32_t UnitModel::BeginOfLast(const Choice& from, std::int32_t count) const {
  std::int32_t at = modules_, left = count;
  for (auto unit = from.units.rbegin(); unit != from.units.rend() && left > 0; ++unit) {
    at -= std::abs(*unit);
    if (*unit > 0) --left;
  }
  return left > 0 ? 0 : std::max(at, 0);
}

std::int64_t UnitModel::StepOf(const std::vector<std::int32_t>& units, const Choice& from) const {
  std::vector<std::int32_t> ends = {0};
  for (const std::int32_t size : units) ends.push_back(std::min(ends.back() + std::abs(size), modules_));
  const auto count = static_cast<std::int32_t>(units.size());
  const std::int32_t ahead = std::max(from.prefetch, 1), kept_from = BeginOfLast(from, from.kept);
  const auto copied = [&](std::int32_t u, const std::vector<std::int64_t>& bytes) {
    return ((bytes[ends[u + 1]] - bytes[ends[u]]) >> 20) * copied_per_mib_ns_;
  };
  const Table* part = &gather_;
  for (const auto& [ranks, table] : parts_) {
    if (from.part == ranks) part = &table;
  }
  const bool all_in_smaller_mesh = from.post_forward_units == kAllUnits || from.kept >= modules_;
  const std::int32_t part_from =
      all_in_smaller_mesh ? 0 : BeginOfLast(from, from.kept + from.post_forward_units);
  std::vector<Piece> compute, link;
  for (std::int32_t u = 0; u < count; ++u) {
    link.push_back({At(gather_, ends[u], ends[u + 1]), u - ahead - 1});
    compute.push_back({forward_ns_[ends[u + 1]] - forward_ns_[ends[u]] + copied(u, gathered_bytes_), u});
  }
  const auto kept = [&](std::int32_t u) { return ends[u] >= kept_from; };
  const bool recomputes = from.recomputed > 0 && from.children.empty() && from.saved.empty();
  std::vector<std::int32_t> gathered(count, -1);  // by unit: the work on the link
  std::int32_t next = count - 1;
  for (std::int32_t u = count - 1; u >= 0; --u) {
    for (; next >= std::max(u - ahead, 0); --next) {
      if (kept(next)) continue;
      gathered[next] = static_cast<std::int32_t>(link.size());
      // Issued when the unit so many before it has begun, which is when the one before that is done.
      const Table& again = ends[next] >= part_from ? *part : gather_;
      link.push_back({At(again, ends[next], ends[next + 1]), count + (count - 1 - u) - 1});
    }
    std::int64_t work = backward_ns_[ends[u + 1]] - backward_ns_[ends[u]] + copied(u, reduced_bytes_);
    if (recomputes) work += forward_ns_[ends[u + 1]] - forward_ns_[ends[u]];
    if (!kept(u)) work += copied(u, gathered_bytes_);
    compute.push_back({work, gathered[u]});
    link.push_back({At(reduce_, ends[u], ends[u + 1]), count + (count - 1 - u)});
  }
  return Run(compute, link);
}

// Borders moved by one and two, and modules handed from any unit to any other, as long as that helps.
std::vector<std::int32_t> UnitModel::Improved(std::vector<std::int32_t> units, const Choice& from,
                                              std::int64_t& step_ns) const {
  step_ns = StepOf(units, from);
  const std::size_t count = units.size();
  if (std::cmp_greater(count, kMostImproved)) return units;
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    bool better = false;
    for (std::size_t a = 0; a < count; ++a) {
      for (std::size_t b = 0; b < count; ++b) {
        for (const std::int32_t by : {1, 2}) {
          if (a == b || units[a] <= by) continue;
          units[a] -= by;
          units[b] += by;
          const std::int64_t step = StepOf(units, from);
          if (step < step_ns) {
            step_ns = step;
            better = true;
            continue;
          }
          units[a] += by;
          units[b] -= by;
        }
      }
    }
    if (!better) break;
  }
  return units;
}

std::vector<Choice> UnitModel::BestCuts(const Choice& from, std::size_t most) const {
  std::vector<std::pair<std::int64_t, Choice>> cuts;
  for (std::int32_t count = 1; count <= modules_; ++count) {
    std::vector<std::int32_t> equal;
    for (std::int32_t u = 0; u < count; ++u)
      equal.push_back(modules_ * (u + 1) / count - modules_ * u / count);
    std::int64_t step_ns = 0;
    Choice choice = from;
    choice.units = Improved(std::move(equal), from, step_ns);
    const std::int32_t kept_from = BeginOfLast(from, from.kept);
    std::int32_t begin = 0;
    choice.kept = 0;
    for (const std::int32_t size : choice.units) {
      if (begin >= kept_from) ++choice.kept;
      begin += size;
    }
    cuts.emplace_back(step_ns, std::move(choice));
  }
  std::ranges::stable_sort(cuts, {}, [](const auto& cut) { return cut.first; });
  if (cuts.size() > most) cuts.resize(most);
  std::vector<Choice> best;
  for (auto& [step_ns, choice] : cuts) best.push_back(std::move(choice));
  return best;
}

}  // namespace shardplan::optimize

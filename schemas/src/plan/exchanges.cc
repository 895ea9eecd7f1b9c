// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/exchanges.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/layout.h"

namespace shardplan {
namespace {

const UnitParameter& ParameterOf(const Plan& plan, const ExchangedMatrix& matrix) {
  return plan.units[static_cast<std::size_t>(matrix.unit)]
      .parameters[static_cast<std::size_t>(matrix.parameter)];
}

std::int64_t AllRows(const UnitParameter& parameter) {
  const std::int64_t columns = ColumnsOf(parameter);
  return columns == 0 ? 0 : Numel(parameter) / columns;
}

class ExchangesCheck {
 public:
  explicit ExchangesCheck(const Plan& plan) : plan_(plan) {}

  Status Run() {
    for (std::size_t e = 0; e < plan_.exchanges.size(); ++e) {
      if (Status status = CheckExchange(e); !status) return status;
    }
    return {};
  }

 private:
  Status CheckExchange(std::size_t e) {
    const Exchange& exchange = plan_.exchanges[e];
    const std::string pointer = fmt::format("/exchanges/{}", e);
    if (exchange.communicator < 0 || exchange.communicator >= std::ssize(plan_.communicators))
      return MakeInputError(pointer + "/communicator", "an exchange has a communicator",
                            fmt::format("{}", exchange.communicator), "one of the plan's");
    if (exchange.matrices.empty())
      return MakeInputError(pointer + "/matrices", "an exchange has a matrix", "an empty list",
                            "its matrices");
    std::map<std::pair<UnitId, std::int32_t>, std::vector<std::pair<std::int64_t, std::int64_t>>> rows;
    for (std::size_t m = 0; m < exchange.matrices.size(); ++m) {
      const ExchangedMatrix& matrix = exchange.matrices[m];
      const std::string here = fmt::format("{}/matrices/{}", pointer, m);
      if (Status status = CheckMatrix(exchange, matrix, here); !status) return status;
      if (!of_.try_emplace({matrix.unit, matrix.parameter}, e).second &&
          of_.at({matrix.unit, matrix.parameter}) != e)
        return MakeInputError(here, "a parameter is in two exchanges", ParameterOf(plan_, matrix).fqn);
      const std::int64_t count = RowsOf(ParameterOf(plan_, matrix), matrix);
      rows[{matrix.unit, matrix.parameter}].emplace_back(matrix.first_row, matrix.first_row + count);
    }
    for (auto& [of, ranges] : rows) {
      const UnitParameter& parameter = ParameterOf(plan_, {.unit = of.first, .parameter = of.second});
      std::ranges::sort(ranges);
      std::int64_t end = 0;
      for (const auto& [first, last] : ranges) {
        if (first != end) return NotCovered(pointer, parameter, first, end);
        end = last;
      }
      if (end != AllRows(parameter)) return NotCovered(pointer, parameter, AllRows(parameter), end);
    }
    return {};
  }

  static Status NotCovered(const std::string& pointer, const UnitParameter& parameter, std::int64_t found,
                           std::int64_t expected) {
    return MakeInputError(pointer + "/matrices",
                          fmt::format("each row of {} is in one matrix", parameter.fqn),
                          fmt::format("row {} next", found), fmt::format("row {}", expected));
  }

  Status CheckMatrix(const Exchange& exchange, const ExchangedMatrix& matrix, const std::string& here) const {
    if (matrix.unit < 0 || matrix.unit >= std::ssize(plan_.units))
      return MakeInputError(here + "/unit", "there is no such unit", fmt::format("{}", matrix.unit));
    const Unit& unit = plan_.units[static_cast<std::size_t>(matrix.unit)];
    if (matrix.parameter < 0 || matrix.parameter >= std::ssize(unit.parameters))
      return MakeInputError(here + "/parameter", "not a parameter of the unit",
                            fmt::format("{}", matrix.parameter),
                            fmt::format("less than {}", unit.parameters.size()));
    const UnitParameter& parameter = unit.parameters[static_cast<std::size_t>(matrix.parameter)];
    const auto wrong = [&](std::string_view field, std::string_view what, std::string found,
                           std::string expected) {
      return MakeInputError(fmt::format("{}{}", here, field), fmt::format("{} {}", parameter.fqn, what),
                            std::move(found), std::move(expected));
    };
    if (!parameter.muon || !parameter.requires_grad)
      return wrong("/parameter", "is no matrix of Muon's", parameter.muon ? "frozen" : "muon: false",
                   "muon: true");
    if (unit.layout != LayoutKind::kPerParameter || parameter.shape.size() < 2)
      return wrong("/parameter", "is no matrix", fmt::format("{} dimensions", parameter.shape.size()),
                   "2 or 3, of a unit that is cut by parameter");
    const bool is_cut = unit.shard_communicator >= 0;
    if (is_cut && parameter.shard_dim != 0)
      return wrong("/parameter", "is not cut by rows", fmt::format("shard_dim {}", parameter.shard_dim), "0");
    if (parameter.shape.size() > 2 && matrix.rows == 0)
      return wrong("/rows", "has several matrices", "all rows", "the rows of one");
    const std::int64_t rows = RowsOf(parameter, matrix);
    if (rows < 1 || matrix.first_row > AllRows(parameter) - rows)
      return wrong("/rows", "does not have these rows", fmt::format("{} from {} on", rows, matrix.first_row),
                   fmt::format("{} in all", AllRows(parameter)));
    const std::int64_t ranks = plan_.communicators[static_cast<std::size_t>(exchange.communicator)].size;
    const std::int64_t shards = ShardCount(plan_, unit);
    if (ranks % shards != 0)
      return wrong("/unit", "is cut over other ranks than those of the exchange",
                   fmt::format("{} shards", shards), fmt::format("{} ranks or a part of them", ranks));
    if ((matrix.owner >= 0) != HasOwners(exchange))
      return wrong("/owner", "has an owner, or has none, unlike the exchange's first matrix",
                   matrix.owner < 0 ? "none" : fmt::format("{}", matrix.owner),
                   "an owner of every matrix, or of none");
    if (!HasOwners(exchange) && ranks != shards)
      return wrong("/unit", "has no owner, and is not cut over the exchange's ranks",
                   fmt::format("{} shards", shards), fmt::format("{}", ranks));
    if (matrix.owner < -1 || matrix.owner >= ranks)
      return wrong("/owner", "has an owner outside of the exchange's ranks", fmt::format("{}", matrix.owner),
                   fmt::format("0 to {}", ranks - 1));
    const Unit& first = plan_.units[static_cast<std::size_t>(exchange.matrices.front().unit)];
    if (shards != ShardCount(plan_, first))
      return wrong("/unit", "is cut over another number of ranks than the exchange's first matrix",
                   fmt::format("{}", shards), fmt::format("{}", ShardCount(plan_, first)));
    return {};
  }

  const Plan& plan_;
  std::map<std::pair<UnitId, std::int32_t>, std::size_t> of_;  // the exchange of a parameter
};

}  // namespace

std::int64_t ColumnsOf(const UnitParameter& parameter) {
  return parameter.shape.empty() ? 1 : parameter.shape.back();
}

std::int64_t RowsOf(const UnitParameter& parameter, const ExchangedMatrix& matrix) {
  return matrix.rows > 0 ? matrix.rows : AllRows(parameter);
}

std::vector<std::int64_t> ShapeOf(const Plan& plan, const ExchangedMatrix& matrix) {
  const UnitParameter& parameter = ParameterOf(plan, matrix);
  return {RowsOf(parameter, matrix), ColumnsOf(parameter)};
}

bool HasOwners(const Exchange& exchange) {
  return !exchange.matrices.empty() && exchange.matrices.front().owner >= 0;
}

ExchangeLayout::ExchangeLayout(const Plan& plan, const Exchange& exchange)
    : plan_(plan),
      exchange_(exchange),
      ranks_(plan.communicators[static_cast<std::size_t>(exchange.communicator)].size),
      shards_(exchange.matrices.empty()
                  ? 1
                  : ShardCount(plan, plan.units[static_cast<std::size_t>(exchange.matrices.front().unit)])) {}

std::int64_t ExchangeLayout::PieceNumel(std::size_t matrix, std::int64_t rank) const {
  const ExchangedMatrix& of = exchange_.matrices[matrix];
  const UnitParameter& parameter = ParameterOf(plan_, of);
  const std::int64_t columns = ColumnsOf(parameter);
  const std::int64_t rows_of_first = parameter.shape[0] == 0 ? 0 : AllRows(parameter) / parameter.shape[0];
  const std::int64_t chunk = (parameter.shape[0] + shards_ - 1) / shards_ * rows_of_first;
  const std::int64_t shard = rank % shards_;
  const std::int64_t begin = std::max(shard * chunk, of.first_row);
  const std::int64_t end =
      std::min({(shard + 1) * chunk, AllRows(parameter), of.first_row + RowsOf(parameter, of)});
  return std::max<std::int64_t>(end - begin, 0) * columns;
}

std::int64_t ExchangeLayout::SentNumel(ExchangeDirection direction, std::int64_t from,
                                       std::int64_t to) const {
  const bool there = direction == ExchangeDirection::kToOwners;
  const std::int64_t owner = there ? to : from;
  if (there && from / shards_ != to / shards_) return 0;
  std::int64_t sent = 0;
  for (std::size_t m = 0; m < exchange_.matrices.size(); ++m) {
    if (exchange_.matrices[m].owner == owner) sent += PieceNumel(m, there ? from : to);
  }
  return sent;
}

std::int64_t ExchangeLayout::SentFirst(ExchangeDirection direction, std::int64_t from,
                                       std::int64_t to) const {
  const bool there = direction == ExchangeDirection::kToOwners;
  std::int64_t first = 0;
  for (std::int64_t before = 0; before < (there ? to : to % shards_); ++before)
    first +=
        there ? SentNumel(ExchangeDirection::kToShards, before, from) : SentNumel(direction, from, before);
  return first;
}

std::int64_t ExchangeLayout::PiecesNumel(std::int64_t rank) const {
  std::int64_t numel = 0;
  const std::int64_t filled = HasOwners(exchange_) ? rank : 0;
  for (std::size_t m = 0; m < exchange_.matrices.size(); ++m) numel += PieceNumel(m, filled);
  return numel;
}

std::int64_t ExchangeLayout::WholeNumel(std::int64_t rank) const {
  if (!HasOwners(exchange_)) return PiecesNumel(rank) * ranks_;
  std::int64_t numel = 0;
  for (const ExchangedMatrix& matrix : exchange_.matrices) {
    if (matrix.owner != rank) continue;
    const UnitParameter& parameter = ParameterOf(plan_, matrix);
    numel += RowsOf(parameter, matrix) * ColumnsOf(parameter);
  }
  return numel;
}

std::int64_t ExchangeLayout::LargestOwner() const {
  if (!HasOwners(exchange_)) return 0;
  std::map<std::int64_t, std::int64_t> numel;
  for (const ExchangedMatrix& matrix : exchange_.matrices) {
    const UnitParameter& parameter = ParameterOf(plan_, matrix);
    numel[matrix.owner] += RowsOf(parameter, matrix) * ColumnsOf(parameter);
  }
  std::pair<std::int64_t, std::int64_t> most{0, 0};
  for (const auto& [owner, owned] : numel) {
    if (owned > most.second) most = {owner, owned};
  }
  return most.first;
}

Communicator ReplicasOfShards(const Communicator& replicas, const Communicator& shards) {
  Communicator both{.name = replicas.name + "_" + shards.name};
  for (const Communicator* of : {&replicas, &shards}) {
    if (of->dims.empty()) {
      both.dims.push_back({of->size, of->stride});
    } else {
      std::ranges::copy(of->dims, std::back_inserter(both.dims));
    }
  }
  both.size = replicas.size * shards.size;
  both.stride = both.dims.back().stride;
  return both;
}

ExchangeTraffic TrafficOf(const Plan& plan, const Exchange& exchange, ExchangeDirection direction) {
  constexpr std::int64_t kMillion = 1'000'000;
  const ExchangeLayout layout(plan, exchange);
  const std::int64_t ranks = layout.ranks();
  // Elements that leave and reach a rank on the way back; on the way there it is the reverse, within
  // replicas.
  std::vector<std::int64_t> from_owner(static_cast<std::size_t>(ranks)), to_shard(from_owner);
  const bool back = direction == ExchangeDirection::kToShards;
  for (std::size_t m = 0; m < exchange.matrices.size(); ++m) {
    const std::int64_t owner = exchange.matrices[m].owner;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      if (rank == owner || (!back && rank / layout.shards() != owner / layout.shards())) continue;
      const std::int64_t numel = layout.PieceNumel(m, rank);
      from_owner[static_cast<std::size_t>(owner)] += numel;
      to_shard[static_cast<std::size_t>(rank)] += numel;
    }
  }
  const std::int64_t most = std::max(std::ranges::max(from_owner), std::ranges::max(to_shard));
  std::int64_t in_all = 0;
  for (const std::int64_t numel : to_shard) in_all += numel;
  // Costs have the tensor with the rank's own part in it, which does not move: it is the mean of the others.
  const std::int64_t others = std::max<std::int64_t>(ranks - 1, 1);
  const std::int64_t mean = (in_all + others - 1) / others;
  if (mean == 0) return {};
  __extension__ using Wide = __int128;
  const auto ppm = static_cast<std::int64_t>((Wide{most} * ranks * kMillion + Wide{mean} * others - 1) /
                                             (Wide{mean} * others));
  return {Bytes{mean * SizeBytes(exchange.dtype)},
          std::clamp(ppm, std::int64_t{1}, layout.ranks() * kMillion)};
}

ExchangeDirection DirectionOf(const Plan& plan, const Instruction& all_to_all) {
  return plan.buffers[static_cast<std::size_t>(all_to_all.src)].role == BufferRole::kUpdatePieces
             ? ExchangeDirection::kToOwners
             : ExchangeDirection::kToShards;
}

ExchangeTraffic TrafficOf(const Plan& plan, const Instruction& all_to_all) {
  return TrafficOf(plan, plan.exchanges[static_cast<std::size_t>(all_to_all.exchange)],
                   DirectionOf(plan, all_to_all));
}

Bytes TensorBytesOf(const Plan& plan, const Instruction& collective) {
  if (collective.kind == InstructionKind::kAllToAll) return TrafficOf(plan, collective).size_bytes;
  return SizeBytes(plan.buffers[static_cast<std::size_t>(FullTensorOf(collective))]);
}

Status CheckExchanges(const Plan& plan) { return ExchangesCheck(plan).Run(); }

}  // namespace shardplan

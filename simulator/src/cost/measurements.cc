// SPDX-License-Identifier: Apache-2.0
// Reading tables of measurements.
#include "shardplan/simulator/measurements.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "cost/nccl_tests.h"
#include "shardplan/schemas/collective_kinds.h"

namespace shardplan {
namespace {

constexpr std::int64_t kMostValue = std::int64_t{1} << 53;
// A recv is measured with its send, and has no name of its own.
constexpr auto kMeasuredNames = [] {
  std::array<std::pair<std::string_view, CollectiveKind>, kCollectiveKindCount - 1> names;
  std::size_t next = 0;
  for (const CollectiveDescription& is : kCollectiveKinds) {
    if (!is.measured.empty()) names[next++] = {is.measured, is.kind};
  }
  return names;
}();
// The name of a device in tables, and the names that its driver gives.
constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kDriverNames = {
    {{"h100-sxm", "NVIDIA H100 80GB HBM3"},
     {"h200", "NVIDIA H200"},
     {"b200", "NVIDIA B200"},
     {"gb200-nvl72", "NVIDIA GB200"},
     {"a100-sxm", "NVIDIA A100-SXM4-80GB"},
     {"a100-sxm", "NVIDIA A100-SXM4-40GB"}}};
constexpr std::array<std::pair<std::string_view, DType>, 6> kMatmulDTypes = {{{"bf16", DType::kBFloat16},
                                                                              {"f16", DType::kFloat16},
                                                                              {"f32", DType::kFloat32},
                                                                              {"bfloat16", DType::kBFloat16},
                                                                              {"float16", DType::kFloat16},
                                                                              {"float32", DType::kFloat32}}};

std::vector<std::string_view> SplitAt(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && (text.back() == '\r' || text.back() == ' ')) text.remove_suffix(1);
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  return text;
}

class CsvReader {
 public:
  Result<Measurements> Read(std::string_view text) {
    if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
    bool headed = false;
    for (const std::string_view raw : SplitAt(text, '\n')) {
      ++line_;
      const std::string_view line = Trimmed(raw);
      if (line.empty()) continue;
      cells_.clear();
      for (const std::string_view cell : SplitAt(line, ',')) cells_.push_back(Trimmed(cell));
      if (Status read = headed ? ReadRow() : ReadHead(); !read) return std::unexpected(read.error());
      headed = true;
    }
    if (!headed) return Wrong("the table is empty", "", "a line that names the columns");
    return std::move(made_);
  }

 private:
  std::unexpected<Error> Wrong(std::string message, std::string_view found, std::string expected) const {
    return std::unexpected(Error{ErrorCode::kBadInput, std::move(message), "", fmt::format("/line/{}", line_),
                                 std::string(found), std::move(expected)});
  }

  Status ReadHead() {
    for (const std::string_view cell : cells_) columns_.emplace_back(cell);
    of_matmuls_ = Column("dtype") >= 0;
    if (Column("tokens_per_second_per_gpu") >= 0)
      return Wrong("a table of training runs needs the builder of their models", "none", "--builder");
    static constexpr std::array<std::string_view, 6> kOfCollectives = {
        "device", "collective", "concurrent_groups", "ranks_per_group", "full_tensor_bytes", "duration_ns"};
    static constexpr std::array<std::string_view, 7> kOfMatmuls = {"device", "dtype", "batch",      "m",
                                                                   "n",      "k",     "duration_ns"};
    const std::span<const std::string_view> needed = of_matmuls_
                                                         ? std::span<const std::string_view>(kOfMatmuls)
                                                         : std::span<const std::string_view>(kOfCollectives);
    for (const std::string_view name : needed) {
      const auto count = std::ranges::count(columns_, name);
      if (count == 1) continue;
      return Wrong(fmt::format("column {} is {}", name, count == 0 ? "missing" : "there twice"),
                   fmt::format("{}", fmt::join(columns_, ",")), fmt::format("{}", fmt::join(needed, ",")));
    }
    return {};
  }

  std::ptrdiff_t Column(std::string_view name) const {
    const auto found = std::ranges::find(columns_, name);
    return found == columns_.end() ? -1 : found - columns_.begin();
  }
  std::string_view Cell(std::string_view name) const {
    return cells_[static_cast<std::size_t>(Column(name))];
  }

  Result<std::int64_t> Number(std::string_view name) const {
    const std::string_view cell = Cell(name);
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
    if (error != std::errc() || end != cell.data() + cell.size() || value < 1 || value > kMostValue)
      return Wrong(fmt::format("{} is not a number", name), cell, "an integer from 1 to 2^53");
    return value;
  }

  template <typename Table>
  auto OneOf(std::string_view name, const Table& table) const -> Result<decltype(table[0].second)> {
    std::vector<std::string_view> names;
    for (const auto& [known, value] : table) {
      if (known == Cell(name)) return value;
      names.push_back(known);
    }
    return Wrong(fmt::format("{} is not known", name), Cell(name),
                 fmt::format("one of {}", fmt::join(names, ", ")));
  }

  // Numbers of several columns, in their order; the first that is wrong is the error.
  template <typename... Targets>
  Status Numbers(std::span<const std::string_view> names, Targets*... targets) const {
    std::size_t next = 0;
    Status status;
    const auto read = [&](std::int64_t* target) {
      if (!status) return;
      const Result<std::int64_t> value = Number(names[next++]);
      if (!value) {
        status = std::unexpected(value.error());
      } else {
        *target = *value;
      }
    };
    (read(targets), ...);
    return status;
  }

  Status ReadRow() {
    if (cells_.size() != columns_.size())
      return Wrong("the row has another number of cells than there are columns",
                   fmt::format("{}", cells_.size()), fmt::format("{}", columns_.size()));
    if (Cell("device").empty()) return Wrong("device is empty", "", "a name");
    return of_matmuls_ ? ReadMatmul() : ReadCollective();
  }

  Status ReadCollective() {
    CollectiveMeasurement row{.device = std::string(Cell("device"))};
    const auto kind = OneOf("collective", kMeasuredNames);
    if (!kind) return std::unexpected(kind.error());
    row.kind = *kind;
    static constexpr std::array<std::string_view, 4> kNames = {"concurrent_groups", "ranks_per_group",
                                                               "full_tensor_bytes", "duration_ns"};
    if (Status read = Numbers(kNames, &row.concurrent_groups, &row.ranks, &row.full_tensor_bytes.value,
                              &row.duration_ns.value);
        !read)
      return read;
    if (row.ranks > kMostRanks)
      return Wrong("ranks_per_group is too large", Cell("ranks_per_group"),
                   fmt::format("{} or less", kMostRanks));
    if (Column("nodes") >= 0) {
      const Result<std::int64_t> nodes = Number("nodes");
      if (!nodes) return std::unexpected(nodes.error());
      if (*nodes > row.ranks)
        return Wrong("the group is on more nodes than it has ranks", Cell("nodes"),
                     fmt::format("{} or less", row.ranks));
      row.nodes = *nodes;
    }
    made_.collectives.push_back(std::move(row));
    return {};
  }

  Status ReadMatmul() {
    MatmulMeasurement row{.device = std::string(Cell("device"))};
    const auto dtype = OneOf("dtype", kMatmulDTypes);
    if (!dtype) return std::unexpected(dtype.error());
    row.dtype = *dtype;
    static constexpr std::array<std::string_view, 5> kNames = {"batch", "m", "n", "k", "duration_ns"};
    if (Status read = Numbers(kNames, &row.batch, &row.m, &row.n, &row.k, &row.duration_ns.value); !read)
      return read;
    std::int64_t product = 16;  // FLOPs and bytes stay below 2^58
    for (const std::int64_t size : {row.batch, row.m, row.n, row.k}) {
      if (__builtin_mul_overflow(product, size, &product) || product > kMostValue * 32)
        return Wrong("the product is too large",
                     fmt::format("{} x {} x {} x {}", row.batch, row.m, row.n, row.k),
                     "2^54 multiplications or less");
    }
    made_.matmuls.push_back(std::move(row));
    return {};
  }

  int line_ = 0;
  bool of_matmuls_ = false;
  std::vector<std::string> columns_;
  std::vector<std::string_view> cells_;
  Measurements made_;
};

}  // namespace

std::optional<CollectiveKind> CollectiveOfProgram(std::string_view program) {
  return internal::KindOfProgram(program);
}

bool IsDevice(std::string_view name_in_table, const Device& device) {
  if (name_in_table == device.table_name) return true;
  return std::ranges::any_of(kDriverNames, [&](const auto& names) {
    return names.first == device.table_name && names.second == name_in_table;
  });
}

Result<Measurements> ParseMeasurements(std::string_view text, const ReadOptions& options) {
  return internal::IsNcclTests(text) ? internal::ReadNcclTests(text, options) : CsvReader().Read(text);
}

Result<CollectiveCost> PredictCollective(const Cluster& cluster, const CollectiveMeasurement& row) {
  const GroupPlacement place = PlaceTable(cluster, row.ranks, row.nodes, row.concurrent_groups);
  return MakeCostModel(cluster)->Collective({row.kind, row.ranks, {&place, 1}, row.full_tensor_bytes});
}

OperatorEvent OperatorOf(const MatmulMeasurement& row) {
  const std::int64_t element = SizeBytes(row.dtype);
  return {.name = "aten.bmm",
          .dtype = row.dtype,
          .flops = 2 * row.batch * row.m * row.n * row.k,
          .bytes_read = {element * row.batch * (row.m * row.k + row.k * row.n)},
          .bytes_written = {element * row.batch * row.m * row.n}};
}

}  // namespace shardplan

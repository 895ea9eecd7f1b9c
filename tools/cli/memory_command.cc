// `memory`: device memory of a plan or of a trace under a strategy, without any cost.
#include <fmt/format.h>

#include <optional>

#include "commands.h"
#include "plan_flags.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/memory_rows.h"
#include "support.h"

namespace shardplan::cli {
namespace {

struct Options {
  std::string input, strategy, rows;
  std::int64_t ranks = 0;
  PlanFlags flags;
  bool quiet = false;
};

std::string UnitText(const Plan& plan, UnitId unit) {
  if (unit < 0) return "";
  const std::string& fqn = plan.units[static_cast<std::size_t>(unit)].fqn;
  return fqn.empty() ? "(root)" : fqn;
}

// A string without characters that JSON would escape but quotes and backslashes: names of units and buffers.
std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

std::string Numbers(const std::vector<Bytes>& values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", values[i].value);
  }
  return text + "]";
}

// {"categories": [...], "peak": {...}, "rows": [{"event", "unit", "microbatch", "total_bytes",
// "by_category"}...]}
std::string RowsJson(const Plan& plan, const MemoryRows& rows) {
  std::string text = "{\n  \"categories\": [";
  for (std::size_t c = 0; c < MemoryCategories().size(); ++c) {
    text += (c == 0 ? "" : ", ") + Quoted(MemoryCategories()[c]);
  }
  const MemoryPeak& peak = rows.peak;
  text += fmt::format(
      "],\n  \"peak\": {{\"total_bytes\": {}, \"by_category\": {}, \"phase\": {}, \"unit\": {}, "
      "\"allocation\": {}}},\n  \"rows\": [\n",
      peak.total_bytes.value, Numbers(peak.by_category), Quoted(peak.phase),
      Quoted(UnitText(plan, peak.unit)), Quoted(peak.allocation));
  for (std::size_t r = 0; r < rows.rows.size(); ++r) {
    const MemoryRow& row = rows.rows[r];
    text += fmt::format(
        "    {{\"event\": {}, \"unit\": {}, \"microbatch\": {}, \"total_bytes\": {}, \"by_category\": "
        "{}}}{}\n",
        Quoted(row.event), Quoted(UnitText(plan, row.unit)), row.microbatch, row.total_bytes.value,
        Numbers(row.by_category), r + 1 < rows.rows.size() ? "," : "");
  }
  return text + "  ]\n}\n";
}

std::string Table(const Plan& plan, const MemoryRows& rows) {
  const auto gib = [](Bytes bytes) {
    return static_cast<double>(bytes.value) / static_cast<double>(std::int64_t{1} << 30);
  };
  const MemoryPeak& peak = rows.peak;
  const MemoryRow& end = rows.rows.back();
  std::string text = fmt::format("{:<28} {:>18} {:>10}   {:>18} {:>10}\n", "category", "at the peak, bytes",
                                 "GiB", "between steps", "GiB");
  for (std::size_t c = 0; c < MemoryCategories().size(); ++c) {
    if (peak.by_category[c].value == 0 && end.by_category[c].value == 0) continue;
    text += fmt::format("{:<28} {:>18} {:>10.3f}   {:>18} {:>10.3f}\n", MemoryCategories()[c],
                        peak.by_category[c].value, gib(peak.by_category[c]), end.by_category[c].value,
                        gib(end.by_category[c]));
  }
  text += fmt::format("{:<28} {:>18} {:>10.3f}   {:>18} {:>10.3f}\n", "total", peak.total_bytes.value,
                      gib(peak.total_bytes), end.total_bytes.value, gib(end.total_bytes));
  text += fmt::format("peak in the {}", peak.phase);
  if (peak.unit >= 0) text += fmt::format(", {}", UnitText(plan, peak.unit));
  if (!peak.allocation.empty()) text += fmt::format(", at the allocation of {}", peak.allocation);
  return text + "\n";
}

Result<Plan> PlanOf(const Options& options) {
  Result<Document> document = ReadDocument(options.input);
  if (!document) return std::unexpected(document.error());
  if (auto* plan = std::get_if<Plan>(&*document)) return std::move(*plan);
  const auto* trace = std::get_if<Trace>(&*document);
  if (trace == nullptr) {
    return MakeError(ErrorCode::kBadInput, options.input + " is neither a trace nor a plan");
  }
  const Result<Strategy> strategy = StrategyOf(options.strategy, options.flags);
  if (!strategy) return std::unexpected(strategy.error());
  Cluster cluster{.name = "memory only", .ranks = std::max<std::int64_t>(options.ranks, 1)};
  if (options.ranks == 0) {
    for (const StrategyMeshDim& dim : strategy->mesh) cluster.ranks *= dim.size;
  }
  Result<PlannerOutput> planned =
      PlanTrace(*trace, options.input, *strategy, options.strategy, cluster, {.verify = false});
  if (!planned) return std::unexpected(planned.error());
  return std::move(planned->plan);
}

Status RunMemory(const Options& options) {
  const Result<Plan> plan = PlanOf(options);
  if (!plan) return std::unexpected(plan.error());
  const MemoryProfile profile = ProfileMemory(*plan, {.record_samples = true});
  const MemoryRows rows = RowsOf(*plan, profile, plan->steady_step);
  if (rows.rows.empty()) return MakeError(ErrorCode::kBadInput, "the plan has no step");
  if (!options.rows.empty()) {
    if (Status written = WriteOutput(options.rows, RowsJson(*plan, rows)); !written) return written;
    if (options.rows == "-") return {};
    Progress(options.quiet, fmt::format("wrote {}", options.rows));
  }
  return WriteOutput("-", Table(*plan, rows));
}

}  // namespace

void AddMemoryCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      app.add_subcommand("memory", "Device memory by category at the peak and between steps; needs no costs");
  command->footer(
      "Examples: shardplan memory plan.json\n"
      "          shardplan memory trace.json --policy fsdp2 --ranks 64 --checkpoint 'model.layers.*'\n"
      "          shardplan memory trace.json --strategy s.json --ranks 8 --rows rows.json");
  auto options = std::make_shared<Options>();
  command->add_option("INPUT", options->input, "A plan, or a trace that is planned first")->required();
  command->add_option("--ranks", options->ranks, "Of a trace: how many ranks (default: the mesh's)")
      ->check(CLI::PositiveNumber);
  command->add_option("--strategy", options->strategy, "Of a trace: a strategy file; flags go over it");
  command->add_option("--rows", options->rows,
                      "Write bytes by category before and after every hook of every unit (JSON)");
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  AddPlanFlags(*command, options->flags);
  command->callback([options, &invocation] {
    const Status status = RunMemory(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli

// SPDX-License-Identifier: Apache-2.0
// `cost`: predicted next to measured, and cluster documents fitted to measurements. Tables of training runs
// need the tracer: `shardplan.runs` of the Python package reads them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "cluster_names.h"
#include "commands/commands.h"
#include "flags/file_flag.h"
#include "shardplan/schemas/collective_kinds.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/measurements.h"
#include "support.h"
#include "texts/moved_step.h"

namespace shardplan::cli {
namespace {

constexpr std::int64_t kFullClock = 1'000'000;
constexpr std::int64_t kMiB = std::int64_t{1} << 20;

struct CostArguments {
  std::vector<std::string> tables;
  std::string cluster, leave_out, fit, output, source = "measured", device;
  // Options of nccl-tests:
  std::string collective;
  bool in_place = false;
  // Options of training runs:
  std::string builder, fit_rows, figures;
  std::vector<std::string> cluster_of;
  bool quiet = false;
};

struct ReadTable {
  std::string path;
  Measurements rows;
};

struct Prediction {
  std::optional<Nanoseconds> duration_ns;
  std::string source;
};

// Absolute differences, as parts of what was measured.
class Errors {
 public:
  void Add(const std::string& group, const std::optional<Nanoseconds>& predicted, Nanoseconds measured) {
    std::vector<double>& errors = of_[group];
    if (!predicted) {
      ++unanswered_;
      return;
    }
    errors.push_back(
        std::abs(static_cast<double>(predicted->value) / static_cast<double>(measured.value) - 1));
  }

  std::string Lines(const std::vector<std::string>& order) const {
    std::string text;
    for (const std::string& group : order) {
      const auto found = of_.find(group);
      if (found == of_.end() || found->second.empty()) continue;
      std::vector<double> errors = found->second;
      std::ranges::sort(errors);
      const std::size_t half = errors.size() / 2;
      const double median = errors.size() % 2 == 1 ? errors[half] : (errors[half - 1] + errors[half]) / 2;
      double sum = 0;
      for (const double error : errors) sum += error;
      text += fmt::format("{:<18} {:>6} rows   median {:>6.2f} %   mean {:>6.2f} %   worst {:>6.1f} %\n",
                          group, errors.size(), 100 * median, 100 * sum / static_cast<double>(errors.size()),
                          100 * errors.back());
    }
    return text;
  }

  std::int64_t unanswered() const { return unanswered_; }

 private:
  std::map<std::string, std::vector<double>> of_;
  std::int64_t unanswered_ = 0;
};

std::string ErrorText(const Prediction& prediction, Nanoseconds measured) {
  if (!prediction.duration_ns) return fmt::format("{:>12} {:>9}", "-", "-");
  const double error =
      static_cast<double>(prediction.duration_ns->value) / static_cast<double>(measured.value) - 1;
  return fmt::format("{:>12} {:>+8.1f}%", prediction.duration_ns->value, 100 * error);
}

// The document that answers for a device: the one that is named, else a shipped one whose tables call it so.
class Clusters {
 public:
  explicit Clusters(std::string named) : named_(std::move(named)) {}

  // Null: no shipped document is of this device.
  Result<const Cluster*> Of(const std::string& device) {
    auto found = by_device_.find(device);
    if (found == by_device_.end()) {
      Result<std::optional<Cluster>> made = std::nullopt;
      if (named_.empty()) {
        made = Shipped(device);
      } else if (Result<Cluster> cluster = FindCluster(named_); cluster) {
        made = std::move(*cluster);
      } else {
        made = std::unexpected(cluster.error());
      }
      found = by_device_.emplace(device, std::move(made)).first;
    }
    if (!found->second) return std::unexpected(found->second.error());
    std::optional<Cluster>& cluster = *found->second;
    if (!cluster) return nullptr;
    // Kernels are measured one by one, before a power limit lowers the clock.
    cluster->device.clock_ppm = kFullClock;
    cluster->device.spread_ppm = 0;
    return &*cluster;
  }

  // That no device of a table has one.
  std::unexpected<Error> None() const {
    std::vector<std::string> found;
    for (const auto& [device, cluster] : by_device_) found.push_back(device);
    return std::unexpected(Error{
        .code = ErrorCode::kBadInput,
        .message =
            "no shipped cluster is of this device: --cluster names a document, --leave-out fits the rest",
        .found = fmt::format("{}", fmt::join(found, ", ")),
        .expected = fmt::format("one of: {}", fmt::join(known_, ", "))});
  }

 private:
  // The smallest that has links between nodes, if one has.
  Result<std::optional<Cluster>> Shipped(const std::string& device) {
    std::optional<Cluster> best;
    for (const std::string& name : ShippedClusters()) {
      Result<Cluster> cluster = FindCluster(name);
      if (!cluster) return std::unexpected(cluster.error());
      if (!cluster->device.table_name.empty()) known_.insert(cluster->device.table_name);
      if (!IsDevice(device, cluster->device)) continue;
      const auto rank = [](const Cluster& c) { return std::pair(-std::ssize(c.links), c.ranks); };
      if (!best || rank(*cluster) < rank(*best)) best = std::move(*cluster);
    }
    return best;
  }

  const std::string named_;
  std::set<std::string> known_;
  std::map<std::string, Result<std::optional<Cluster>>> by_device_;
};

// Rows that were passed over because no shipped cluster is of their device.
class Unknown {
 public:
  void Add(const std::string& device) { ++rows_[device]; }
  std::string Lines() const {
    std::string text;
    for (const auto& [device, rows] : rows_) {
      text += fmt::format("no shipped cluster is of {}: {} rows, which --cluster FILE predicts\n",
                          Printable(device), rows);
    }
    return text;
  }

 private:
  std::map<std::string, std::int64_t> rows_;
};

Prediction Predict(const Cluster& cluster, const CollectiveMeasurement& row) {
  const Result<CollectiveCost> cost = PredictCollective(cluster, row);
  if (!cost)
    return {std::nullopt, cost.error().pointer.empty() || cluster.links.empty() ? "nothing to fit to"
                                                                                : cost.error().message};
  return {cost->duration_ns, cost->source};
}

// A machine of the other rows of the device alone, with nodes of so many ranks.
Cluster WithoutCollective(std::span<const CollectiveMeasurement> rows, const CollectiveMeasurement& left_out,
                          bool whole_group, std::int64_t ranks_per_node) {
  std::vector<CollectiveMeasurement> rest;
  for (const CollectiveMeasurement& row : rows) {
    if (row.device != left_out.device) continue;
    const bool same_table = row.kind == left_out.kind && row.ranks == left_out.ranks &&
                            row.concurrent_groups == left_out.concurrent_groups &&
                            row.nodes == left_out.nodes;
    const bool out = whole_group ? row.ranks == left_out.ranks
                                 : same_table && row.full_tensor_bytes == left_out.full_tensor_bytes;
    if (!out) rest.push_back(row);
  }
  Cluster cluster;
  cluster.ranks_per_node = ranks_per_node;
  cluster.collectives = FitCollectiveTables(rest, cluster, "");
  return cluster;
}

// Programs of nccl-tests whose collective has a cost.
std::vector<std::string> ProgramNames() {
  std::vector<std::string> names;
  for (const CollectiveDescription& is : kCollectiveKinds) {
    if (!is.nccl_tests.empty()) names.emplace_back(is.nccl_tests);
  }
  return names;
}

std::string SizeClass(Bytes size) {
  return size.value < kMiB ? "below 1 MiB" : size.value < 16 * kMiB ? "1 MiB to 16 MiB" : "from 16 MiB";
}

Result<std::string> CollectivesText(const CostArguments& options, const ReadTable& table) {
  Clusters clusters(options.cluster);
  Errors errors;
  std::int64_t told = 0;
  std::size_t width = 14;
  for (const CollectiveMeasurement& row : table.rows.collectives) width = std::max(width, row.device.size());
  std::string text =
      fmt::format("{:<{}} {:<14} {:>6} {:>6} {:>12} {:>12} {:>12} {:>9}  from\n", "device", width,
                  "collective", "groups", "ranks", "bytes", "measured_ns", "predicted_ns", "error");
  Unknown unknown;
  for (const CollectiveMeasurement& row : table.rows.collectives) {
    const Result<const Cluster*> cluster = clusters.Of(row.device);
    if (!cluster && options.leave_out.empty()) return std::unexpected(cluster.error());
    const Cluster* const known = cluster ? *cluster : nullptr;
    Prediction prediction;
    if (!options.leave_out.empty()) {
      // All ranks of a machine that nobody knows are in one node, unless the row says otherwise.
      prediction = Predict(WithoutCollective(table.rows.collectives, row, options.leave_out == "group",
                                             known != nullptr ? known->ranks_per_node : kMostRanks),
                           row);
    } else if (known != nullptr) {
      prediction = Predict(*known, row);
    } else {
      unknown.Add(row.device);
      continue;
    }
    ++told;
    errors.Add(SizeClass(row.full_tensor_bytes), prediction.duration_ns, row.duration_ns);
    text += fmt::format("{:<{}} {:<14} {:>6} {:>6} {:>12} {:>12} {}  {}\n", Printable(row.device), width,
                        Name(row.kind), row.concurrent_groups, row.ranks, row.full_tensor_bytes.value,
                        row.duration_ns.value, ErrorText(prediction, row.duration_ns),
                        Printable(prediction.source));
  }
  if (told == 0) return clusters.None();
  if (errors.unanswered() > 0) text += fmt::format("not predicted: {} rows\n", errors.unanswered());
  text += unknown.Lines();
  return text + errors.Lines({"below 1 MiB", "1 MiB to 16 MiB", "from 16 MiB"});
}

bool SameShape(const MatmulMeasurement& a, const MatmulMeasurement& b) {
  return a.device == b.device && a.dtype == b.dtype && a.batch == b.batch && a.m == b.m && a.n == b.n &&
         a.k == b.k;
}

// The device with the rate of the row's dtype fitted to the other rows alone.
Cluster WithoutShape(Cluster cluster, std::span<const MatmulMeasurement> rows,
                     const MatmulMeasurement& left_out) {
  std::vector<MatmulMeasurement> rest;
  for (const MatmulMeasurement& row : rows) {
    if (row.device == left_out.device && row.dtype == left_out.dtype && !SameShape(row, left_out))
      rest.push_back(row);
  }
  cluster.device.matmul = {{.dtype = left_out.dtype, .shapes = FitMatmulShapes(rest)}};
  return cluster;
}

Result<std::string> MatmulsText(const CostArguments& options, const ReadTable& table) {
  Clusters clusters(options.cluster);
  Errors errors;
  std::set<std::string> dtypes, all;
  Unknown unknown;
  std::string text = fmt::format("{:<10} {:<9} {:>5} {:>6} {:>6} {:>6} {:>12} {:>12} {:>9}\n", "device",
                                 "dtype", "batch", "m", "n", "k", "measured_ns", "predicted_ns", "error");
  for (const MatmulMeasurement& row : table.rows.matmuls) {
    const Result<const Cluster*> cluster = clusters.Of(row.device);
    Prediction prediction;
    if (options.leave_out.empty()) {
      if (!cluster) return std::unexpected(cluster.error());
      if (*cluster == nullptr) {
        unknown.Add(row.device);
        continue;
      }
      prediction.duration_ns = MakeCostModel(**cluster)->Operator(OperatorOf(row));
    } else {
      // Without a document only the measurements speak.
      const Cluster rest =
          WithoutShape(cluster && *cluster != nullptr ? **cluster : Cluster{}, table.rows.matmuls, row);
      if (!rest.device.matmul[0].shapes.empty())
        prediction.duration_ns = MakeCostModel(rest)->Operator(OperatorOf(row));
    }
    const std::string group = fmt::format("{} {}", Printable(row.device), Name(row.dtype));
    dtypes.insert(group);
    all.emplace(Name(row.dtype));
    errors.Add(group, prediction.duration_ns, row.duration_ns);
    errors.Add(std::string(Name(row.dtype)), prediction.duration_ns, row.duration_ns);
    text += fmt::format("{:<10} {:<9} {:>5} {:>6} {:>6} {:>6} {:>12} {}\n", Printable(row.device),
                        Name(row.dtype), row.batch, row.m, row.n, row.k, row.duration_ns.value,
                        ErrorText(prediction, row.duration_ns));
  }
  std::vector<std::string> order(dtypes.begin(), dtypes.end());
  if (all.empty()) return clusters.None();
  order.insert(order.end(), all.begin(), all.end());
  if (errors.unanswered() > 0) text += fmt::format("not predicted: {} rows\n", errors.unanswered() / 2);
  text += unknown.Lines();
  return text + errors.Lines(order);
}

Status CheckCostArguments(const CostArguments& options, std::span<const ReadTable> tables) {
  if (options.fit.empty() != options.output.empty())
    return MakeError(ErrorCode::kUsage,
                     "--fit names the document to start from and -o where the fitted one goes");
  if (!options.fit.empty()) return {};
  if (tables.size() > 1) return MakeError(ErrorCode::kUsage, "several tables are read with --fit only");
  const bool matmuls = !tables.front().rows.matmuls.empty();
  if (matmuls ? options.leave_out == "size" || options.leave_out == "group" : options.leave_out == "shape") {
    return std::unexpected(Error{.code = ErrorCode::kUsage,
                                 .message = "this table has nothing of that kind to leave out",
                                 .found = "--leave-out " + options.leave_out,
                                 .expected = matmuls ? "shape" : "size or group"});
  }
  return {};
}

Status FitDocument(const CostArguments& options, std::span<const ReadTable> tables) {
  Result<Cluster> base = FindCluster(options.fit);
  if (!base) return std::unexpected(base.error());
  Measurements all;
  for (const ReadTable& table : tables) {
    std::ranges::copy(table.rows.collectives, std::back_inserter(all.collectives));
    std::ranges::copy(table.rows.matmuls, std::back_inserter(all.matmuls));
  }
  const Cluster before = *base;
  const Result<ClusterFit> fit = FitCluster(std::move(*base), all, options.source, options.device);
  if (!fit) return std::unexpected(fit.error());
  if (Status written = WriteAndSay(options.output, ToJson(fit->cluster), options.quiet); !written)
    return written;
  std::string text;
  for (const auto& [word, lines] :
       {std::pair{"changed", &fit->changed}, {"stayed", &fit->stayed}, {"passed over", &fit->passed_over}}) {
    for (const std::string& line : *lines) text += fmt::format("{:<12} {}\n", word, Printable(line));
  }
  text += MovedStepText(before, fit->cluster);
  if (options.output != "-") return PrintText(text);
  if (!options.quiet) PrintError(text);  // the document is on standard output
  return {};
}

// Predictions of training runs: a program of its own.
Status RunCostOfRuns(const CostArguments& options) {
  if (options.tables.size() > 1)
    return MakeError(ErrorCode::kUsage, "several tables are read with --fit only");
  if (!options.fit.empty() || !options.leave_out.empty()) {
    return std::unexpected(Error{.code = ErrorCode::kUsage,
                                 .message = "a table of training runs is fitted by --fit-rows",
                                 .found = options.fit.empty() ? "--leave-out" : "--fit",
                                 .expected = "--fit-rows N -o FOLDER"});
  }
  std::vector<std::string> arguments = {"--builder=" + options.builder};
  const auto add = [&](const std::string& flag, const std::string& value) {
    if (!value.empty()) arguments.push_back(flag + "=" + value);
  };
  for (const std::string& pair : options.cluster_of) add("--cluster-of", pair);
  add("--cluster", options.cluster);
  add("--fit-rows", options.fit_rows);
  add("--figures", options.figures);
  add("--output", options.output);
  if (options.quiet) arguments.emplace_back("--quiet");
  arguments.insert(arguments.end(), {"--", options.tables.front()});
  return std::unexpected(ExecutePythonCommand("runs", std::move(arguments)));
}

Status RunCost(const CostArguments& options) {
  if (!options.builder.empty()) return RunCostOfRuns(options);
  if (!options.cluster_of.empty() || !options.fit_rows.empty() || !options.figures.empty()) {
    return MakeError(
        ErrorCode::kUsage,
        "--cluster-of, --fit-rows and --figures are of training runs: --builder makes their models");
  }
  std::vector<std::string> inputs = options.tables;
  for (const std::string& input : {options.cluster, options.fit}) inputs.push_back(input);
  if (Status checked = CheckOutputs(inputs, {{"--output", options.output}}, options.output != "-"); !checked)
    return checked;
  if (!options.device.empty() && options.fit.empty())
    return MakeError(ErrorCode::kUsage, "--device says whose rows --fit takes");
  ReadOptions reading{.in_place = options.in_place};
  if (!options.collective.empty()) reading.kind = CollectiveOfProgram(options.collective);
  std::vector<ReadTable> tables;
  for (const std::string& path : options.tables) {
    Result<std::string> text = ReadFile(path);
    if (!text) return std::unexpected(text.error());
    reading.file_name = std::filesystem::path(path).filename().string();
    Result<Measurements> rows = ParseMeasurements(*text, reading);
    if (!rows) {
      rows.error().file = path;
      return std::unexpected(rows.error());
    }
    tables.push_back({path, std::move(*rows)});
  }
  if (Status checked = CheckCostArguments(options, tables); !checked) return checked;
  if (!options.fit.empty()) return FitDocument(options, tables);
  const ReadTable& table = tables.front();
  Result<std::string> text =
      table.rows.matmuls.empty() ? CollectivesText(options, table) : MatmulsText(options, table);
  if (!text) {
    if (text.error().file.empty()) text.error().file = table.path;
    return std::unexpected(text.error());
  }
  return PrintText(*text);
}

}  // namespace

void AddCostCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "cost",
      "Predicted next to measured for a table of collectives, matrix products or training runs; fit a "
      "cluster to tables");
  command->footer(
      "Examples: shardplan cost collectives.csv --leave-out size\n"
      "          shardplan cost matmuls.csv --cluster h100_sxm_8\n"
      "          shardplan cost collectives.csv matmuls.csv --fit base.json -o cluster.json\n"
      "          shardplan cost all_reduce_perf.log --fit h100_sxm_64 -o cluster.json\n"
      "          shardplan cost runs.csv --builder shardplan.runs.mpt:build\n"
      "          shardplan cost runs.csv --builder mine:build --cluster-of h100=h100_sxm --fit-rows 8 -o "
      "fitted");
  auto options = std::make_shared<CostArguments>();
  command
      ->add_option("TABLE", options->tables,
                   "Comma-separated values, or what nccl-tests prints (docs/reference/cost.md)")
      ->required();
  AddFile(*command, "--cluster", options->cluster,
          "Predictions of this cluster (default: the shipped one of each row's device)");
  command
      ->add_option(
          "--leave-out", options->leave_out,
          "Predict each row from the others of its device: without its size; without its number of ranks "
          "(group); without its shape (products)")
      ->check(CLI::IsMember({"size", "group", "shape"}));
  AddFile(*command, "--fit", options->fit, "Fit this cluster's figures to the tables, for -o");
  command->add_option("--device", options->device,
                      "The rows that --fit takes: those of this device (default: of the cluster's own)");
  command
      ->add_option("--collective", options->collective,
                   "What nccl-tests measured, if its text does not name the program")
      ->check(CLI::IsMember(ProgramNames()));
  command->add_flag("--in-place", options->in_place,
                    "Of nccl-tests the columns in-place (default: out-of-place)");
  AddFile(*command, "-o,--output", options->output,
          "Where to write the fitted cluster ('-': standard output); of training runs: a folder");
  AddFile(*command, "--builder", options->builder,
          "Training runs: package.module:callable, which gets a row and returns the model as for `shardplan "
          "trace`",
          "SOURCE");
  command
      ->add_option("--cluster-of", options->cluster_of,
                   "Training runs: the cluster of a GPU kind, GPU=FILE or GPU=NAME (default: the cluster "
                   "called as the GPU); repeat it")
      ->allow_extra_args(false);
  command->add_option(
      "--fit-rows", options->fit_rows,
      "Training runs: fit --figures to so many rows of each GPU kind, and predict the others");
  command->add_option("--figures", options->figures,
                      "What --fit-rows fits, of clock, matmul, attention, memory, host, spread, network "
                      "(default: matmul,attention,memory,spread)");
  command->add_option("--source", options->source, "Of the fitted tables: where they were measured");
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  command->callback([options, &invocation] {
    const Status status = RunCost(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli

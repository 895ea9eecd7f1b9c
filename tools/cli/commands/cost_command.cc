// SPDX-License-Identifier: Apache-2.0
// `cost`: predicted next to measured, and cluster documents fitted to measurements. Tables of training runs
// need the tracer: `shardplan.runs` of the Python package reads them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "cluster_names.h"
#include "commands/commands.h"
#include "flags/file_flag.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/measurements.h"
#include "support.h"

namespace shardplan::cli {
namespace {

constexpr std::int64_t kFullClock = 1'000'000;
constexpr std::int64_t kMiB = std::int64_t{1} << 20;

struct CostArguments {
  std::vector<std::string> tables;
  std::string cluster, leave_out, fit, output, source = "measured";
  // Of training runs.
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

  Result<const Cluster*> Of(const std::string& device) {
    auto found = by_device_.find(device);
    if (found == by_device_.end())
      found = by_device_.emplace(device, named_.empty() ? Shipped(device) : FindCluster(named_)).first;
    if (!found->second) return std::unexpected(found->second.error());
    // Kernels are measured one by one, before a power limit lowers the clock.
    found->second->device.clock_ppm = kFullClock;
    found->second->device.spread_ppm = 0;
    return &*found->second;
  }

 private:
  static Result<Cluster> Shipped(const std::string& device) {
    std::set<std::string> known;
    for (const std::string& name : ShippedClusters()) {
      Result<Cluster> cluster = FindCluster(name);
      if (!cluster) return cluster;
      if (cluster->device.table_name == device) return cluster;
      if (!cluster->device.table_name.empty()) known.insert(cluster->device.table_name);
    }
    return std::unexpected(Error{
        .code = ErrorCode::kBadInput,
        .message =
            "no shipped cluster is of this device: --cluster names a document, --leave-out fits the rest",
        .found = device,
        .expected = fmt::format("one of: {}", fmt::join(known, ", "))});
  }

  const std::string named_;
  std::map<std::string, Result<Cluster>> by_device_;
};

Prediction PredictCollective(const Cluster& cluster, const CollectiveMeasurement& row) {
  const GroupPlacement place{.nodes = 1,
                             .fewest_in_node = row.ranks,
                             .most_in_node = row.ranks,
                             .concurrent_groups = row.concurrent_groups};
  const auto model = MakeCostModel(cluster);
  const Result<CollectiveCost> cost =
      model->Collective({row.kind, row.ranks, {&place, 1}, row.full_tensor_bytes});
  if (!cost) return {std::nullopt, "nothing to fit to"};
  return {cost->duration_ns, cost->source};
}

// A machine of the other rows of the device alone.
Cluster WithoutCollective(std::span<const CollectiveMeasurement> rows, const CollectiveMeasurement& left_out,
                          bool whole_group) {
  std::vector<CollectiveMeasurement> rest;
  for (const CollectiveMeasurement& row : rows) {
    if (row.device != left_out.device) continue;
    const bool same_table = row.kind == left_out.kind && row.ranks == left_out.ranks &&
                            row.concurrent_groups == left_out.concurrent_groups;
    const bool out = whole_group ? row.ranks == left_out.ranks
                                 : same_table && row.full_tensor_bytes == left_out.full_tensor_bytes;
    if (!out) rest.push_back(row);
  }
  Cluster cluster;
  cluster.collectives = FitCollectiveTables(rest, "", "");
  return cluster;
}

std::string SizeClass(Bytes size) {
  return size.value < kMiB ? "below 1 MiB" : size.value < 16 * kMiB ? "1 MiB to 16 MiB" : "from 16 MiB";
}

Result<std::string> CollectivesText(const CostArguments& options, const ReadTable& table) {
  Clusters clusters(options.cluster);
  Errors errors;
  std::string text =
      fmt::format("{:<14} {:<14} {:>6} {:>6} {:>12} {:>12} {:>12} {:>9}  from\n", "device", "collective",
                  "groups", "ranks", "bytes", "measured_ns", "predicted_ns", "error");
  for (const CollectiveMeasurement& row : table.rows.collectives) {
    Prediction prediction;
    if (options.leave_out.empty()) {
      const Result<const Cluster*> cluster = clusters.Of(row.device);
      if (!cluster) return std::unexpected(cluster.error());
      prediction = PredictCollective(**cluster, row);
    } else {
      prediction = PredictCollective(
          WithoutCollective(table.rows.collectives, row, options.leave_out == "group"), row);
    }
    errors.Add(SizeClass(row.full_tensor_bytes), prediction.duration_ns, row.duration_ns);
    text +=
        fmt::format("{:<14} {:<14} {:>6} {:>6} {:>12} {:>12} {}  {}\n", Printable(row.device), Name(row.kind),
                    row.concurrent_groups, row.ranks, row.full_tensor_bytes.value, row.duration_ns.value,
                    ErrorText(prediction, row.duration_ns), Printable(prediction.source));
  }
  if (errors.unanswered() > 0) text += fmt::format("not predicted: {} rows\n", errors.unanswered());
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
  std::set<std::string> dtypes;
  std::string text = fmt::format("{:<10} {:<9} {:>5} {:>6} {:>6} {:>6} {:>12} {:>12} {:>9}\n", "device",
                                 "dtype", "batch", "m", "n", "k", "measured_ns", "predicted_ns", "error");
  for (const MatmulMeasurement& row : table.rows.matmuls) {
    const Result<const Cluster*> cluster = clusters.Of(row.device);
    Prediction prediction;
    if (options.leave_out.empty()) {
      if (!cluster) return std::unexpected(cluster.error());
      prediction.duration_ns = MakeCostModel(**cluster)->Operator(OperatorOf(row));
    } else {
      // Without a document only the measurements speak.
      const Cluster rest = WithoutShape(cluster ? **cluster : Cluster{}, table.rows.matmuls, row);
      if (!rest.device.matmul[0].shapes.empty())
        prediction.duration_ns = MakeCostModel(rest)->Operator(OperatorOf(row));
    }
    const std::string group = fmt::format("{} {}", Printable(row.device), Name(row.dtype));
    dtypes.insert(group);
    errors.Add(group, prediction.duration_ns, row.duration_ns);
    errors.Add(std::string(Name(row.dtype)), prediction.duration_ns, row.duration_ns);
    text += fmt::format("{:<10} {:<9} {:>5} {:>6} {:>6} {:>6} {:>12} {}\n", Printable(row.device),
                        Name(row.dtype), row.batch, row.m, row.n, row.k, row.duration_ns.value,
                        ErrorText(prediction, row.duration_ns));
  }
  std::vector<std::string> order(dtypes.begin(), dtypes.end());
  std::set<std::string> all;
  for (const MatmulMeasurement& row : table.rows.matmuls) all.emplace(Name(row.dtype));
  order.insert(order.end(), all.begin(), all.end());
  if (errors.unanswered() > 0) text += fmt::format("not predicted: {} rows\n", errors.unanswered() / 2);
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
  return WriteAndSay(options.output, ToJson(FitCluster(std::move(*base), all, options.source)),
                     options.quiet);
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
  std::vector<ReadTable> tables;
  for (const std::string& path : options.tables) {
    Result<std::string> text = ReadFile(path);
    if (!text) return std::unexpected(text.error());
    Result<Measurements> rows = ParseMeasurements(*text);
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
      "          shardplan cost runs.csv --builder shardplan.runs.mpt:build\n"
      "          shardplan cost runs.csv --builder mine:build --cluster-of h100=h100_sxm --fit-rows 8 -o "
      "fitted");
  auto options = std::make_shared<CostArguments>();
  command->add_option("TABLE", options->tables, "Comma-separated values (docs/reference/cost.md)")
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

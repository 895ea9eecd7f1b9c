// SPDX-License-Identifier: Apache-2.0
#include "trace_names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <filesystem>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "shardplan/schemas/io.h"
#include "support.h"

namespace shardplan::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEnd = ".trace.json.gz", kSeq = ".seq";
constexpr std::int64_t kNone = 0;      // of a model without a sequence
constexpr std::int64_t kUsual = 2048;  // `shardplan trace`'s

using Traces = std::map<std::int64_t, std::string>;  // by tokens of a sample: paths

// By model.
std::map<std::string, Traces> ShippedTraces() {
  std::map<std::string, Traces> models;
  for (const fs::path& folder : DataFolders("models", "tools/models")) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
      std::string name = entry.path().filename().string();
      if (!name.ends_with(kEnd)) continue;
      name.resize(name.size() - kEnd.size());
      std::int64_t seq = kNone;
      if (const std::size_t at = name.rfind(kSeq); at != std::string::npos) {
        const char* digits = name.data() + at + kSeq.size();
        if (std::from_chars(digits, name.data() + name.size(), seq).ec != std::errc{}) continue;
        name.resize(at);
      }
      models[name].emplace(seq, entry.path().lexically_normal().string());
    }
  }
  return models;
}

Error NotThere(const std::string& name, const std::map<std::string, Traces>& models) {
  std::vector<std::string> names;
  for (const auto& [model, traces] : models) names.push_back(model);
  return {.code = ErrorCode::kBadInput,
          .message = "no such trace file, nor a model whose traces are shipped",
          .file = name,
          .expected = fmt::format("a path, or one of: {}", fmt::join(names, ", "))};
}

Error NotShipped(const std::string& name, const Traces& traces, std::int64_t seq) {
  std::vector<std::string> lengths;
  for (const auto& [length, path] : traces) lengths.push_back(std::to_string(length));
  Error error{.code = ErrorCode::kBadInput,
              .message = "the trace with this sequence length is not shipped; `shardplan trace` makes it",
              .file = name,
              .found = fmt::format("--seq {}", seq),
              .expected = fmt::format("one of: {}", fmt::join(lengths, ", "))};
  if (traces.contains(kNone)) {
    error.message = "the model has no sequence";
    error.expected = "no --seq";
  }
  return error;
}

}  // namespace

Result<std::string> ResolveTrace(const std::string& path_or_name, const std::optional<std::int64_t>& seq) {
  if (IsThere(path_or_name)) {
    if (!seq) return path_or_name;
    return std::unexpected(Error{.code = ErrorCode::kUsage,
                                 .message = "--seq is of shipped models, and the trace is a file",
                                 .found = path_or_name});
  }
  const std::map<std::string, Traces> models = ShippedTraces();
  const auto model = models.find(path_or_name);
  if (model == models.end()) return std::unexpected(NotThere(path_or_name, models));
  const Traces& traces = model->second;
  const std::int64_t usual = traces.contains(kUsual) ? kUsual : traces.rbegin()->first;
  const auto trace = traces.find(seq.value_or(usual));
  if (trace == traces.end()) return std::unexpected(NotShipped(path_or_name, traces, *seq));
  return trace->second;
}

Result<Trace> ReadNamedTrace(const std::string& path_or_name, const std::optional<std::int64_t>& seq) {
  const Result<std::string> path = ResolveTrace(path_or_name, seq);
  return path ? ReadTrace(*path) : std::unexpected(path.error());
}

void AddSeqFlag(CLI::App& command, std::optional<std::int64_t>& seq) {
  command
      .add_option("--seq", seq,
                  "Of a shipped model: tokens of a sample (default: 2048, or the longest there is)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
}

}  // namespace shardplan::cli

// SPDX-License-Identifier: Apache-2.0
#include "recording.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string_view>

#include "shardplan/schemas/io.h"

namespace shardplan::conformance {
namespace {

Result<LogEvent> ParseLine(const std::string& line) {
  LogEvent event;
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) return MakeInputError("", "the log is damaged", word, "key=value");
    event.keys[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return event;
}

std::optional<std::int32_t> NumberFrom(std::string_view text) {
  std::int32_t number = 0;
  const char* end = text.data() + text.size();
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): `end` bounds it
  const auto [parsed, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || parsed != end || number < 0) return std::nullopt;
  return number;
}

Result<std::int32_t> StepOf(const LogEvent& event) {
  const std::optional<std::int32_t> step = NumberFrom(event.At("step"));
  if (!step) return MakeInputError("", "the log is damaged", event.At("step"), "step=N");
  return *step;
}

// The ranks are in a comment of the log.
Result<std::int64_t> RanksOf(const Recording& recording) {
  constexpr std::string_view kRanks = "ranks ";
  for (const std::string& line : recording.header) {
    if (!line.starts_with(kRanks)) continue;
    const std::optional<std::int32_t> ranks = NumberFrom(std::string_view(line).substr(kRanks.size()));
    if (ranks && *ranks > 0) return *ranks;
  }
  return MakeInputError("", "the log does not say how many ranks there are", "", "a comment \"# ranks N\"");
}

// `status` with the file that it is about.
template <typename T>
T InFile(T status, const std::string& path) {
  if (!status && status.error().file.empty()) status.error().file = path;
  return status;
}

// Reads the file of the log and parses it with `parse`.
template <typename Parse>
Status ReadLog(const std::string& path, Recording& recording, Parse parse) {
  const Result<std::string> log = ReadFile(path);
  if (!log) return std::unexpected(log.error());
  return InFile(parse(*log, recording), path);
}

// Reads a recording of `shardplan conformance --live`: the planner's own documents, and the log.
Result<Recording> ReadLive(const std::string& path) {
  Result<Trace> trace = ReadTrace(path + ".trace.json");
  if (!trace) return std::unexpected(trace.error());
  Result<Strategy> strategy = ReadStrategy(path + ".strategy.json");
  if (!strategy) return std::unexpected(strategy.error());
  Recording recording{.trace = std::move(*trace), .strategy = std::move(*strategy)};
  Status read = ReadLog(path + ".log", recording, ParseLiveLog);
  if (!read) return std::unexpected(std::move(read.error()));
  return recording;
}

}  // namespace

Status ParseLog(const std::string& log, Recording& recording) {
  const bool count_steps = recording.steps == 0;
  std::istringstream lines(log);
  std::size_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.starts_with("# ")) recording.header.push_back(line.substr(2));
    if (line.empty() || line.starts_with("# ")) continue;
    Result<LogEvent> event = ParseLine(line);
    const Result<std::int32_t> step = event ? StepOf(*event) : std::unexpected(event.error());
    if (!step) {
      Error error = step.error();
      error.pointer = "line " + std::to_string(number);
      return std::unexpected(error);
    }
    if (count_steps) recording.steps = std::max(recording.steps, *step + 1);
    recording.events.push_back(std::move(*event));
  }
  return {};
}

Status ParseLiveLog(const std::string& log, Recording& recording) {
  recording.policy = recording.strategy.policy;
  if (Status parsed = ParseLog(log, recording); !parsed) return parsed;
  const Result<std::int64_t> ranks = RanksOf(recording);
  if (!ranks) return std::unexpected(ranks.error());
  recording.cluster.ranks = recording.cluster.ranks_per_node = *ranks;
  return {};
}

Result<Recording> ConvertCase(const std::string& json_text) {
  const bool fsdp2 = json_text.find("\"fsdp2-case-1\"") != std::string::npos;
  return fsdp2 ? ConvertFsdp2(json_text) : ConvertFsdp1(json_text);
}

Result<Recording> ReadRecording(const std::string& path) {
  const std::string name = std::filesystem::path(path).filename().string();
  if (std::filesystem::exists(path + ".trace.json")) {
    Result<Recording> live = ReadLive(path);
    if (live) live->name = name;
    return live;
  }
  Result<std::string> json = ReadFile(path + ".json");
  if (!json) return std::unexpected(json.error());
  Result<Recording> recording = InFile(ConvertCase(*json), path + ".json");
  if (!recording) return recording;
  recording->name = name;
  Status read = ReadLog(path + ".log", *recording, ParseLog);
  if (!read) return std::unexpected(std::move(read.error()));
  return recording;
}

}  // namespace shardplan::conformance

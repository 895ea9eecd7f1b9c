#include "recording.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <sstream>
#include <string_view>

#include "shardplan/schemas/io.h"

namespace shardplan::conformance {
namespace {

LogEvent ParseLine(const std::string& line) {
  LogEvent event;
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    if (equals != std::string::npos) event.keys[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return event;
}

Status ReadLog(const std::string& path, Recording& recording) {
  const Result<std::string> log = ReadFile(path);
  if (!log) return std::unexpected(log.error());
  std::istringstream lines(*log);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# ")) {
      recording.header.push_back(line.substr(2));
    } else if (!line.empty()) {
      recording.events.push_back(ParseLine(line));
    }
  }
  return {};
}

// What `shardplan conformance --live` records: the planner's own documents, and the log.
Result<Recording> ReadLive(const std::string& path) {
  Result<Trace> trace = ReadTrace(path + ".trace.json");
  if (!trace) return std::unexpected(trace.error());
  Result<Strategy> strategy = ReadStrategy(path + ".strategy.json");
  if (!strategy) return std::unexpected(strategy.error());
  Recording recording{.trace = std::move(*trace), .strategy = std::move(*strategy)};
  recording.policy = recording.strategy.policy;
  if (Status read = ReadLog(path + ".log", recording); !read) return std::unexpected(read.error());
  constexpr std::string_view kRanks = "ranks ";
  for (const std::string& line : recording.header) {
    if (!line.starts_with(kRanks)) continue;
    const char* end = line.data() + line.size();
    std::from_chars(line.data() + kRanks.size(), end, recording.cluster.ranks);
  }
  recording.cluster.ranks_per_node = recording.cluster.ranks;
  for (const LogEvent& event : recording.events) {
    const std::string step = event.At("step");
    std::int32_t number = 0;
    std::from_chars(step.data(), step.data() + step.size(), number);
    recording.steps = std::max(recording.steps, number + 1);
  }
  return recording;
}

}  // namespace

Result<Recording> ReadRecording(const std::string& path) {
  const std::string name = std::filesystem::path(path).filename().string();
  if (std::filesystem::exists(path + ".trace.json")) {
    Result<Recording> live = ReadLive(path);
    if (live) live->name = name;
    return live;
  }
  Result<std::string> json = ReadFile(path + ".json");
  if (!json) return std::unexpected(json.error());
  const bool fsdp2 = json->find("\"fsdp2-case-1\"") != std::string::npos;
  Result<Recording> recording = fsdp2 ? ConvertFsdp2(*json) : ConvertFsdp1(*json);
  if (!recording) {
    recording.error().file = path + ".json";
    return recording;
  }
  recording->name = name;
  if (Status read = ReadLog(path + ".log", *recording); !read) return std::unexpected(read.error());
  return recording;
}

}  // namespace shardplan::conformance

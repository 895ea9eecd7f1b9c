#include "recording.h"

#include <filesystem>
#include <sstream>

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

}  // namespace

Result<Recording> ReadRecording(const std::string& path) {
  Result<std::string> json = ReadFile(path + ".json");
  if (!json) return std::unexpected(json.error());
  Result<std::string> log = ReadFile(path + ".log");
  if (!log) return std::unexpected(log.error());
  const bool fsdp2 = json->find("\"fsdp2-case-1\"") != std::string::npos;
  Result<Recording> recording = fsdp2 ? ConvertFsdp2(*json) : ConvertFsdp1(*json);
  if (!recording) {
    recording.error().file = path + ".json";
    return recording;
  }
  recording->name = std::filesystem::path(path).filename().string();
  std::istringstream lines(*log);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# ")) {
      recording->header.push_back(line.substr(2));
    } else if (!line.empty()) {
      recording->events.push_back(ParseLine(line));
    }
  }
  return recording;
}

}  // namespace shardplan::conformance

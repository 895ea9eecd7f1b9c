// SPDX-License-Identifier: Apache-2.0
// Recordings of real PyTorch (tests/conformance): a case as planner input, and the events it issued.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::conformance {

// One line of a log: "step=0 phase=forward op=all_gather unit=(root) bytes=13568".
struct LogEvent {
  std::map<std::string, std::string> keys;
  std::string At(const std::string& key) const {
    const auto found = keys.find(key);
    return found == keys.end() ? std::string() : found->second;
  }
};

struct Recording {
  std::string name;
  std::string policy;
  Trace trace;
  Strategy strategy;
  Cluster cluster;
  std::int32_t steps = 0;
  std::vector<LogEvent> events;
  std::vector<std::string> header;  // comment lines of the log, without "# "
};

// Reads `<path_without_suffix>.json` and `.log`. kBadInput when they are not a recording.
Result<Recording> ReadRecording(const std::string& path_without_suffix);

// The texts of these files; their errors have no file.
Result<Recording> ConvertCase(const std::string& json_text);
// Into `recording`, whose documents are there. Counts the steps where the case does not say them.
Status ParseLog(const std::string& log, Recording& recording);
// Parses a log of `shardplan conformance --live`, which says the policy's ranks, too.
Status ParseLiveLog(const std::string& log, Recording& recording);

// By format; used by ConvertCase.
Result<Recording> ConvertFsdp2(const std::string& json_text);
Result<Recording> ConvertFsdp1(const std::string& json_text);

}  // namespace shardplan::conformance

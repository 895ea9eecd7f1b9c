// shardplan-conformance DIR: plans every recording in DIR and compares the plan's events with what PyTorch
// did.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "events.h"

int main(int argc, char** argv) {
  using namespace shardplan;
  if (argc < 2) {
    fmt::print(stderr, "usage: shardplan-conformance DIR [CASE...]\n");
    return 2;
  }
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    if (entry.path().extension() == ".log") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  const std::vector<std::string> wanted(argv + 2, argv + argc);
  std::size_t matched = 0, cases = 0;
  for (const std::string& name : names) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end()) continue;
    ++cases;
    Result<conformance::Recording> recording = conformance::ReadRecording(std::string(argv[1]) + "/" + name);
    if (!recording) {
      fmt::print("{}: {}\n", name, ToString(recording.error()));
      continue;
    }
    const conformance::Comparison comparison = conformance::Compare(*recording);
    if (comparison.matches) {
      ++matched;
      fmt::print("{}: matches ({} events)\n", name, recording->events.size());
      if (!comparison.objection.empty()) fmt::print("    but {}\n", comparison.objection);
    } else {
      fmt::print("{}: differs at {}", name, comparison.difference);
      if (!comparison.difference.ends_with("\n")) fmt::print("\n");
    }
  }
  fmt::print("matched {} of {} cases\n", matched, cases);
  return matched == cases ? 0 : 1;
}

// Runs the fuzz targets without libFuzzer: good documents, changed at random, as many as asked for.
//   fuzz_documents TARGET SEED ITERATIONS     TARGET: trace, cluster, strategy, plan, report, plan_text,
//                                             simulate, replay, allocator_log
//   fuzz_documents TARGET FILE                one file, as a failure left it
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "tests/fuzz/fuzz_targets.h"
#include "tests/support/random_documents.h"
#include "tests/support/small_plans.h"

namespace shardplan::test {
namespace {

constexpr char kAllocatorLog[] = R"({
"about": "small", "allocator_settings": {"expandable_segments": false, "max_split_size": -1},
"columns": {"initial_segments": ["address", "bytes", "stream", "pool", ["blocks"]], "events": ["action", "address", "bytes"]},
"initial_segments": [
[0, 20971520, 0, "large", [[0, 3000000, 3000320]]],
[20971520, 2097152, 0, "small", []]],
"events": [
["alloc", 3000320, 2000000],
["free", 0, 3000000],
["snapshot", 0, 0],
["segment_alloc", 41943040, 31457280],
["alloc", 41943040, 31457280],
["segment_free", 20971520, 2097152]],
"final_reserved_bytes": 52428800})";

constexpr char kExpandableLog[] = R"({
"about": "small", "device_total_bytes": 1073741824,
"allocator_settings": {"PYTORCH_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.6,max_split_size_mb:64"},
"columns": {"initial_segments": ["address", "bytes", "stream", "pool", ["blocks"], "is_expandable"],
            "events": ["action", "address", "bytes", "stream"]},
"initial_segments": [],
"events": [
["segment_map", 1099511627776, 20971520, 0],
["alloc", 1099511627776, 6782349, 0],
["segment_map", 1100727975936, 2097152, 1],
["alloc", 1100727975936, 259516, 1],
["free_requested", 1099511627776, 6782349, 0],
["free_completed", 1099511627776, 6782349, 0],
["oom", 0, 6782349000, 0],
["segment_unmap", 1099511627776, 20971520, 0]]})";

std::vector<std::string> Seeds(std::string_view target) {
  std::vector<std::string> seeds;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    if (target == "trace") seeds.push_back(ToJson(RandomTrace(seed)));
    if (target == "cluster") seeds.push_back(ToJson(RandomCluster(seed)));
    if (target == "strategy") seeds.push_back(ToJson(RandomStrategy(seed)));
    if (target == "report") seeds.push_back(ToJson(RandomReport(seed)));
    if (target == "plan") seeds.push_back(ToJson(RandomPlan(seed)));
    if (target == "plan_text") seeds.push_back(PlanText(RandomPlan(seed)));
  }
  const std::vector<Plan> plans = {
      Fsdp2LikePlan({.units = 2}), Fsdp2LikePlan({.replicas = 2, .mixed_precision = true}),
      Fsdp1LikePlan({.units = 2}), Fsdp1LikePlan({.mixed_precision = true, .offload = true})};
  for (const Plan& plan : plans) {
    if (target == "plan" || target == "simulate" || target == "replay") seeds.push_back(ToJson(plan));
    if (target == "plan_text") seeds.push_back(PlanText(plan));
  }
  if (target == "allocator_log") seeds = {kAllocatorLog, kExpandableLog};
  return seeds;
}

class Mutator {
 public:
  // `keeps_form`: numbers and lines only, for what begins behind the reader.
  Mutator(std::uint64_t seed, bool keeps_form) : engine_(seed), keeps_form_(keeps_form) {}

  std::size_t Below(std::size_t limit) { return limit == 0 ? 0 : engine_() % limit; }

  // One to four changes.
  std::string Mutate(const std::vector<std::string>& seeds) {
    std::string text = seeds[Below(seeds.size())];
    for (std::size_t changes = 1 + Below(4); changes > 0; --changes) Change(text, seeds);
    return text;
  }

 private:
  void Change(std::string& text, const std::vector<std::string>& seeds) {
    const std::size_t at = Below(text.size());
    const std::size_t length = std::min(1 + Below(1 + Below(64)), text.size() - at);
    switch (keeps_form_ ? 5 + Below(2) : Below(8)) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(Below(256));
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(at, text.substr(at, length));
        break;
      case 3:
        text.resize(at);
        break;
      case 4: {  // a piece of another document
        const std::string& other = seeds[Below(seeds.size())];
        const std::size_t from = Below(other.size());
        text.replace(at, length, other.substr(from, 1 + Below(64)));
        break;
      }
      case 5:
        ReplaceNumber(text, at);
        break;
      case 6:
        ReplaceLine(text, at);
        break;
      default:
        text.insert(at, kTokens[Below(kTokens.size())]);
    }
  }
  // Another number instead of the next one after `at`: the document stays well-formed.
  void ReplaceNumber(std::string& text, std::size_t at) {
    const std::size_t start = text.find_first_of("0123456789", at);
    if (start == std::string::npos) return;
    const std::size_t end = std::min(text.find_first_not_of("0123456789", start), text.size());
    text.replace(start, end - start, kNumbers[Below(kNumbers.size())]);
  }
  // The line at `at` is dropped, or moved to another place.
  void ReplaceLine(std::string& text, std::size_t at) {
    const std::size_t start = text.rfind('\n', at);
    const std::size_t end = text.find('\n', at);
    if (start == std::string::npos || end == std::string::npos || end <= start) return;
    const std::string line = text.substr(start, end - start);
    text.erase(start, end - start);
    const std::size_t to = text.find('\n', Below(text.size()));
    if (to != std::string::npos && Below(2) == 0) text.insert(to, line);
  }

  static constexpr std::array<const char*, 14> kTokens = {"{",    "}",    "[", "]",   ",", ":",    "\"",
                                                          "null", "true", "-", "\\u", "#", "\xff", "->"};
  static constexpr std::array<const char*, 10> kNumbers = {
      "0", "1", "2", "3", "7", "9007199254740992", "2147483647", "9223372036854775807", "-1", "1e999"};
  std::mt19937_64 engine_;
  const bool keeps_form_;
};

int Run(const FuzzTarget& target, std::uint64_t seed, long iterations) {
  const std::vector<std::string> seeds = Seeds(target.name);
  Mutator mutator(seed, target.name == "simulate" || target.name == "replay");
  const std::string file = "fuzz_" + std::string(target.name) + ".failed";
  for (const std::string& text : seeds) target.run(text);
  for (long i = 0; i < iterations; ++i) {
    const std::string text = mutator.Mutate(seeds);
    // Kept while it is tried: after a crash the file has the input.
    if (std::FILE* out = std::fopen(file.c_str(), "wb")) {
      std::fwrite(text.data(), 1, text.size(), out);
      std::fclose(out);
    }
    target.run(text);
  }
  std::remove(file.c_str());
  std::printf("%s: %ld inputs of seed %llu\n", target.name.data(), iterations,
              static_cast<unsigned long long>(seed));
  return 0;
}

}  // namespace
}  // namespace shardplan::test

int main(int argc, char** argv) {
  using namespace shardplan;
  for (const test::FuzzTarget& target : test::kFuzzTargets) {
    if (argc < 3 || target.name != argv[1]) continue;
    if (argc == 4)
      return test::Run(target, std::strtoull(argv[2], nullptr, 10), std::strtol(argv[3], nullptr, 10));
    const Result<std::string> bytes = ReadFile(argv[2]);
    if (!bytes.has_value()) break;
    target.run(*bytes);
    return 0;
  }
  std::fprintf(
      stderr,
      "usage: fuzz_documents trace|cluster|strategy|plan|report|plan_text (SEED ITERATIONS | FILE)\n");
  return 2;
}

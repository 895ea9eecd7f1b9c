// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/fuzz_seeds.h"

#include <algorithm>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <utility>

#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "tests/executor/virtual/plan_cases.h"
#include "tests/fuzz/mutator.h"
#include "tests/schemas/checkpoints/naive_reshard.h"
#include "tests/support/random_documents.h"
#include "tests/support/small_plans.h"

namespace shardplan::test {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kLargestSeed = 60'000;  // bytes: larger ones only cost time

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

std::string Bytes(const fs::path& path) {
  Result<std::string> bytes = ReadFile(path.string());
  if (!bytes) throw std::runtime_error(ToString(bytes.error()));
  return *std::move(bytes);
}

void Add(std::vector<std::string> parts, std::vector<std::string>& seeds) {
  std::string text;
  for (const std::string& part : parts) {
    if (!text.empty()) text += kPartEnd;
    text += part;
  }
  if (text.size() <= kLargestSeed) seeds.push_back(std::move(text));
}

std::pair<StateLayout, StateLayout> RandomLayoutPair(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const RandomTensors tensors = MakeTensors(random);
  StateLayout source = MakeLayout(tensors, random);
  return {std::move(source), MakeLayout(tensors, random)};
}

void AddDocuments(std::string_view target, std::vector<std::string>& seeds) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    if (target == "trace") seeds.push_back(ToJson(RandomTrace(seed)));
    if (target == "cluster") seeds.push_back(ToJson(RandomCluster(seed)));
    if (target == "strategy") seeds.push_back(ToJson(RandomStrategy(seed)));
    if (target == "report") seeds.push_back(ToJson(RandomReport(seed)));
    if (target == "rehearsal") seeds.push_back(ToJson(RandomRecording(seed)));
    if (target == "state_layout") seeds.push_back(ToJson(RandomLayoutPair(seed).first));
    if (target == "reshard") {
      const auto [source, target_layout] = RandomLayoutPair(seed);
      const Result<ReshardPlan> plan = PlanReshard(source, target_layout);
      if (plan) seeds.push_back(ToJson(*plan));
    }
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
}

// Trace, strategy and cluster: every knob, on clusters with and without rates.
void AddPipelines(std::vector<std::string>& seeds) {
  std::vector<PlanCase> cases = KnobCases();
  for (const std::string& name : GoldenNames()) cases.push_back(GoldenCase(name));
  for (std::uint32_t seed = 0; seed < 40; ++seed) cases.push_back(RandomCase(seed));
  Result<Cluster> measured = ReadCluster(SHARDPLAN_SOURCE_DIR "/tools/clusters/h100_sxm_8.json");
  if (!measured) throw std::runtime_error(ToString(measured.error()));
  for (std::size_t c = 0; c < cases.size(); ++c) {
    measured->ranks = cases[c].cluster.ranks;
    Add({ToJson(cases[c].trace), ToJson(cases[c].strategy),
         ToJson(c % 3 == 0 ? *measured : cases[c].cluster)},
        seeds);
  }
}

void AddRecordings(std::vector<std::string>& seeds) {
  for (const char* folder : {"fsdp1", "fsdp2", "live", "own"}) {
    for (const auto& entry :
         fs::directory_iterator(fs::path(SHARDPLAN_SOURCE_DIR "/tests/conformance") / folder)) {
      if (entry.path().extension() != ".log") continue;
      const std::string stem = (entry.path().parent_path() / entry.path().stem()).string();
      if (fs::exists(stem + ".trace.json")) {
        Add({Bytes(stem + ".trace.json"), Bytes(stem + ".strategy.json"), Bytes(entry.path())}, seeds);
      } else {
        Add({Bytes(stem + ".json"), Bytes(entry.path())}, seeds);
      }
    }
  }
}

void AddCorpus(std::string_view target, std::vector<std::string>& seeds) {
  std::error_code none;
  for (const auto& entry :
       fs::directory_iterator(fs::path(SHARDPLAN_SOURCE_DIR "/tests/fuzz/corpus") / target, none)) {
    seeds.push_back(Bytes(entry.path()));
  }
}

}  // namespace

std::vector<std::string> FuzzSeeds(std::string_view target) {
  std::vector<std::string> seeds;
  if (target == "allocator_log") seeds = {kAllocatorLog, kExpandableLog};
  if (target == "pipeline") AddPipelines(seeds);
  if (target == "recording") AddRecordings(seeds);
  AddDocuments(target, seeds);
  AddCorpus(target, seeds);
  std::ranges::sort(seeds);  // folders have no order
  return seeds;
}

}  // namespace shardplan::test

// SPDX-License-Identifier: Apache-2.0
// The timeline, the table and the page.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "shardplan/simulator/simulate.h"
#include "tests/simulator/layered_plan.h"
#include "tests/simulator/random_plan.h"

namespace shardplan::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

Simulation MustSimulate(const Plan& plan) {
  Result<Simulation> simulation = Simulate(plan);
  EXPECT_TRUE(simulation.has_value()) << ToString(simulation.error());
  return simulation ? std::move(*simulation) : Simulation{};
}

// A nanosecond count from "12.345" microseconds.
std::int64_t Nanos(const json& microseconds) {
  return static_cast<std::int64_t>(microseconds.get<double>() * 1000 + 0.5);
}

TEST(TimelineJson, HasATrackForTheHostAndEachStream) {
  const Plan plan = LayeredPlan({});
  const json timeline = json::parse(TimelineJson(plan, MustSimulate(plan)));
  std::map<int, std::string> threads;
  for (const json& event : timeline["traceEvents"]) {
    if (event["name"] == "thread_name") threads[event["tid"]] = event["args"]["name"];
  }
  const std::map<int, std::string> expected = {{1, "host"},
                                               {2, "stream compute"},
                                               {3, "stream all_gather"},
                                               {4, "stream reduce_scatter"},
                                               {5, "stream all_reduce"}};
  EXPECT_EQ(threads, expected);
}

TEST(TimelineJson, NamesWhatRunsAndWhen) {
  const Plan plan = LayeredPlan({});
  const json timeline = json::parse(TimelineJson(plan, MustSimulate(plan)));
  std::map<std::string, std::vector<std::pair<std::int64_t, std::int64_t>>> spans;
  for (const json& event : timeline["traceEvents"]) {
    if (event["ph"] != "X") continue;
    spans[event["name"]].emplace_back(Nanos(event["ts"]), Nanos(event["dur"]));
  }
  using Times = std::vector<std::pair<std::int64_t, std::int64_t>>;
  EXPECT_EQ(spans["forward layers.1"], (Times{{35 * kMillisecond, 25 * kMillisecond}}));
  EXPECT_EQ(spans["all_gather layers.0"].front(), std::make_pair(std::int64_t{0}, 10 * kMillisecond));
  EXPECT_EQ(spans["reduce_scatter layers.0"], (Times{{235 * kMillisecond, 10 * kMillisecond}}));
}

TEST(TimelineJson, EveryFlowHasBothEndsInsideSpans) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = RandomPlan(seed);
    const Simulation simulation = MustSimulate(plan);
    const json timeline = json::parse(TimelineJson(plan, simulation));
    std::map<int, json> starts, ends;
    std::map<int, std::vector<std::pair<std::int64_t, std::int64_t>>> spans;
    for (const json& event : timeline["traceEvents"]) {
      if (event["ph"] == "s") starts[event["id"]] = event;
      if (event["ph"] == "f") ends[event["id"]] = event;
      if (event["ph"] == "X") {
        spans[event["tid"]].emplace_back(Nanos(event["ts"]), Nanos(event["ts"]) + Nanos(event["dur"]));
      }
    }
    EXPECT_EQ(starts.size(), simulation.flows.size());
    EXPECT_EQ(ends.size(), starts.size());
    const auto covered = [&](const json& end) {
      const std::int64_t at = Nanos(end["ts"]);
      for (const auto& [from, to] : spans[end["tid"]]) {
        if (from <= at && at <= to) return true;
      }
      return false;
    };
    for (const auto& [id, start] : starts) {
      ASSERT_TRUE(ends.contains(id));
      EXPECT_LE(Nanos(start["ts"]), Nanos(ends[id]["ts"]));
      EXPECT_TRUE(covered(start)) << start;
      EXPECT_TRUE(covered(ends[id])) << ends[id];
    }
  }
}

TEST(TimelineJson, CountsMemoryByCategory) {
  const Plan plan = LayeredPlan({});
  const Simulation simulation = MustSimulate(plan);
  const json timeline = json::parse(TimelineJson(plan, simulation));
  std::int64_t peak = 0;
  std::int64_t before = -1;
  for (const json& event : timeline["traceEvents"]) {
    if (event["ph"] != "C") continue;
    std::int64_t sum = 0;
    for (const auto& [category, bytes] : event["args"].items()) sum += bytes.get<std::int64_t>();
    peak = std::max(peak, sum);
    EXPECT_GE(Nanos(event["ts"]), before);
    before = Nanos(event["ts"]);
  }
  EXPECT_EQ(peak, simulation.report.memory.peak_bytes.value);
}

TEST(Report, CategoriesSumToThePeak) {
  Plan plan = LayeredPlan({});
  plan.cluster.device.context_bytes = Bytes{1'000};
  plan.cluster.device.memory_bytes = Bytes{1'000'000'000};
  const MemoryReport memory = MustSimulate(plan).report.memory;
  std::int64_t sum = 0;
  std::set<std::string> names;
  for (const CategoryBytes& entry : memory.peak_by_category) {
    names.insert(entry.category);
    if (entry.category != "cuda_context" && entry.category != "nccl_buffers") sum += entry.size_bytes.value;
  }
  EXPECT_EQ(sum, memory.peak_bytes.value);
  EXPECT_TRUE(names.contains("cuda_context"));
  EXPECT_TRUE(names.contains("nccl_buffers"));
  EXPECT_TRUE(memory.fits);
  EXPECT_TRUE(memory.peak_at.starts_with("steady ")) << memory.peak_at;
  plan.cluster.device.memory_bytes = memory.peak_bytes + Bytes{1'000};
  EXPECT_FALSE(MustSimulate(plan).report.memory.fits);  // NCCL's buffers are one too many
}

TEST(ComparisonTable, AlignsItsColumns) {
  Plan plan = LayeredPlan({});
  const Report a = MustSimulate(plan).report;
  plan.policy = "another_policy";
  const Report b = MustSimulate(plan).report;
  const std::string table = ComparisonTable({a, b});
  EXPECT_THAT(table, HasSubstr("small on constant, 2 ranks\n"));
  EXPECT_THAT(table, HasSubstr("245.00 ms"));
  std::set<std::size_t> widths;
  std::size_t from = table.find("step  ");
  from = table.rfind('\n', from) + 1;
  while (from < table.size()) {
    const std::size_t end = table.find('\n', from);
    const std::string line = table.substr(from, end - from);
    if (line.starts_with("  ")) widths.insert(line.size());
    from = end + 1;
  }
  EXPECT_EQ(widths.size(), 1U) << table;
  EXPECT_EQ(ComparisonTable({}), "");
}

// The JSON between the data script's tags.
json PageData(const std::string& page) {
  const std::string open = "id=\"data\">";
  const std::size_t begin = page.find(open) + open.size();
  return json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

TEST(ReportHtml, HoldsEveryPlanAndNothingFromOutside) {
  Plan first = LayeredPlan({});
  Plan second = LayeredPlan({.backward_prefetch = false});
  first.units[0].fqn = "</script><b>";  // must not end the script
  const Simulation a = MustSimulate(first);
  const Simulation b = MustSimulate(second);
  const std::string page = ReportHtml({&first, &second}, {&a, &b});
  for (const char* outside : {"http://", "https://", "src=", "@import", "url("}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
  const json data = PageData(page);
  ASSERT_EQ(data["plans"].size(), 2U);
  EXPECT_EQ(data["plans"][0]["title"], "fsdp2");
  EXPECT_EQ(data["plans"][1]["title"], "fsdp2 (2)");
  EXPECT_EQ(data["plans"][0]["spans"].size(), 6 * a.spans.size());
  EXPECT_EQ(data["plans"][0]["report"]["step"], a.report.step_ns.value);
  EXPECT_EQ(data["plans"][0]["report"]["units"].size(), first.units.size());
  EXPECT_EQ(data["plans"][0]["report"]["units"][0][0], "</script><b>");
  for (const json& row : data["comparison"]["rows"]) {
    EXPECT_EQ(row["cells"].size(), row["heading"].get<bool>() ? 0U : 2U);
  }
}

TEST(ReportHtml, ShowsTheMemoryPeak) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = RandomPlan(seed);
    const Simulation simulation = MustSimulate(plan);
    const json data = PageData(ReportHtml({&plan}, {&simulation}));
    std::int64_t peak = 0;
    for (const json& point : data["plans"][0]["memory"]) {
      std::int64_t sum = 0;
      for (std::size_t c = 1; c < point.size(); ++c) sum += point[c].get<std::int64_t>();
      peak = std::max(peak, sum);
    }
    EXPECT_EQ(peak, simulation.report.memory.peak_bytes.value);
  }
}

}  // namespace
}  // namespace shardplan::test

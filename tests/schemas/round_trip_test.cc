// SPDX-License-Identifier: Apache-2.0
// A written document is read back as the same value and written again as the same bytes.
#include <gtest/gtest.h>

#include <string>

#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "tests/support/random_documents.h"

namespace shardplan {
namespace {

constexpr std::uint64_t kSeeds = 200;

template <typename T>
void ExpectRoundTrip(const T& value, Result<T> (*parse)(std::string_view), std::uint64_t seed) {
  const std::string text = ToJson(value);
  const Result<T> read = parse(text);
  ASSERT_TRUE(read.has_value()) << "seed " << seed << ": " << ToString(read.error()) << "\n" << text;
  ASSERT_TRUE(*read == value) << "seed " << seed << "\n" << text;
  ASSERT_EQ(ToJson(*read), text) << "seed " << seed;
  const Result<Document> document = ParseDocument(text);
  ASSERT_TRUE(document.has_value()) << "seed " << seed;
  ASSERT_TRUE(std::holds_alternative<T>(*document)) << "seed " << seed;
  ASSERT_TRUE(std::get<T>(*document) == value) << "seed " << seed;
}

TEST(RoundTrip, Trace) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed)
    ExpectRoundTrip(test::RandomTrace(seed), ParseTrace, seed);
}
TEST(RoundTrip, Cluster) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed)
    ExpectRoundTrip(test::RandomCluster(seed), ParseCluster, seed);
}
TEST(RoundTrip, Strategy) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed)
    ExpectRoundTrip(test::RandomStrategy(seed), ParseStrategy, seed);
}
TEST(RoundTrip, Plan) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed)
    ExpectRoundTrip(test::RandomPlan(seed), ParsePlan, seed);
}
TEST(RoundTrip, Report) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed)
    ExpectRoundTrip(test::RandomReport(seed), ParseReport, seed);
}
TEST(RoundTrip, Recording) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed)
    ExpectRoundTrip(test::RandomRecording(seed), ParseRecording, seed);
}
TEST(RoundTrip, StateLayout) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed)
    ExpectRoundTrip(test::RandomStateLayout(seed), ParseStateLayout, seed);
}
TEST(RoundTrip, Reshard) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed)
    ExpectRoundTrip(test::RandomReshard(seed), ParseReshard, seed);
}

// A random document that never had a field set would prove nothing about it.
TEST(RoundTrip, RandomDocumentsUseEveryField) {
  std::string all;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    all +=
        ToJson(test::RandomTrace(seed)) + ToJson(test::RandomPlan(seed)) + ToJson(test::RandomReport(seed));
  }
  for (const char* field : {"same_module_as",
                            "\"compiled\"",
                            "requires_grad",
                            "grad_enabled",
                            "forwards",
                            "persistent",
                            "\"recompute_exit\"",
                            "\"param_grad\"",
                            "gradient_divide_factor",
                            "backward_prefetch_lists",
                            "early_stop",
                            "momentum",
                            "microbatches",
                            "ignored_parameters",
                            "post_forward_communicator",
                            "flat_numel",
                            "safe_after",
                            "\"parts\"",
                            "divisor",
                            "reduce_op",
                            "occurrence",
                            "model_buffers",
                            "steady_step",
                            "host_link_bytes_per_second",
                            "concurrent_groups",
                            "efficiency_ppm",
                            "priority",
                            "cost_source",
                            "notes",
                            "plan_digest"}) {
    EXPECT_NE(all.find(field), std::string::npos) << field;
  }
}

// The text between "```LANGUAGE\n" and "```" after `from`.
std::string Example(const std::string& page, const std::string& language, std::size_t from = 0) {
  const std::string fence = "```" + language + "\n";
  const std::size_t start = page.find(fence, from) + fence.size();
  return page.substr(start, page.find("```", start) - start);
}

TEST(RoundTrip, ExamplesOfTheFormatPagesAreCanonical) {
  for (const std::string kind :
       {"trace", "cluster", "strategy", "plan", "report", "state_layout", "reshard", "recording"}) {
    const Result<std::string> page = ReadFile(SHARDPLAN_SOURCE_DIR "/docs/reference/" + kind + "-format.md");
    ASSERT_TRUE(page.has_value());
    const std::string example = Example(*page, "json");
    const Result<Document> document = ParseDocument(example);
    ASSERT_TRUE(document.has_value()) << kind << ": " << ToString(document.error());
    EXPECT_EQ(std::visit([](const auto& value) { return ToJson(value); }, *document), example) << kind;
  }
}

TEST(RoundTrip, TextExampleOfThePlanPageIsTheJsonExample) {
  const Result<std::string> page = ReadFile(SHARDPLAN_SOURCE_DIR "/docs/reference/plan-format.md");
  ASSERT_TRUE(page.has_value());
  const Result<Plan> plan = ParsePlan(Example(*page, "json"));
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(PlanText(*plan), Example(*page, "", page->find("## Text form")));
}

TEST(RoundTrip, HandWrittenLayoutDoesNotMatter) {
  const Result<Cluster> cluster = ParseCluster(
      R"({"device":{"memory_bytes":8e10,"name":"d"},"ranks":2.0,"name":"c","schema":"shardplan.cluster/1",
          "extensions":{"note":[1,{"x":null}]}})");
  ASSERT_TRUE(cluster.has_value()) << ToString(cluster.error());
  EXPECT_EQ(cluster->device.memory_bytes, Bytes{80'000'000'000});
  EXPECT_EQ(cluster->ranks, 2);
  EXPECT_EQ(cluster->ranks_per_node, 8);
}

TEST(RoundTrip, ExtensionsOfNestedObjectsAreUnknownFields) {
  const Result<Cluster> cluster = ParseCluster(
      R"({"schema":"shardplan.cluster/1","name":"c","ranks":2,"device":{"name":"d","memory_bytes":1,"extensions":{}}})");
  ASSERT_FALSE(cluster.has_value());
  EXPECT_EQ(cluster.error().pointer, "/device/extensions");
}

}  // namespace
}  // namespace shardplan

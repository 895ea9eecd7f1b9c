// SPDX-License-Identifier: Apache-2.0
// Whatever is wrong with a document, the reader says where, what it found and what it expected; it never
// crashes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "shardplan/schemas/io.h"
#include "tests/support/random_documents.h"

namespace shardplan {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

constexpr std::uint64_t kSeedsOfBroken = 3;

std::vector<std::string> RandomTexts(std::uint64_t seed) {
  return {ToJson(test::RandomTrace(seed)),    ToJson(test::RandomCluster(seed)),
          ToJson(test::RandomStrategy(seed)), ToJson(test::RandomPlan(seed)),
          ToJson(test::RandomReport(seed)),   ToJson(test::RandomStateLayout(seed)),
          ToJson(test::RandomReshard(seed)),  ToJson(test::RandomRecording(seed))};
}

// Calls visit(pointer) for every value below `json`.
template <typename Visit>
void ForEachPlace(const Json& json, const Json::json_pointer& pointer, const Visit& visit) {
  if (json.is_object()) {
    for (const auto& [key, value] : json.items()) {
      visit(pointer / key);
      ForEachPlace(value, pointer / key, visit);
    }
  } else if (json.is_array()) {
    for (std::size_t i = 0; i < json.size(); ++i) {
      visit(pointer / i);
      ForEachPlace(json[i], pointer / i, visit);
    }
  }
}

template <typename Check>
void ForEachPlaceOfRandomDocuments(const Check& check) {
  for (std::uint64_t seed = 0; seed < kSeedsOfBroken; ++seed) {
    for (const std::string& text : RandomTexts(seed)) {
      const Json json = Json::parse(text);
      ForEachPlace(json, Json::json_pointer(), [&](const Json::json_pointer& place) {
        // Whatever stands there is for a library to judge.
        if (place.to_string().find("/policy_knobs/") != std::string::npos) return;
        SCOPED_TRACE("seed " + std::to_string(seed) + " " + json["schema"].get<std::string>() +
                     place.to_string());
        check(json, place);
      });
    }
  }
}

// A name that is gone may be missed where it is referred to before it is missed where it was.
bool IsReferenceError(const Error& error) { return error.message.find("of that name") != std::string::npos; }

TEST(ReaderErrors, WrongTypeAtEveryPlace) {
  ForEachPlaceOfRandomDocuments([](const Json& json, const Json::json_pointer& place) {
    Json broken = json;
    if (json[place].is_boolean() || place.back() == "reshard_after_forward") {
      broken[place] = "yes";
    } else {
      broken[place] = true;
    }
    const Result<Document> document = ParseDocument(broken.dump());
    ASSERT_FALSE(document.has_value());
    EXPECT_EQ(document.error().code, ErrorCode::kBadInput);
    if (IsReferenceError(document.error())) return;
    EXPECT_EQ(document.error().pointer, place.to_string()) << ToString(document.error());
    EXPECT_FALSE(document.error().found.empty());
    EXPECT_FALSE(document.error().expected.empty());
  });
}

TEST(ReaderErrors, EveryFieldRenamed) {
  ForEachPlaceOfRandomDocuments([](const Json& json, const Json::json_pointer& place) {
    const Json::json_pointer parent = place.parent_pointer();
    if (!json[parent].is_object()) return;
    Json broken = json;
    const std::string renamed = place.back() + "x";
    broken[parent][renamed] = json[place];
    broken[parent].erase(place.back());
    const Result<Document> document = ParseDocument(broken.dump());
    ASSERT_FALSE(document.has_value());
    if (IsReferenceError(document.error())) return;
    const std::string pointer = document.error().pointer;
    // A variant's tag or the schema field is missed before the new name is noticed; a list that others refer
    // to is missed by them.
    EXPECT_TRUE(pointer == (parent / renamed).to_string() || pointer == parent.to_string() ||
                document.error().expected.find("none") == 0)
        << ToString(document.error());
    EXPECT_THAT(document.error().message,
                AnyOf(HasSubstr(renamed), HasSubstr("is missing"), HasSubstr("not a ")));
  });
}

TEST(ReaderErrors, EveryFieldRemoved) {
  int missing = 0;
  ForEachPlaceOfRandomDocuments([&](const Json& json, const Json::json_pointer& place) {
    const Json::json_pointer parent = place.parent_pointer();
    Json broken = json;
    if (json[parent].is_object()) {
      broken[parent].erase(place.back());
    } else {
      broken[parent].erase(static_cast<std::size_t>(std::stoul(place.back())));
    }
    const Result<Document> document = ParseDocument(broken.dump());
    if (document.has_value() || document.error().message.find("is missing") == std::string::npos) return;
    ++missing;
    EXPECT_EQ(document.error().pointer, parent.to_string());
    EXPECT_THAT(document.error().message, HasSubstr("\"" + place.back() + "\""));
  });
  EXPECT_GT(missing, 200);
}

TEST(ReaderErrors, NumbersOutOfRangeAtEveryPlace) {
  ForEachPlaceOfRandomDocuments([](const Json& json, const Json::json_pointer& place) {
    const std::string& name = place.back();
    const bool is_real =
        name.ends_with("divisor") || name == "divide" || name == "number" || name.ends_with("_factor");
    // "dim" of a shard rule may be negative, as "priority".
    if (!json[place].is_number_integer() || name == "priority" || name == "dim" || is_real) return;
    for (const char* number : {"-9223372036854775808", "99999999999999999999", "1e300", "0.5"}) {
      Json broken = json;
      broken[place] = "@";
      std::string text = broken.dump();
      text.replace(text.find("\"@\""), 3, number);
      const Result<Document> document = ParseDocument(text);
      ASSERT_FALSE(document.has_value()) << number;
      EXPECT_EQ(document.error().pointer, place.to_string()) << ToString(document.error());
      EXPECT_FALSE(document.error().found.empty());
      EXPECT_THAT(document.error().expected,
                  AnyOf(HasSubstr("from"), HasSubstr("above 0"), HasSubstr("none")));
    }
  });
}

TEST(ReaderErrors, DuplicateFields) {
  const Result<Cluster> cluster =
      ParseCluster(R"({"schema":"shardplan.cluster/1","name":"a","name":"b","ranks":1,"device":{}})");
  ASSERT_FALSE(cluster.has_value());
  EXPECT_EQ(ToString(cluster.error()),
            "/name: the field \"name\" is there twice (found \"name\", expected one)");
}

TEST(ReaderErrors, ThePointerIsEscaped) {
  const Result<Cluster> cluster = ParseCluster(R"({"schema":"shardplan.cluster/1","a/b~c":1})");
  ASSERT_FALSE(cluster.has_value());
  EXPECT_EQ(cluster.error().pointer, "/a~1b~0c");
}

TEST(ReaderErrors, OtherDocuments) {
  const std::string cluster = ToJson(test::RandomCluster(1));
  const Result<Plan> plan = ParsePlan(cluster);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(
      ToString(plan.error()),
      "/schema: another kind of document (found \"shardplan.cluster/1\", expected \"shardplan.plan/1\")");
  const Result<Cluster> newer = ParseCluster(R"({"schema":"shardplan.cluster/2"})");
  ASSERT_FALSE(newer.has_value());
  EXPECT_THAT(newer.error().message, HasSubstr("version"));
  for (const char* text :
       {"[]", "3", "null", "{}", R"({"schema":7})", R"({"schema":"shardplan.cluste/1"})"}) {
    EXPECT_FALSE(ParseDocument(text).has_value()) << text;
  }
}

TEST(ReaderErrors, TruncatedAtEveryByte) {
  for (const std::string& whole : RandomTexts(3)) {
    const std::string text = whole.substr(0, whole.size() - 1);  // without the newline, which may be missing
    for (std::size_t bytes = 0; bytes<text.size(); bytes += text.size()> 4000 && bytes > 2000 ? 7 : 1) {
      const Result<Document> document = ParseDocument(std::string_view(text).substr(0, bytes));
      ASSERT_FALSE(document.has_value()) << bytes;
      ASSERT_THAT(document.error().message, AnyOf(HasSubstr("truncated"), HasSubstr("empty"))) << bytes;
      ASSERT_THAT(document.error().pointer, HasSubstr("line "));
    }
  }
}

TEST(ReaderErrors, BrokenJsonNamesLineAndColumn) {
  const Result<Cluster> cluster = ParseCluster("{\"schema\": \"shardplan.cluster/1\",\n  \"name\": nil\n}");
  ASSERT_FALSE(cluster.has_value());
  EXPECT_EQ(cluster.error().pointer, "line 2, column 12");
  EXPECT_THAT(cluster.error().message, HasSubstr("not valid JSON"));
  const Result<Cluster> comma = ParseCluster("{\"schema\": \"shardplan.cluster/1\",}");
  ASSERT_FALSE(comma.has_value());
  EXPECT_THAT(comma.error().message, HasSubstr("not valid JSON"));
}

TEST(ReaderErrors, NestingHasALimit) {
  const std::string deep =
      R"({"schema":"shardplan.cluster/1","extensions":{"x":)" + std::string(100'000, '[');
  const Result<Cluster> cluster = ParseCluster(deep);
  ASSERT_FALSE(cluster.has_value());
  EXPECT_THAT(cluster.error().message, HasSubstr("nest deeper"));
}

TEST(ReaderErrors, StoragesMustBeBorn) {
  Trace trace = test::RandomTrace(2);
  trace.forwards.front().events.push_back(FreeEvent{.storage = 12345});
  const Result<Trace> read = ParseTrace(ToJson(trace));
  ASSERT_FALSE(read.has_value());
  EXPECT_EQ(read.error().pointer,
            "/forwards/0/events/" + std::to_string(trace.forwards.front().events.size() - 1) + "/1");
  EXPECT_EQ(read.error().found, "12345");
}

TEST(ReaderErrors, IndicesBeyondTheirLists) {
  Plan plan = test::RandomPlan(2);
  plan.steady_step = static_cast<std::int32_t>(plan.steps.size());
  EXPECT_EQ(ParsePlan(ToJson(plan)).error().pointer, "/steady_step");
  plan.steady_step = 0;
  plan.units[0].parameters = {{.fqn = "p", .shape = {4}, .shard_dim = 1}};
  plan.units[0].layout = LayoutKind::kPerParameter;
  EXPECT_EQ(ParsePlan(ToJson(plan)).error().pointer, "/units/0/parameters/0/shard_dim");
  plan.units[0].parameters[0].shard_dim = 0;
  plan.buffers[0].unit = 0;
  plan.buffers[0].parameters = {0, 1};
  EXPECT_EQ(ParsePlan(ToJson(plan)).error().pointer, "/buffers/0/parameters/1");
}

// A table is interpolated: points that do not ascend would divide by zero, and no logarithm of 0 FLOPs
// exists.
TEST(ReaderErrors, PointsOfTablesAscend) {
  const auto pointers = [](const Cluster& cluster) {
    Plan plan = test::RandomPlan(2);
    plan.cluster = cluster;
    const Result<Cluster> alone = ParseCluster(ToJson(cluster));
    const Result<Plan> inside = ParsePlan(ToJson(plan));
    EXPECT_FALSE(alone.has_value());
    EXPECT_FALSE(inside.has_value());
    if (alone || inside) return std::string();
    EXPECT_EQ("/cluster" + alone.error().pointer, inside.error().pointer);
    EXPECT_FALSE(alone.error().found.empty());
    EXPECT_FALSE(alone.error().expected.empty());
    return alone.error().pointer;
  };
  Cluster cluster{.name = "c", .device = {.name = "d"}};
  cluster.device.matmul = {{DType::kFloat32, 1, {{5, 1}}}, {DType::kBFloat16, 1, {{1, 1}, {2, 1}, {2, 1}}}};
  EXPECT_EQ(pointers(cluster), "/device/matmul/1/efficiency/2/flops");
  cluster.device.matmul[1].efficiency = {{1, 1}, {3, 1}, {2, 1}};
  EXPECT_EQ(pointers(cluster), "/device/matmul/1/efficiency/2/flops");
  cluster.device.matmul[1].efficiency = {{0, 1}, {3, 1}};
  EXPECT_EQ(pointers(cluster), "/device/matmul/1/efficiency/0/flops");
  cluster.device.matmul.clear();
  const CollectiveTable table{.ranks = 2, .link = "l", .points = {{Bytes{0}, {}}, {Bytes{8}, {}}}};
  cluster.collectives = {table, table};
  EXPECT_TRUE(ParseCluster(ToJson(cluster)).has_value());
  cluster.collectives[1].points = {{Bytes{8}, {}}, {Bytes{8}, {}}};
  EXPECT_EQ(pointers(cluster), "/collectives/1/points/1/full_tensor_bytes");
  cluster.collectives[1].points = {{Bytes{8}, {}}, {Bytes{9}, {}}, {Bytes{7}, {}}};
  EXPECT_EQ(pointers(cluster), "/collectives/1/points/2/full_tensor_bytes");
}

}  // namespace
}  // namespace shardplan

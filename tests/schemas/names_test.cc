// SPDX-License-Identifier: Apache-2.0
// Names, sizes, errors and digests.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "schemas/src/names/enum_names.h"
#include "shardplan/schemas/io.h"

namespace shardplan {
namespace {

TEST(Names, OfDtypesAreTorchsAndReadBack) {
  EXPECT_EQ(Name(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(Name(DType::kFloat8E4M3FN), "float8_e4m3fn");
  EXPECT_EQ(Name(DType::kFloat8E8M0FNU), "float8_e8m0fnu");
  for (int i = 0; i <= static_cast<int>(DType::kFloat8E8M0FNU); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(DTypeFromName(Name(dtype)), dtype);
    EXPECT_GT(SizeBytes(dtype), 0);
  }
  EXPECT_EQ(DTypeFromName("float"), std::nullopt);
  EXPECT_EQ(Name(static_cast<DType>(200)), "?");
}

// The last enumerator of each enum has the last name: no table is short or in another order at its end.
TEST(Names, TablesEndWithTheLastEnumerator) {
  EXPECT_EQ(Name(InstructionKind::kZeroGrad), "zero_grad");
  EXPECT_EQ(Name(InstructionKind::kReshardPostForward), "reshard_post_forward");
  EXPECT_EQ(Name(TriggerKind::kStepEnd), "step_end");
  EXPECT_EQ(Name(TriggerKind::kPostBackward), "post_backward");
  EXPECT_EQ(Name(TriggerKind::kLazyInit), "lazy_init");
  EXPECT_EQ(Name(BufferRole::kModelBuffer), "model_buffer");
  EXPECT_EQ(Name(BufferRole::kInnerReduceAccumulated), "inner_reduce_accumulated");
  EXPECT_EQ(Name(SegmentPhase::kOptimizer), "optimizer");
  EXPECT_EQ(Name(StorageRole::kOptimizerTemp), "optimizer_temp");
  EXPECT_EQ(EnumName(Fsdp1Sharding::kHybridShardZero2), "hybrid_shard_zero2");
  EXPECT_EQ(EnumName(MemoryKind::kHost), "host");
  EXPECT_EQ(EnumName(CollectiveKind::kAllReduce), "all_reduce");
  EXPECT_EQ(kEnumNames<InstructionKind>.size(), static_cast<std::size_t>(InstructionKind::kZeroGrad) + 1);
  EXPECT_EQ(kEnumNames<BufferRole>.size(), kBufferRoles);
  EXPECT_EQ(kEnumNames<SegmentPhase>.size(), static_cast<std::size_t>(SegmentPhase::kOptimizer) + 1);
}

TEST(Sizes, ElementsAndBuffers) {
  EXPECT_EQ(SizeBytes(DType::kFloat64), 8);
  EXPECT_EQ(SizeBytes(DType::kBFloat16), 2);
  EXPECT_EQ(SizeBytes(DType::kBool), 1);
  EXPECT_EQ(SizeBytes(DType::kComplex64), 8);
  EXPECT_TRUE(IsFloatingPoint(DType::kFloat8E5M2));
  EXPECT_FALSE(IsFloatingPoint(DType::kInt32));
  EXPECT_FALSE(IsFloatingPoint(DType::kComplex64));
  const Buffer buffer{.parts_bytes = {Bytes{1}, Bytes{512}, Bytes{513}, Bytes{0}}};
  EXPECT_EQ(SizeBytes(buffer), Bytes{1026});
  EXPECT_EQ(RoundedSizeBytes(buffer, Bytes{512}), Bytes{512 + 512 + 1024});
  EXPECT_EQ(RoundedSizeBytes(buffer, Bytes{1}), Bytes{1026});
}

TEST(Errors, TextHasOnlyThePartsThereAre) {
  EXPECT_EQ(ToString(Error{.message = "m"}), "m");
  EXPECT_EQ(ToString(Error{.message = "m", .file = "f", .pointer = "/p", .found = "1", .expected = "2"}),
            "f: /p: m (found 1, expected 2)");
  EXPECT_EQ(ToString(Error{.message = "m", .found = "1"}), "m (found 1)");
  EXPECT_EQ(ToString(Error{.message = "m", .expected = "2"}), "m (expected 2)");
  std::set<int> codes;
  for (const auto code : {ErrorCode::kNegative, ErrorCode::kUsage, ErrorCode::kBadInput,
                          ErrorCode::kEnvironment, ErrorCode::kInternal}) {
    codes.insert(ExitCode(code));
  }
  EXPECT_EQ(codes, (std::set<int>{1, 2, 3, 4, 70}));
}

// Examples of FIPS 180-4, and the lengths around the padding's borders (figures of sha256sum).
TEST(Digest, IsSha256) {
  EXPECT_EQ(Digest(""), "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Digest("abc"), "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "sha256:248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Digest(std::string(55, 'a')),
            "sha256:9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(Digest(std::string(64, 'a')),
            "sha256:ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
  EXPECT_EQ(Digest(std::string(1'000'000, 'a')),
            "sha256:cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

}  // namespace
}  // namespace shardplan

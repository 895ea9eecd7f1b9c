// SPDX-License-Identifier: Apache-2.0
#include "tests/simulator/random_plan.h"

#include <string>
#include <vector>

#include "tests/simulator/layered_plan.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

class RandomBuilder {
 public:
  explicit RandomBuilder(std::uint64_t seed) : random_(seed), b_(2) {
    const int streams = 1 + Below(4);
    for (int s = 1; s <= streams; ++s) b_.Stream("stream" + std::to_string(s));
    communicators_ = 1 + Below(2);
    for (int c = 1; c < communicators_; ++c) b_.Communicator("shard" + std::to_string(c), 2);
    unit_ = b_.Unit("a", 1, 64 + Below(5'000));
    for (int i = 0; i < 6; ++i) {
      const BufferId buffer =
          b_.Buffer(i == 0 ? BufferRole::kParamSharded : BufferRole::kAllGatherOutput, unit_);
      b_.plan().buffers.back().name += std::to_string(i);
      b_.plan().buffers.back().parts_bytes = {Bytes{1 + Below(9'000)}};
      if (i > 0) dead_.push_back(buffer);
    }
    for (int e = 0; e < 4; ++e) b_.Event("event" + std::to_string(e));
    MakeSegments();
  }

  Plan Build() {
    b_.Step("steady");
    const int triggers = 2 + Below(6);
    for (int t = 0; t < triggers; ++t) {
      b_.At(t < triggers / 2 ? TriggerKind::kPreForward : TriggerKind::kPostBackward, unit_);
      const int count = Below(12);
      for (int i = 0; i < count; ++i) AddInstruction();
    }
    Plan& plan = b_.plan();
    plan.cluster = ConstantCluster(2, 1 + Below(9'000), 1);
    plan.cluster.host = {{Below(900)}, {Below(900)}, {Below(900)}, {Below(900)}, {Below(100)}, {Below(900)}};
    plan.cluster.compute_rate_while_communicating_ppm = 1'000'000 - 1'000 * Below(700);
    plan.cluster.communication_rate_while_computing_ppm = 1'000'000 - 1'000 * Below(700);
    return plan;
  }

 private:
  std::int32_t Below(std::int32_t n) {
    return static_cast<std::int32_t>(random_() % static_cast<std::uint64_t>(n));
  }
  StreamId AnyStream() { return Below(static_cast<std::int32_t>(b_.plan().streams.size())); }

  void MakeSegments() {
    for (int s = 0; s < 3; ++s) {
      b_.Segment(s < 2 ? SegmentPhase::kForward : SegmentPhase::kBackward, "segment " + std::to_string(s),
                 {unit_});
      auto& entries = b_.plan().segments.back().entries;
      const int count = Below(8);
      for (int i = 0; i < count; ++i) {
        const StorageId storage = s * 8 + i;
        if (Below(2) == 0) {
          entries.emplace_back(AllocateEvent{.storage = storage, .size_bytes = Bytes{1 + Below(4'000)}});
        }
        entries.emplace_back(FixedOperator(Below(4'000)));
        if (Below(3) == 0) entries.emplace_back(FreeEvent{s * 8 + Below(i + 1)});
      }
    }
  }

  void AddInstruction() {
    switch (Below(8)) {
      case 0:
      case 1:
        b_.Compute(Below(3), AnyStream());
        break;
      case 2:
      case 3: {
        // One stream for each communicator: collectives on several streams of one communicator can block each
        // other.
        const CommunicatorId communicator = Below(communicators_);
        const StreamId stream = communicator % static_cast<std::int32_t>(b_.plan().streams.size());
        b_.AllGather(0, 1, stream, communicator);
        break;
      }
      case 4:
        b_.Record(Below(4), AnyStream());
        break;
      case 5:
        b_.Wait(AnyStream(), Below(4));
        break;
      case 6:
        if (Below(3) == 0) b_.HostWait(Below(4));
        break;
      default:
        if (!dead_.empty() && Below(2) == 0) {
          alive_.push_back(dead_.back());
          dead_.pop_back();
          b_.Allocate(alive_.back(), 0);
        } else if (!alive_.empty()) {
          dead_.push_back(alive_.back());
          alive_.pop_back();
          b_.Free(dead_.back());
        }
    }
  }

  std::mt19937_64 random_;
  PlanBuilder b_;
  std::int32_t communicators_ = 1;
  UnitId unit_ = -1;
  std::vector<BufferId> dead_;
  std::vector<BufferId> alive_;
};

}  // namespace

Plan RandomPlan(std::uint64_t seed) { return RandomBuilder(seed).Build(); }

}  // namespace shardplan::test

// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/verifier/random_plans.h"

#include <string>
#include <vector>

#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

class Generator {
 public:
  Generator(std::mt19937_64& random, int waits_percent) : random_(random), waits_percent_(waits_percent) {
    const int streams = 2 + Pick(3);
    for (int s = 1; s < streams; ++s) b_.Stream("s" + std::to_string(s));
    const int units = 1 + Pick(2);
    for (int u = 0; u < units; ++u) {
      UnitState unit;
      unit.id = b_.Unit("u" + std::to_string(u));
      unit.shard = b_.Buffer(BufferRole::kParamSharded, unit.id);
      unit.gathered = b_.Buffer(BufferRole::kAllGatherOutput, unit.id);
      unit.unsharded = b_.Buffer(BufferRole::kParamUnsharded, unit.id);
      units_.push_back(unit);
    }
  }

  Plan Build() {
    b_.Step("only").At(TriggerKind::kStepBegin);
    const int moves = 4 + Pick(5 * static_cast<int>(units_.size()));
    for (int m = 0; m < moves; ++m) {
      if (Pick(12) == 0) Order();
      Advance(units_[Pick(static_cast<int>(units_.size()))]);
    }
    for (UnitState& unit : units_) {
      while (unit.phase != 0) Advance(unit);
    }
    return std::move(b_.plan());
  }

 private:
  struct UnitState {
    UnitId id = -1;
    BufferId shard = -1, gathered = -1, unsharded = -1;
    int segments = 0;    // that have read it
    int phase = 0;       // what comes next
    StreamId pool = 0;   // where `gathered` is allocated
    StreamId last = -1;  // where the last work on it ran
    bool holds_gathered = false;
  };

  int Pick(int n) { return static_cast<int>(random_() % static_cast<std::uint64_t>(n)); }
  StreamId AnyStream() { return Pick(static_cast<int>(b_.plan().streams.size())); }
  bool Waits() { return Pick(100) < waits_percent_; }

  // A stream for the next work on the unit, which waits for the last one more often than not.
  StreamId Next(UnitState& unit) {
    const StreamId stream = Pick(3) == 0 ? AnyStream() : unit.id % static_cast<int>(b_.plan().streams.size());
    if (unit.last >= 0 && unit.last != stream && Waits()) b_.Sync(unit.last, stream);
    unit.last = stream;
    return stream;
  }

  void Order() {
    switch (Pick(3)) {
      case 0:
        b_.Sync(AnyStream(), AnyStream());
        return;
      case 1: {
        const EventId event = b_.Event("host" + std::to_string(b_.plan().events.size()));
        b_.Record(event, AnyStream()).HostWait(event);
        return;
      }
      default:
        if (!b_.plan().events.empty()) {  // an older event, which says less than a new one
          b_.Wait(AnyStream(), Pick(static_cast<int>(b_.plan().events.size())));
        }
        return;
    }
  }

  void Free(BufferId buffer, StreamId pool, UnitState& unit) {
    if (unit.last >= 0 && unit.last != pool && Waits()) {
      if (Pick(2) == 0) {
        b_.Free(buffer, {unit.last});
        return;
      }
      b_.Sync(unit.last, pool);
    }
    b_.Free(buffer);
  }

  void Advance(UnitState& unit) {
    switch (unit.phase++) {
      case 0:
        unit.pool = AnyStream();
        b_.Allocate(unit.gathered, unit.pool);
        unit.last = unit.last < 0 ? unit.pool : unit.last;
        if (Pick(2) == 0 && unit.last != unit.pool && Waits()) b_.Sync(unit.pool, unit.last);
        return;
      case 1:
        b_.CopyIn(unit.shard, unit.gathered, Next(unit));
        return;
      case 2:
        b_.AllGather(unit.gathered, unit.gathered, Next(unit));
        unit.holds_gathered = true;
        return;
      case 3: {
        const StreamId stream = Next(unit);
        b_.Allocate(unit.unsharded, stream)
            .CopyOut(unit.gathered, unit.unsharded, stream)
            .Bind(unit.unsharded);
        unsharded_pool_ = stream;
        if (Pick(2) == 0) {
          Free(unit.gathered, unit.pool, unit);
          unit.holds_gathered = false;
        }
        return;
      }
      case 4:
        b_.Compute(b_.Forward("forward " + std::to_string(unit.id) + " " + std::to_string(unit.segments++),
                              {unit.id}),
                   Next(unit));
        if (Pick(3) == 0) --unit.phase;
        return;
      default:
        b_.BindSharded(unit.shard);
        if (unit.holds_gathered) Free(unit.gathered, unit.pool, unit);
        Free(unit.unsharded, unsharded_pool_, unit);
        unit.holds_gathered = false;
        unit.phase = 0;
        return;
    }
  }

  std::mt19937_64& random_;
  int waits_percent_;
  PlanBuilder b_;
  std::vector<UnitState> units_;
  StreamId unsharded_pool_ = 0;
};

}  // namespace

Plan RandomUnshardPlan(std::mt19937_64& random, int waits_percent) {
  return Generator(random, waits_percent).Build();
}

}  // namespace shardplan::test

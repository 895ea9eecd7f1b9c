// SPDX-License-Identifier: Apache-2.0
// One rank's step as discrete events: the host, the streams, the compute engine, the links.
//
// [Note: the host runs first]
// Nothing on the device changes what the host does, except a host wait. So the host issues everything up to
// its next host wait at once, noting when each instruction is issued; the device then runs until that wait's
// record is done. No later instruction could have been issued before, so nothing that the device did in
// between is missed.
//
// [Note: ranks that join]
// If ranks are simulated apart, a collective belongs to all ranks of its group (`Joins`). A rank's stream
// comes to it, it begins when the last has, goes at the rate of the rank where it gets least, and ends for
// all at once. Everything else of a rank is its own. Without Joins one rank stands for all.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/rates.h"
#include "engine/step_account.h"
#include "engine/stream_state.h"
#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

// The collectives of several ranks, as one of them sees them. `instruction` is an index into the code.
class Joins {
 public:
  virtual ~Joins() = default;
  // Whether a collective of a rank is one of several ranks here; else the rank does it by itself.
  virtual bool IsJoined(std::int32_t /*rank*/, std::int32_t /*instruction*/) const { return true; }
  // The stream of a rank has come to a collective. Whoever comes last has all of them Begun, itself too.
  virtual void Come(std::int32_t rank, std::size_t stream, std::int32_t instruction) = 0;
  // The rate that the rank offers it from now on.
  virtual void Offer(std::int32_t rank, std::int32_t instruction, std::int64_t old_rate,
                     std::int64_t rate) = 0;
};

// A collective of several ranks, of which the last comes at its begin.
struct CollectiveTimes {
  Nanoseconds begin_ns;
  Nanoseconds end_ns;
};

// How a rank differs from the one that stands for all.
struct RankTraits {
  std::int32_t rank = 0;
  std::int64_t kernels_ppm = 1'000'000;  // of the time that its kernels take
  std::int64_t jitter_ppm = 0;           // at most so much more, of each piece of work by itself
  std::uint64_t seed = 0;
  // By instruction: when a collective begins and ends, since ranks that are not simulated are in it.
  const std::vector<CollectiveTimes>* collectives = nullptr;
};

class StepRunner {
 public:
  // timeline, joins: may be null. All are kept by reference.
  StepRunner(const EngineProgram& program, const EngineStep& step, EngineTimeline* timeline,
             const RunOptions& options, Joins* joins = nullptr, const RankTraits& traits = {});

  // kNegative: the step never ends.
  Result<EngineResult> Run();

  // ---- where ranks are simulated apart: their events one by one, in order of time ----
  // Does everything that can be done now. The time of the rank's next event by itself, kNever: none.
  std::int64_t Settle();
  // To a time at or before its next event.
  void AdvanceTo(std::int64_t time_ns);
  // A stream that is kJoining begins its collective, and ends it.
  void BeginJoined(std::size_t s);
  void FinishJoined(std::size_t s);
  // An instruction that waits for ever once nothing is left to happen; -1: none.
  std::int32_t StuckAt() const;
  EngineResult TakeResult();
  static std::unexpected<Error> Stuck(std::int32_t instruction);
  std::int64_t now_ns() const { return now_ns_; }

 private:
  struct Slot {
    bool done = false;
    std::int64_t time_ns = 0;
    std::int32_t span = -1;
  };
  // The host's wait: for a record, or until a stream has passed an instruction; neither: an idle device.
  struct Awaited {
    std::int32_t slot = -1;
    std::int32_t stream = -1;
    std::int32_t instruction = -1;
  };
  enum class HostStage : std::uint8_t { kBefore, kIssued };

  static std::size_t Index(std::int32_t i) { return static_cast<std::size_t>(i); }
  bool IsOthers(std::int32_t i) const { return !others_.empty() && others_[Index(i)] != 0; }

  // ---- the host ----
  // Issues until something that it waits for is not there yet (false), or to the end.
  bool Issue();
  bool MayIssue(std::int32_t i, const EngineInstruction& instruction);
  void IssueOne(std::int32_t i, const EngineInstruction& instruction);
  bool Passed() const;
  bool AwaitsIdle() const;
  bool RunUntilPassed();

  // ---- the device ----
  std::int64_t NextEvent() const;
  void Progress();
  bool Step(std::size_t s);
  void Pop(StreamState& stream);
  bool PassWait(std::size_t s, StreamState& stream, const EngineInstruction& instruction);
  bool StartWork(std::size_t s, StreamState& stream, const EngineInstruction& instruction);
  bool StartAmongOthers(std::size_t s, StreamState& stream);
  bool StartOperators(std::size_t s, StreamState& stream, const EngineInstruction& instruction);
  void Begin(std::size_t s, StreamState& stream);
  void Activate(StreamState& stream, const EngineInstruction& instruction, std::int64_t duration_ns);
  std::int64_t OfThisRank(const StreamState& stream, std::int64_t duration_ns) const;
  void UpdateRates();
  std::int64_t FinishTime(const StreamState& stream) const;
  void Finish(std::size_t s);

  const EngineProgram& program_;
  const EngineStep& step_;
  const RunOptions options_;
  Joins* joins_;
  const RankTraits traits_;
  StepAccount account_;
  Rates rates_;
  std::vector<StreamState> streams_;
  std::int64_t now_ns_ = 0;

  Awaited awaited_;
  HostStage stage_ = HostStage::kBefore;  // of instruction `next_`
  bool synchronized_ = false;             // before it
  bool blocked_ = false;                  // Settle: it waits for something
  std::int32_t next_ = 0;                 // that the host issues
  std::int32_t issued_ = 0;               // how many are
  std::int64_t host_ns_ = 0;
  std::int64_t started_ns_ = 0;  // when the host began it

  std::vector<char> others_;               // by instruction: another rank's work; empty: there is none
  std::vector<std::int64_t> issued_ns_;    // by instruction
  std::vector<std::int64_t> passed_ns_;    // by instruction, where queues have a depth
  std::vector<Slot> slots_;                // of records
  std::vector<std::int32_t> finished_in_;  // collectives, by communicator
};

}  // namespace shardplan::internal

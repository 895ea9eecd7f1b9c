// SPDX-License-Identifier: Apache-2.0
// The virtual backend: all ranks and streams of a plan in one thread, without a GPU. Work is queued per
// (rank, stream) and executed in a seeded order that respects only what the plan itself orders. Freed memory
// is poisoned (NaN) and handed out again at once. A missing wait becomes a wrong number; a collective that
// the ranks issue differently, or a wait that never ends, an error.
//
// [Note: how adversarial]
// A freed block is poisoned by the first use of whatever is allocated next from its stream's pool, wherever
// that use runs: the earliest moment at which a caching allocator's next owner could overwrite it. New memory
// is poisoned as well. Which freed block is handed out, and whether only to what is not larger, the seed
// decides. A collective reads its inputs and writes its outputs at different times. For a seed, some streams
// are preferred over others for stretches of a length that the seed decides, so that a stream may lag
// arbitrarily far behind; under half of them the same stream of all ranks is the first or the last one. The
// hosts run ahead of the work by an amount that the seed decides. Under half of the seeds a
// communicator runs its collectives one after the other, in the order of issue, as NCCL does: that finds
// deadlocks. Under the others it runs those of different streams at once, so that no plan is right only
// because two collectives share a communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/device.h"
#include "shardplan/executor/replayer.h"

namespace shardplan::executor {

// The representation of a machine's memory. kMarks: no numbers, only the poisoned ranges, as ranges of
// bytes. The same poison is seen as with numbers, and the plan of a model of any size runs in the memory of
// its own document.
enum class VirtualContent : std::uint8_t { kNumbers, kMarks };

class VirtualMachine {
 public:
  // The plan outlives the machine.
  static std::unique_ptr<VirtualMachine> Create(const Plan& plan, std::uint64_t seed,
                                                VirtualContent content = VirtualContent::kNumbers);
  virtual ~VirtualMachine() = default;

  virtual Device& device(std::int64_t rank) = 0;
  virtual Collectives& collectives(std::int64_t rank) = 0;

  // Memory of a buffer's part, valid until it is freed; empty while not alive, with kMarks, or where there is
  // no such part. Elements are of the buffer's dtype.
  virtual std::span<std::byte> Memory(std::int64_t rank, BufferId buffer, std::int32_t part) = 0;
  // The model's own work: runs in stream order. `uses`: the buffers whose memory it touches.
  virtual void Enqueue(std::int64_t rank, StreamId stream, std::span<const BufferId> uses,
                       std::function<void()> work) = 0;

  // Runs one piece of work that can run. False: none can. kNegative: ranks issued different collectives on a
  // communicator.
  virtual Result<bool> RunOne() = 0;
  // Runs until nothing is queued. kNegative: something is left that can never run; the message names it.
  virtual Status Drain() = 0;
  // A number in [0, n) from the machine's seed: for hosts that choose whom to advance.
  virtual std::uint64_t Random(std::uint64_t n) = 0;
};

// Runs `steps` steps of the plan on all ranks, replayers[r] being rank r's (made on the machine's devices):
// the hosts fire the plan's triggers in order, interleaved with each other and with the streams' work as the
// seed decides, and everything is drained at the end. kNegative: a deadlock, or ranks issued different
// collectives.
Status ReplayOnVirtual(VirtualMachine& machine, std::span<Replayer* const> replayers, std::int64_t steps);

// Replays `steps` steps of the plan on all ranks with a model that computes nothing: every number is zero,
// and poison that anything reads spreads to what it writes. kNegative: poison has come to a parameter (a wait
// is missing, or a free comes too early), or what ReplayOnVirtual finds.
Status ReplayFiller(const Plan& plan, std::uint64_t seed, std::int64_t steps,
                    VirtualContent content = VirtualContent::kMarks);

}  // namespace shardplan::executor

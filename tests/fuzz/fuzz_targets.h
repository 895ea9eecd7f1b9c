// SPDX-License-Identifier: Apache-2.0
// Properties of any bytes at all: the readers answer with a value or an error, never crash, and a value that
// they give is written and read back unchanged. Functions that take a document do their work or answer with
// an error. Each target aborts where that is not so.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace shardplan::test {

void FuzzTrace(std::string_view bytes);
void FuzzCluster(std::string_view bytes);
void FuzzStrategy(std::string_view bytes);
// Also the text form, the verifier and the difference to itself.
void FuzzPlan(std::string_view bytes);
// A recording of a rehearsal, and its races.
void FuzzRehearsal(std::string_view bytes);
void FuzzReport(std::string_view bytes);
void FuzzStateLayout(std::string_view bytes);
// Also its verifier, its text and, where it verifies, its simulation.
void FuzzReshard(std::string_view bytes);
void FuzzPlanText(std::string_view bytes);
// Simulates whatever plan is read: it need not be a good one.
void FuzzSimulate(std::string_view bytes);
// Replays it on all ranks of the virtual machine, unless that takes much memory.
void FuzzReplay(std::string_view bytes);
// A log of the caching allocator, read and replayed.
void FuzzAllocatorLog(std::string_view bytes);
// A trace, a strategy and a cluster (parts of mutator.h): planned, verified, simulated, its memory explained.
// Whatever cannot be is bad input with a place.
void FuzzPipeline(std::string_view bytes);
// A recording's documents and its log, read and compared with a plan.
void FuzzRecording(std::string_view bytes);
// A file of a checkpoint, or .metadata and the file that it speaks of.
void FuzzCheckpoint(std::string_view bytes);

struct FuzzTarget {
  std::string_view name;
  void (*run)(std::string_view bytes);
};
inline constexpr std::array<FuzzTarget, 15> kFuzzTargets = {{{"trace", FuzzTrace},
                                                             {"cluster", FuzzCluster},
                                                             {"strategy", FuzzStrategy},
                                                             {"plan", FuzzPlan},
                                                             {"rehearsal", FuzzRehearsal},
                                                             {"report", FuzzReport},
                                                             {"plan_text", FuzzPlanText},
                                                             {"simulate", FuzzSimulate},
                                                             {"replay", FuzzReplay},
                                                             {"allocator_log", FuzzAllocatorLog},
                                                             {"pipeline", FuzzPipeline},
                                                             {"recording", FuzzRecording},
                                                             {"state_layout", FuzzStateLayout},
                                                             {"reshard", FuzzReshard},
                                                             {"checkpoint", FuzzCheckpoint}}};

}  // namespace shardplan::test

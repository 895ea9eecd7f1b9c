// SPDX-License-Identifier: Apache-2.0
#include "verifier/words/words.h"

#include <fmt/format.h>

namespace shardplan::verifier {

std::vector<std::string> Words::OrderChain(const Work& earlier, const Work& later) const {
  return {"earlier: " + Describe(earlier.at), "later: " + Describe(later.at),
          fmt::format(
              "missing: a record on {} after the earlier one, and a wait of {} for it before the later one",
              reporter_.StreamName(earlier.stream), reporter_.StreamName(later.stream))};
}

// ---- lifetimes ----

void Words::AllocatedTwice(BufferId buffer, Position first, Position again) {
  reporter_.Add(Rule::kDoubleAllocate, again, buffer,
                fmt::format("{} is allocated while it is alive", Buffer(buffer)),
                {"allocated: " + Describe(first), "again: " + Describe(again)});
}

void Words::FreedTwice(BufferId buffer, Position first, Position again) {
  reporter_.Add(Rule::kDoubleFree, again, buffer, fmt::format("{} is freed twice", Buffer(buffer)),
                {"first: " + Describe(first), "again: " + Describe(again)});
}

void Words::PartFreedTwice(BufferId buffer, std::int32_t part, Position first, Position again) {
  reporter_.Add(Rule::kDoubleFree, again, buffer,
                fmt::format("part {} of {} is freed twice", part, Buffer(buffer)),
                {"earlier: " + Describe(first), "again: " + Describe(again)});
}

void Words::FreedUnallocated(BufferId buffer, Position at) {
  reporter_.Add(Rule::kUseUnallocated, at, buffer,
                fmt::format("{} is freed but is not allocated", Buffer(buffer)));
}

void Words::UsedUnallocated(BufferId buffer, Position at) {
  reporter_.Add(Rule::kUseUnallocated, at, buffer,
                fmt::format("{} uses {}, which is not allocated", Instruction(at), Buffer(buffer)),
                {"used: " + Describe(at)});
}

void Words::UsedAfterFree(BufferId buffer, Position freed, Position used) {
  reporter_.Add(Rule::kUseAfterFree, used, buffer,
                fmt::format("{} uses {}, which was freed", Instruction(used), Buffer(buffer)),
                {"freed: " + Describe(freed), "used: " + Describe(used)});
}

void Words::UsedAfterFreeOfParts(BufferId buffer, Position freed, Position used) {
  reporter_.Add(Rule::kUseAfterFree, used, buffer,
                fmt::format("{} uses {}, of which parts were freed", Instruction(used), Buffer(buffer)),
                {"freed: " + Describe(freed), "used: " + Describe(used)});
}

void Words::FreedWhileBound(UnitId unit, BufferId buffer, Position bound, Position freed) {
  reporter_.Add(Rule::kUseAfterFree, freed, buffer,
                fmt::format("{} is freed while the parameters of {} are views of it", Buffer(buffer),
                            reporter_.UnitName(unit)),
                {"bound: " + Describe(bound), "freed: " + Describe(freed)});
}

// ---- accesses ----

void Words::ReadTooLittle(Rule rule, BufferId buffer, const Allocation& memory, const Work& reader) {
  const char* state = memory.content == Content::kNothing ? "nothing has been written to it"
                                                          : "it holds only this rank's part";
  reporter_.Add(rule, reader.at, buffer,
                fmt::format("{} reads {}, but {}", Instruction(reader.at), Buffer(buffer), state),
                {"allocated: " + Describe(memory.allocated), "read: " + Describe(reader.at)});
}

void Words::ReadNotOrdered(Rule rule, BufferId buffer, const Work& writer, const Work& reader) {
  reporter_.Add(
      rule, reader.at, buffer,
      fmt::format("{} reads {}, which {} writes, but {} has not waited for that", Instruction(reader.at),
                  Buffer(buffer), Instruction(writer.at), reporter_.StreamName(reader.stream)),
      OrderChain(writer, reader));
}

void Words::WrittenInRace(BufferId buffer, const Work& other, const Work& writer) {
  reporter_.Add(Rule::kWriteRace, writer.at, buffer,
                fmt::format("{} writes {}, which {} uses; nothing orders the two", Instruction(writer.at),
                            Buffer(buffer), Instruction(other.at)),
                OrderChain(other, writer));
}

void Words::TensorReadNotOrdered(StorageId storage, const Work& writer, const Work& reader) {
  reporter_.Add(
      Rule::kReadBeforeWrite, reader.at, storage,
      fmt::format("{} reads storage {} of the model, which {} writes, but {} has not waited for that",
                  Instruction(reader.at), storage, Instruction(writer.at),
                  reporter_.StreamName(reader.stream)),
      OrderChain(writer, reader));
}

void Words::TensorWrittenInRace(StorageId storage, const Work& other, const Work& writer) {
  reporter_.Add(
      Rule::kWriteRace, writer.at, storage,
      fmt::format("{} writes or frees storage {} of the model, which {} uses; nothing orders the two",
                  Instruction(writer.at), storage, Instruction(other.at)),
      OrderChain(other, writer));
}

void Words::StorageIsMissing(BufferId buffer, StorageId storage, Position at) {
  reporter_.Add(
      Rule::kComputeOrder, at, buffer,
      fmt::format("{} works on all of {}, and storage {} of it is not there: no segment has made it, "
                  "or one has freed it",
                  Instruction(at), Buffer(buffer), storage));
}

void Words::BringsBackOthers(BufferId host, std::int32_t microbatch, Position at) {
  const std::string whose =
      microbatch < 0 ? std::string("another step") : fmt::format("micro-batch {}", microbatch);
  reporter_.Add(
      Rule::kComputeOrder, at, host,
      fmt::format("{} brings back what is in {}, which is of {}", Instruction(at), Buffer(host), whose));
}

void Words::FreedTooEarly(std::int32_t pool, const Debt& debt, const Work& first_use, BufferId reused_as) {
  std::vector<std::string> chain = OrderChain(debt.use, first_use);
  if (debt.use.stream == pool) {  // free and use agree; the new user runs ahead of the pool's stream
    reporter_.Add(
        Rule::kFreeBeforeLastUse, first_use.at, reused_as,
        fmt::format("{} is allocated on {} but first used on {}, which has not waited for it: the memory "
                    "may still be in use by {}",
                    Buffer(reused_as), reporter_.StreamName(pool), reporter_.StreamName(first_use.stream),
                    Instruction(debt.use.at)),
        std::move(chain));
    return;
  }
  const std::string reuse = reused_as < 0 ? "the model's own memory" : Buffer(reused_as);
  chain.insert(chain.begin() + 1, "freed: " + Describe(debt.freed));
  reporter_.Add(Rule::kFreeBeforeLastUse, debt.freed, debt.buffer,
                fmt::format("{} is freed while {} may still be using it: {} may get the same block, and "
                            "{} has not waited for that use",
                            Buffer(debt.buffer), Instruction(debt.use.at), reuse,
                            reporter_.StreamName(first_use.stream)),
                std::move(chain));
}

void Words::ReadWhileSharded(UnitId unit, Position sharded, Position read) {
  std::vector<std::string> chain;
  if (sharded.instruction >= 0) chain.push_back("sharded: " + Describe(sharded));
  chain.push_back("read: " + Describe(read));
  reporter_.Add(Rule::kUseBeforeUnshard, read, unit,
                fmt::format("{} reads the parameters of {}, which are not unsharded", Instruction(read),
                            reporter_.UnitName(unit)),
                std::move(chain));
}

void Words::GatheredOverOthers(BufferId buffer, CommunicatorId cut, Position at) {
  reporter_.Add(
      Rule::kWrongValue, at, buffer,
      cut < 0 ? fmt::format("{} gathers {}, which is cut over no ranks", Instruction(at), Buffer(buffer))
              : fmt::format("{} gathers the pieces in {}, but the ranks of {} have the others",
                            Instruction(at), Buffer(buffer), plan_.communicators[cut].name),
      {"at: " + Describe(at)});
}

void Words::MovesOutdated(BufferId buffer, Position stepped, Position at) {
  reporter_.Add(Rule::kWrongValue, at, buffer,
                fmt::format("{} takes parameters from {} that are older than the optimizer's step",
                            Instruction(at), Buffer(buffer)),
                {"stepped: " + Describe(stepped), "taken: " + Describe(at)});
}

void Words::ReadsOtherThanParameters(UnitId unit, BufferId bound, Position bound_at, Position at) {
  reporter_.Add(Rule::kWrongValue, at, unit,
                fmt::format("{} reads the parameters of {} in {}, which does not hold all of them, whole",
                            Instruction(at), reporter_.UnitName(unit), Buffer(bound)),
                {"bound: " + Describe(bound_at), "read: " + Describe(at)});
}

void Words::ReadsInOtherDType(UnitId unit, BufferId bound, Position bound_at, Position at) {
  reporter_.Add(Rule::kWrongValue, at, unit,
                fmt::format("{} reads {} in {}, which is {}: the unit computes in {}", Instruction(at),
                            reporter_.UnitName(unit), Buffer(bound), Name(plan_.buffers[bound].dtype),
                            Name(plan_.units[unit].param_dtype)),
                {"bound: " + Describe(bound_at), "read: " + Describe(at)});
}

void Words::GradientInOtherDType(UnitId unit, BufferId grad, BufferId bound, Position at) {
  reporter_.Add(Rule::kWrongValue, at, unit,
                fmt::format("{} makes gradients of {} in {}, which is {}: its parameters are {}",
                            Instruction(at), reporter_.UnitName(unit), Buffer(grad),
                            Name(plan_.buffers[grad].dtype), Name(plan_.buffers[bound].dtype)),
                {"at: " + Describe(at)});
}

// ---- waits ----

void Words::WaitedForNothing(EventId event, Position at) {
  reporter_.Add(Rule::kWaitBeforeRecord, at, event,
                fmt::format("{} waits for an event that nothing has recorded before: the wait orders nothing",
                            Instruction(at)));
}

void Words::HostWaitsForever(EventId event, Position blocked, Position waits) {
  reporter_.Add(
      Rule::kDeadlock, waits, event,
      fmt::format("{} never returns where a wait for an unrecorded event blocks: the stream that records "
                  "it is behind such a wait",
                  Instruction(waits)),
      {"blocked: " + Describe(blocked), "waits: " + Describe(waits)});
}

// ---- the end of the steps that repeat ----

void Words::NotFreed(BufferId buffer, Position allocated) {
  std::vector<std::string> chain;
  if (allocated.instruction >= 0) chain.push_back("allocated: " + Describe(allocated));
  reporter_.Add(Rule::kLeak, allocated, buffer,
                fmt::format("{} is alive at the end of step {}, but not at its beginning: nothing frees it",
                            Buffer(buffer), CycleName()),
                std::move(chain));
}

void Words::NeverUsed(BufferId buffer, Position allocated) {
  std::vector<std::string> chain;
  if (allocated.instruction >= 0) chain.push_back("allocated: " + Describe(allocated));
  reporter_.Add(Rule::kLeak, allocated, buffer,
                fmt::format("{} stays alive for ever, but no step that repeats uses it", Buffer(buffer)),
                std::move(chain));
}

void Words::GoneAtEnd(BufferId buffer) {
  reporter_.Add(Rule::kSteadyState, EndOfCycle(), buffer,
                fmt::format("{} is alive at the beginning of step {}, but not at its end", Buffer(buffer),
                            CycleName()));
}

void Words::OtherContentAtEnd(BufferId buffer, Content before) {
  reporter_.Add(Rule::kSteadyState, EndOfCycle(), buffer,
                fmt::format("{} is {} at the beginning of step {}, but not at its end", Buffer(buffer),
                            before == Content::kNothing ? "empty" : "filled", CycleName()));
}

void Words::OtherGradientsAtEnd(BufferId buffer) {
  reporter_.Add(Rule::kSteadyState, EndOfCycle(), buffer,
                fmt::format("the gradients in {} at the end of step {} are not those at its beginning",
                            Buffer(buffer), CycleName()));
}

void Words::OtherBindingAtEnd(UnitId unit, BufferId before, BufferId after) {
  const auto state = [&](BufferId bound) { return bound < 0 ? "sharded" : "unsharded in " + Buffer(bound); };
  // Subjects are buffers here, then units.
  const std::int64_t subject = static_cast<std::int64_t>(plan_.buffers.size()) + unit;
  reporter_.Add(Rule::kSteadyState, EndOfCycle(), subject,
                fmt::format("{} is {} at the beginning of step {}, but {} at its end",
                            reporter_.UnitName(unit), state(before), CycleName(), state(after)));
}

}  // namespace shardplan::verifier

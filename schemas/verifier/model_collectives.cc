// SPDX-License-Identifier: Apache-2.0
#include "verifier/model_collectives.h"

#include <fmt/format.h>

#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "shardplan/schemas/instruction_set.h"

namespace shardplan::verifier {
namespace {

// A send or a receive whose other half has not been issued.
struct Half {
  const OperatorEvent* op = nullptr;
  Position at;
};

// The program of a step, as one rank issues it and all others do.
class StepWalk {
 public:
  StepWalk(const Plan& plan, Reporter& reporter) : plan_(plan), reporter_(reporter) {}

  void Run(std::int32_t step) {
    const std::vector<Trigger>& triggers = plan_.steps[step].triggers;
    for (std::size_t t = 0; t < triggers.size(); ++t) {
      const InstructionList& instructions = triggers[t].instructions;
      for (std::size_t n = 0; n < instructions.size(); ++n) {
        if (!DescriptionOf(instructions[n].kind).segment) continue;
        at_ = {step, static_cast<std::int32_t>(t), static_cast<std::int32_t>(n)};
        Segment(plan_.segments[instructions[n].segment], MicrobatchOf(triggers[t], instructions[n]));
      }
    }
    for (const auto& [key, halves] : open_) {
      for (const Half& half : halves) NeverMet(half);
    }
  }

 private:
  // By communicator, kind of the half that is there and the sender's distance.
  using Key = std::tuple<CommunicatorId, CollectiveKind, std::int32_t>;

  void Segment(const shardplan::Segment& segment, std::int32_t microbatch) {
    for (const SegmentEntry& entry : segment.entries) {
      if (const auto* wait = std::get_if<CollectiveWaitEvent>(&entry)) {
        Wait(segment, {wait->work, microbatch});
      } else if (const auto* op = std::get_if<OperatorEvent>(&entry); op != nullptr && op->collective) {
        Issue(*op, microbatch);
      } else if (op != nullptr) {
        Compute();
      }
    }
  }

  void Wait(const shardplan::Segment& segment, std::pair<std::int32_t, std::int32_t> work) {
    if (!issued_.contains(work)) {
      Add(Rule::kWaitBeforeRecord, work.first,
          fmt::format("{} waits for collective {} of the model, which nothing has issued before",
                      segment.name, work.first));
    }
    for (auto& [key, halves] : open_) {
      for (const Half& half : halves) {
        if (half.op->collective->work == work.first) Blocks(half);
      }
    }
  }

  // A synchronous half that is not met by now keeps the stream from what follows, on every rank.
  void Compute() {
    for (auto& [key, halves] : open_) {
      for (const Half& half : halves) {
        if (half.op->collective->work < 0) Blocks(half);
      }
    }
  }

  void Issue(const OperatorEvent& op, std::int32_t microbatch) {
    const ModelCollective& issued = *op.collective;
    if (issued.work >= 0) issued_.insert({issued.work, microbatch});
    const bool sends = issued.kind == CollectiveKind::kSend;
    if (!sends && issued.kind != CollectiveKind::kReceive) return BlockedBy(issued);
    const auto size = static_cast<std::int32_t>(plan_.communicators[issued.communicator].size);
    const std::int32_t distance = sends ? issued.peer : size - issued.peer;
    const CollectiveKind other = sends ? CollectiveKind::kReceive : CollectiveKind::kSend;
    std::deque<Half>& waiting = open_[{issued.communicator, other, distance}];
    if (waiting.empty()) {
      BlockedBy(issued);
      open_[{issued.communicator, issued.kind, distance}].push_back({&op, at_});
      return;
    }
    const Half met = waiting.front();
    waiting.pop_front();
    const ModelCollective& before = *met.op->collective;
    if (before.size_bytes != issued.size_bytes || met.op->dtype != op.dtype) {
      Add(Rule::kCollectiveOrder, subject_++,
          fmt::format("{} meets {}, another message", Words(op), Words(*met.op)),
          {reporter_.Describe(met.at)});
    }
    const bool together = before.batch >= 0 && before.batch == issued.batch;
    if (!together && before.work < 0) Blocks(met);
  }

  // A synchronous half before another collective, which is not issued together with it.
  void BlockedBy(const ModelCollective& next) {
    for (auto& [key, halves] : open_) {
      for (const Half& half : halves) {
        const ModelCollective& before = *half.op->collective;
        if (before.work < 0 && (before.batch < 0 || before.batch != next.batch)) Blocks(half);
      }
    }
  }

  void Blocks(const Half& half) {
    if (!blocking_.insert(half.op).second) return;
    Add(Rule::kDeadlock, subject_++,
        fmt::format("every rank waits for its {} before it issues the other half: issue both as one group "
                    "(batch_isend_irecv), or wait later",
                    Words(*half.op)),
        {reporter_.Describe(half.at)});
  }

  void NeverMet(const Half& half) {
    const bool sends = half.op->collective->kind == CollectiveKind::kSend;
    reporter_.Add(Rule::kCollectiveOrder, half.at, subject_++,
                  fmt::format("{}: no rank {} it", Words(*half.op), sends ? "receives" : "sends"));
  }

  std::string Words(const OperatorEvent& op) const {
    const ModelCollective& half = *op.collective;
    return fmt::format("{} {} {} places on in {} ({} bytes of {})", Name(half.kind),
                       half.kind == CollectiveKind::kSend ? "to" : "from", half.peer,
                       plan_.communicators[half.communicator].name, half.size_bytes.value, Name(op.dtype));
  }

  void Add(Rule rule, std::int64_t subject, std::string message, std::vector<std::string> chain = {}) {
    reporter_.Add(rule, at_, subject, std::move(message), std::move(chain));
  }

  const Plan& plan_;
  Reporter& reporter_;
  Position at_;
  std::set<std::pair<std::int32_t, std::int32_t>> issued_;  // asynchronous ones: work, micro-batch
  std::map<Key, std::deque<Half>> open_;
  std::set<const OperatorEvent*> blocking_;  // said already
  std::int64_t subject_ = 0;
};

}  // namespace

void CheckModelCollectives(const Plan& plan, Reporter& reporter) {
  for (std::int32_t step = 0; step < std::ssize(plan.steps); ++step) StepWalk(plan, reporter).Run(step);
}

}  // namespace shardplan::verifier

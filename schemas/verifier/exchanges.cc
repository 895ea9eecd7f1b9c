// SPDX-License-Identifier: Apache-2.0
#include "verifier/exchanges.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/plan_text.h"

namespace shardplan::verifier {

Exchanges::Exchanges(const Plan& plan, Reporter& reporter)
    : plan_(plan), reporter_(reporter), states_(plan.exchanges.size()) {}

void Exchanges::Add(Rule rule, Position at, std::string what, std::vector<std::string> chain) {
  chain.push_back("at: " + reporter_.Describe(at));
  reporter_.Add(rule, at, subject_++, std::move(what), std::move(chain));
}

std::string Exchanges::MatrixName(const ExchangedMatrix& matrix) const {
  const UnitParameter& parameter = plan_.units[matrix.unit].parameters[matrix.parameter];
  return matrix.rows == 0
             ? parameter.fqn
             : fmt::format("{}[{}:{}]", parameter.fqn, matrix.first_row, matrix.first_row + matrix.rows);
}

void Exchanges::Pass(const Instruction& i, Position at) {
  if (i.kind == InstructionKind::kOrthogonalize) return Orthogonalize(i, at);
  if (DescriptionOf(i.kind).collective) return Send(i, at);
  if (i.kind == InstructionKind::kUpdateApply) return Apply(i, at);
  CheckRoom(i, i.dst, at);
  Expect(i, Stage::kIdle, Stage::kInPieces, at);
}

void Exchanges::Send(const Instruction& i, Position at) {
  const Buffer& from = plan_.buffers[i.src];
  const Buffer& to = plan_.buffers[i.dst];
  const Exchange& exchange = plan_.exchanges[i.exchange];
  if (!SameRanks(plan_.communicators[i.communicator], plan_.communicators[exchange.communicator])) {
    Add(Rule::kReference, at,
        fmt::format("{}: communicator {} does not join the ranks of {}", Name(i.kind),
                    plan_.communicators[i.communicator].name, exchange.name));
  }
  if (HasOwners(exchange) != (i.kind == InstructionKind::kAllToAll)) {
    return Add(Rule::kOptimizerStep, at,
               fmt::format("{} of {}, whose matrices have {}", Name(i.kind), exchange.name,
                           HasOwners(exchange) ? "owners" : "no owners"));
  }
  if (from.role == to.role) {
    return Add(Rule::kLayout, at,
               fmt::format("all_to_all: {} and {} are both {}", from.name, to.name, Name(from.role)));
  }
  CheckRoom(i, i.dst, at);
  from.role == BufferRole::kUpdatePieces ? Expect(i, Stage::kInPieces, Stage::kWhole, at) : SendBack(i, at);
}

void Exchanges::Expect(const Instruction& i, Stage expected, Stage next, Position at) {
  State& state = states_[i.exchange];
  if (state.stage != expected) {
    const auto word = [](Stage stage) {
      switch (stage) {
        case Stage::kIdle:
          return "nothing of it is under way";
        case Stage::kInPieces:
          return "its updates lie in pieces";
        case Stage::kWhole:
          return "its matrices lie whole";
        case Stage::kBack:
          return "its results are back in pieces";
      }
      return "";
    };
    std::vector<std::string> chain;
    if (state.stage != Stage::kIdle) chain.push_back("before: " + reporter_.Describe(state.at));
    Add(Rule::kOptimizerStep, at,
        fmt::format("{} of {} comes where {}, and needs that {}", Name(i.kind),
                    plan_.exchanges[i.exchange].name, word(state.stage), word(expected)),
        std::move(chain));
  }
  if (expected == Stage::kInPieces) state.done.assign(plan_.exchanges[i.exchange].matrices.size(), 0);
  state.stage = next;
  state.at = at;
}

void Exchanges::Orthogonalize(const Instruction& i, Position at) {
  Expect(i, Stage::kWhole, Stage::kWhole, at);
  State& state = states_[i.exchange];
  state.done.resize(plan_.exchanges[i.exchange].matrices.size());
  const Segment& segment = plan_.segments[i.segment];
  const ExchangedMatrix& matrix = plan_.exchanges[i.exchange].matrices[i.matrix];
  if (segment.phase != SegmentPhase::kOptimizer) {
    Add(Rule::kComputeOrder, at,
        fmt::format("orthogonalize runs {}, which is of the {}", segment.name, Name(segment.phase)));
  }
  for (const SegmentEntry& entry : segment.entries) {
    const auto* op = std::get_if<OperatorEvent>(&entry);
    if (op == nullptr || !op->collective) continue;
    Add(Rule::kComputeOrder, at,
        fmt::format("orthogonalize runs {}, which has a collective of its own ({} on {}): nobody else comes",
                    segment.name, Name(op->collective->kind),
                    plan_.communicators[op->collective->communicator].name));
    break;
  }
  char& done = state.done[i.matrix];
  if (done != 0)
    Add(Rule::kOptimizerStep, at, fmt::format("{} is orthogonalised a second time", MatrixName(matrix)));
  done = 1;
}

void Exchanges::SendBack(const Instruction& i, Position at) {
  ExpectDone(i, "goes back from its owner, which has not orthogonalised it", at);
  Expect(i, Stage::kWhole, Stage::kBack, at);
}

void Exchanges::Apply(const Instruction& i, Position at) {
  const Exchange& exchange = plan_.exchanges[i.exchange];
  const bool owned = HasOwners(exchange);
  const Buffer& from = plan_.buffers[i.src];
  const BufferRole role = owned ? BufferRole::kUpdatePieces : BufferRole::kUpdateWhole;
  if (from.role != role) {
    Add(Rule::kLayout, at,
        fmt::format("update_apply: {} is {}, and results of {} lie in {}", from.name, Name(from.role),
                    exchange.name, Name(role)));
  }
  if (!owned) ExpectDone(i, "is applied, and not orthogonalised", at);
  Expect(i, owned ? Stage::kBack : Stage::kWhole, Stage::kIdle, at);
}

void Exchanges::ExpectDone(const Instruction& i, std::string_view goes, Position at) {
  const State& state = states_[i.exchange];
  for (std::size_t m = 0; state.stage == Stage::kWhole && m < state.done.size(); ++m) {
    if (state.done[m] != 0) continue;
    Add(Rule::kOptimizerStep, at,
        fmt::format("{} {}", MatrixName(plan_.exchanges[i.exchange].matrices[m]), goes));
  }
}

void Exchanges::CheckRoom(const Instruction& i, BufferId id, Position at) {
  const Buffer& buffer = plan_.buffers[id];
  const Exchange& exchange = plan_.exchanges[i.exchange];
  const ExchangeLayout layout(plan_, exchange);
  // The first rank has the most rows of every parameter.
  const std::int64_t numel = buffer.role == BufferRole::kUpdatePieces
                                 ? layout.PiecesNumel(0)
                                 : layout.WholeNumel(layout.LargestOwner());
  if (buffer.dtype != exchange.dtype) {
    Add(Rule::kLayout, at,
        fmt::format("{} has dtype {}, and {} is exchanged in {}", buffer.name, Name(buffer.dtype),
                    exchange.name, Name(exchange.dtype)));
    return;
  }
  const Bytes found = SizeBytes(buffer), needed{numel * SizeBytes(exchange.dtype)};
  // A gather puts rank behind rank, so its sizes are exact.
  if (found < needed || (found != needed && !HasOwners(exchange))) {
    Add(Rule::kLayout, at,
        fmt::format("{} has {} bytes, and a rank of {} needs {}", buffer.name, found.value, exchange.name,
                    needed.value));
  }
}

void Exchanges::EndStep() {
  for (std::size_t e = 0; e < states_.size(); ++e) {
    if (states_[e].stage != Stage::kIdle) {
      Add(Rule::kOptimizerStep, states_[e].at,
          fmt::format("{} is under way when the step ends: nothing applies its results",
                      plan_.exchanges[e].name));
    }
    states_[e] = {};
  }
}

}  // namespace shardplan::verifier

// SPDX-License-Identifier: Apache-2.0
// Exchanges of a matrix optimizer: what one is at, and what may come next. Whether its buffers are written
// and visible is the memory's (memory.h), whether gradients are there the gradients' (gradients.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/words/report.h"

namespace shardplan::verifier {

// Rules:
//   optimizer_step  an exchange is copied in, sent, orthogonalised, sent back and applied in this order, each
//                   once, each matrix once, by a segment of its own; none is under way when a step ends.
//                   Without owners it is gathered instead of sent, and not sent back
//   layout          a buffer has room for the pieces or whole matrices of every rank, in the dtype of the
//                   exchange; results are applied from pieces, without owners from the whole
//   reference       an all_to_all or update_gather goes over the exchange's ranks
class Exchanges {
 public:
  Exchanges(const Plan& plan, Reporter& reporter);

  void Pass(const Instruction& i, Position at);
  // Reports exchanges that are under way; they are over then.
  void EndStep();

 private:
  enum class Stage : std::uint8_t { kIdle, kInPieces, kWhole, kBack };
  struct State {
    Stage stage = Stage::kIdle;
    std::vector<char> done;  // by matrix: it is orthogonalised
    Position at;             // the last instruction
  };

  void Expect(const Instruction& i, Stage expected, Stage next, Position at);
  void CheckRoom(const Instruction& i, BufferId buffer, Position at);
  void Orthogonalize(const Instruction& i, Position at);
  void Send(const Instruction& i, Position at);
  void SendBack(const Instruction& i, Position at);
  void Apply(const Instruction& i, Position at);
  // Reports matrices of an exchange of whole ones that are not orthogonalised when they are needed.
  void ExpectDone(const Instruction& i, std::string_view goes, Position at);
  void Add(Rule rule, Position at, std::string what, std::vector<std::string> chain = {});
  std::string MatrixName(const ExchangedMatrix& matrix) const;

  const Plan& plan_;
  Reporter& reporter_;
  std::vector<State> states_;  // by exchange
  std::int64_t subject_ = 0;
};

}  // namespace shardplan::verifier

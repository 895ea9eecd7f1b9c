#include "shardplan/schemas/strategy_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <variant>

namespace shardplan {

Status CheckProgram(const Strategy& strategy) {
  std::set<std::int32_t> ran;  // micro-batches, in this step or an earlier one
  for (std::size_t s = 0; s < strategy.program.size(); ++s) {
    for (std::size_t c = 0; c < strategy.program[s].size(); ++c) {
      const ProgramCall& call = strategy.program[s][c];
      if (const auto* forward = std::get_if<ForwardCall>(&call)) ran.insert(forward->microbatch);
      const auto* backward = std::get_if<BackwardCall>(&call);
      if (backward == nullptr) continue;
      for (std::size_t m = 0; m < backward->microbatches.size(); ++m) {
        const std::int32_t microbatch = backward->microbatches[m];
        const std::string pointer = fmt::format("/program/{}/{}/microbatches/{}", s, c, m);
        const auto here = backward->microbatches.begin() + static_cast<std::ptrdiff_t>(m);
        if (std::find(backward->microbatches.begin(), here, microbatch) != here) {
          return MakeInputError(pointer, "a backward covers a micro-batch once",
                                fmt::format("{}", microbatch));
        }
        if (!ran.contains(microbatch)) {
          return MakeInputError(pointer, "a backward of a micro-batch that has had no forward",
                                fmt::format("{}", microbatch), "a forward of it before");
        }
      }
    }
  }
  return {};
}

}  // namespace shardplan

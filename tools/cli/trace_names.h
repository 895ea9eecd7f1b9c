// SPDX-License-Identifier: Apache-2.0
// Traces by path, or by the name of a model whose traces are shipped.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/trace.h"

namespace CLI {
class App;
}

namespace shardplan::cli {

// [Note: shipped traces] They are of the configs in examples/models, in bfloat16, one sample a step, with the
// cross entropy of the logits: MODEL.seqN.trace.json.gz, or MODEL.trace.json.gz of a model without a sequence
// (dev/update_models). A file of the same name goes before a model.
//
// The path of the trace that is meant. `seq`: tokens of a sample; without it those that `shardplan trace`
// takes, where they are shipped, else the longest. kUsage: a sequence length for a file. kBadInput: neither a
// file nor a model, or not with this sequence length; the error lists what there is.
Result<std::string> ResolveTrace(const std::string& path_or_name, const std::optional<std::int64_t>& seq);

// The trace at that path.
Result<Trace> ReadNamedTrace(const std::string& path_or_name, const std::optional<std::int64_t>& seq);

// --seq of a command that takes traces.
void AddSeqFlag(CLI::App& command, std::optional<std::int64_t>& seq);

}  // namespace shardplan::cli

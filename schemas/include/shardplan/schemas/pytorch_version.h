// SPDX-License-Identifier: Apache-2.0
// The releases of PyTorch whose FSDP is planned. A strategy names one (Strategy::pytorch), and a plan says in
// its strategy which one it follows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// Ascending.
std::string_view Name(PyTorchVersion version);  // "2.15"
std::vector<std::string> PyTorchVersions();     // all names
// Nothing: no release that is planned.
std::optional<PyTorchVersion> PyTorchFromName(std::string_view name);

// The planned release for a trace that torch recorded (Trace::recorded_with, "torch 2.11.0; ..."): the newest
// that is not newer than that torch, the oldest where all are newer. Nothing: not said.
std::optional<PyTorchVersion> RecordedPyTorch(std::string_view recorded_with);

// What a plan of this strategy for this trace follows: what the strategy names, else the torch that recorded
// the trace, which is the one installed there, else the newest.
PyTorchVersion PlannedPyTorch(const Strategy& strategy, const Trace& trace);

// What a plan with this strategy follows: the oldest where it was made before strategies named one.
PyTorchVersion PyTorchOfPlan(const Strategy& strategy);

}  // namespace shardplan

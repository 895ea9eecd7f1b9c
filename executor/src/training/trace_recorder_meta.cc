// SPDX-License-Identifier: Apache-2.0
#include "training/trace_recorder_meta.h"

#include "training/trace_recorder_mode.h"

namespace shardplan::executor {

void CallOnAnyDevice(const c10::OperatorHandle& op, torch::jit::Stack& stack) { CallBelow(op, stack); }

}  // namespace shardplan::executor

// SPDX-License-Identifier: Apache-2.0
// Recorded kernels as the cost model knows them.
#pragma once

#include <vector>

#include "shardplan/schemas/recording.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::internal {

// Its name, arithmetic's dtype, FLOPs and bytes.
OperatorEvent OperatorOf(const IssuedKernel& kernel);
std::int64_t BytesOf(const std::vector<MemoryRegion>& regions);

// Was it issued by a framework that shards and gathers, and not by the model? Files of torch.distributed.
bool IsOfFramework(const Recording& recording, RecordedId place);
// Does the kernel look rows of an embedding up: torch.nn.functional.embedding of a matrix?
bool IsEmbedding(const Recording& recording, const IssuedKernel& kernel);
// Does a module's forward run?
bool IsInForward(const Recording& recording, RecordedId place);

}  // namespace shardplan::internal

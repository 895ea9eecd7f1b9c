// SPDX-License-Identifier: Apache-2.0
// The sums of collectives.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardplan::softdevice {

std::size_t SizeOf(ncclDataType_t dtype);
// torch's name of it.
const char* NameOf(ncclDataType_t dtype);
bool CanReduce(ncclDataType_t dtype);

// An operation, with its factor where it has one.
struct Reduction {
  ncclRedOp_t op = ncclSum;
  bool has_factor = false;
  double factor = 1.0;
};

// to[i] = the reduction of from[r][i] over the ranks r, in their order. The arithmetic is that of NCCL's
// kernels: the factor (and, for floating dtypes, the mean's 1/n) is applied to each rank's element, rounded
// to the dtype; two-byte floats are added in float and rounded at the end.
void Reduce(const Reduction& reduction, ncclDataType_t dtype, const std::vector<const std::byte*>& from,
            std::size_t count, std::byte* to);

// The number that a factor's bytes stand for.
double FactorOf(const void* scalar, ncclDataType_t dtype);

}  // namespace shardplan::softdevice

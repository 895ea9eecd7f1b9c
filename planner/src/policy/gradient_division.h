// SPDX-License-Identifier: Apache-2.0
// How a division of gradients is split into a part before the reduction and one after it.
#pragma once

namespace shardplan {

// The part of `factor` before the reduction: a power of two, about the square root of the factor, so that the
// sum neither overflows nor underflows (DefaultState._get_gradient_predivide_factor).
double PredivideFactor(double factor);

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
#include "policy/gradient_division.h"

#include <cmath>

namespace shardplan {

double PredivideFactor(double factor) {
  double before = 1;
  while (std::fmod(factor, before) == 0 && factor / before > before) before *= 2;
  return before;
}

}  // namespace shardplan

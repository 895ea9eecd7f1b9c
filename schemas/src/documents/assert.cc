// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/assert.h"

#include <cstdio>
#include <cstdlib>

namespace shardplan {

void FailAssertion(const char* condition, const char* message, std::source_location where) {
  std::fprintf(stderr, "shardplan: a bug of shardplan: %s:%u: %s: the assertion `%s` does not hold: %s\n",
               where.file_name(), static_cast<unsigned>(where.line()), where.function_name(), condition,
               message);
  std::abort();
}

}  // namespace shardplan

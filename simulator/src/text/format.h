// SPDX-License-Identifier: Apache-2.0
// Figures as people read them, and text safe to embed. Integer arithmetic: the same text everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shardplan/schemas/quantity.h"

namespace shardplan::internal {

std::string Milliseconds(Nanoseconds time);  // "1234.57 ms"
std::string Gibibytes(Bytes size);           // "12.34 GiB"
std::string Percent(std::int64_t ppm);       // "45.6 %"
std::string Thousands(std::int64_t number);  // "12,345"

// `text` in one line (printable.h), with &, <, > and quotes as character references.
std::string HtmlText(std::string_view text);

}  // namespace shardplan::internal

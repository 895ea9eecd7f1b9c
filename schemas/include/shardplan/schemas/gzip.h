// SPDX-License-Identifier: Apache-2.0
// Compressed text.
#pragma once

#include <string>
#include <string_view>

namespace shardplan {

// A gzip file (RFC 1952) of one member without name and time: the same bytes for the same text.
std::string Gzip(std::string_view text);

}  // namespace shardplan

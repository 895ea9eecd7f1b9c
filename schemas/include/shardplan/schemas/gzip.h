// SPDX-License-Identifier: Apache-2.0
// Compressed text.
#pragma once

#include <string>
#include <string_view>

#include "shardplan/schemas/error.h"

namespace shardplan {

// A gzip file (RFC 1952) of one member without name and time: the same bytes for the same text.
std::string Gzip(std::string_view text);

// Whether the bytes begin as a gzip file does.
bool IsGzip(std::string_view bytes);

// What a gzip file of one member holds. kBadInput: it is damaged, or something follows it. kEnvironment: its
// text needs more memory than there is.
Result<std::string> Gunzip(std::string_view bytes);

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
// Files of others where a document is expected.
#pragma once

#include <optional>
#include <string_view>

#include "shardplan/schemas/error.h"

namespace shardplan {

// The kind of the bytes, and the command that takes them, as an error of a reader of documents. Nothing:
// nothing that is known.
std::optional<Error> ForeignFile(std::string_view bytes);

}  // namespace shardplan

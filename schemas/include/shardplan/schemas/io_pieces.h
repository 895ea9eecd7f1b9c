// SPDX-License-Identifier: Apache-2.0
// Writing what is larger than memory should hold: the text comes in pieces and is never whole.
#pragma once

#include <functional>
#include <string>

#include "shardplan/schemas/io.h"

namespace shardplan {

// Gives its text to a sink, piece by piece. It may be asked once.
using TextInPieces = std::function<void(const JsonSink& sink)>;

// The functions of io.h for text in pieces, with the same errors. After a piece that cannot be written the
// others are dropped.
Status WriteFileAtomically(const std::string& path, const TextInPieces& text);
Status WriteStandardOutput(const TextInPieces& text);

}  // namespace shardplan

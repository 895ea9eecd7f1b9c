// SPDX-License-Identifier: Apache-2.0
// Names and messages for a terminal. They come from documents and file names, and may hold anything: what
// would move the cursor, break a line of a table or turn the direction of writing is shown as an escape.
#pragma once

#include <string>
#include <string_view>

namespace shardplan {

// One line: control characters, separators of lines and marks of direction as \n, \t, \x1b, \u202e; bytes
// that are no UTF-8 as \xff.
std::string Printable(std::string_view text);

// The same of several lines, which stay lines.
std::string PrintableLines(std::string_view text);

// Whether all bytes are UTF-8, as JSON has to be.
bool IsUtf8(std::string_view text);

}  // namespace shardplan

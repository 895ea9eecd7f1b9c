// SPDX-License-Identifier: Apache-2.0
// Values as Python expressions.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::cli {

// A string literal in ASCII.
std::string Literal(const std::string& text);
std::string Literal(bool value);
std::string Literal(double value);
std::string Literal(const ReshardAfterForward& value);
std::string Literal(DType dtype);

std::string Tuple(const std::vector<std::string>& texts);
std::string List(const std::vector<std::string>& texts);

// A list of names, runs of numbers as ranges: [f"layers.{i}" for i in range(32)].
std::string NamesExpression(const std::vector<std::string>& names);

}  // namespace shardplan::cli

// SPDX-License-Identifier: Apache-2.0
// Assertions on invariants: what the code relies on and no input can break. Faults of a document, a caller or
// the environment are Errors (error.h), never assertions.
//
//   SHARDPLAN_ASSERT(src < buffers.size(), "CheckInstruction lets only ids of the tables through");
//
// They hold in every build, release included: an answer from a broken state is worse than none. A condition
// is therefore cheap (a comparison, no loop) and has no side effect; the message says why it holds.
#pragma once

#include <source_location>
#include <string_view>

namespace shardplan {

// Whether the value is one of the enumerators: the compiler prints the name of one, and of any other value a
// cast. For tables that must have a row for the last enumerator, too.
template <auto kValue>
consteval bool IsEnumerator() {
  const std::string_view printed = __PRETTY_FUNCTION__;
  const std::string_view value = printed.substr(printed.find("kValue = ") + 9);
  return !value.starts_with('(');
}

// Prints the place, the condition and the message to stderr and aborts.
[[noreturn]] void FailAssertion(const char* condition, const char* message,
                                std::source_location where = std::source_location::current());

}  // namespace shardplan

#define SHARDPLAN_ASSERT(condition, message) \
  (static_cast<bool>(condition) ? static_cast<void>(0) : ::shardplan::FailAssertion(#condition, (message)))

// SPDX-License-Identifier: Apache-2.0
// Differences of two values of a document type, field by field, in words.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "json/types.h"
#include "names/plan_names.h"

namespace shardplan {

// The key that tells a list's elements apart, if they have one: an FQN or a name; otherwise the position.
std::string ElementKey(const void* element, const JsonObjectType* type, std::size_t position);
template <typename T>
std::string ElementKey(const T& element) {
  static_assert(kHasFields<T>);
  return ElementKey(&element, &JsonObjectTypeOf<T>(), 0);
}

// Appends "PATH: X in A, Y in B" for every field that differs. Names of references are those of the two
// plans.
class FieldDiff {
 public:
  FieldDiff(const PlanNames* names_a, const PlanNames* names_b) : names_a_(names_a), names_b_(names_b) {}

  template <typename T>
  void Compare(const std::string& path, const T& a, const T& b) {
    static_assert(kHasFields<T>);
    CompareObjects(path, &a, &b, JsonObjectTypeOf<T>());
  }
  std::vector<std::string> Take() { return std::move(sentences_); }

 private:
  void CompareObjects(const std::string& path, const void* a, const void* b, const JsonObjectType& type);
  void CompareValues(const std::string& name, const JsonField& field, const void* a, const void* b);
  void CompareLists(const std::string& name, const JsonValueType& type, const void* a, const void* b);
  void Report(const std::string& name, const std::string& a, const std::string& b, bool equal);

  const PlanNames* names_a_;
  const PlanNames* names_b_;
  std::vector<std::string> sentences_;
};

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
// Names of what a plan's ids refer to, for documents, text and messages.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "names/ref_kind.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// Views into the plan, which must outlive it and not change.
class PlanNames {
 public:
  explicit PlanNames(const Plan& plan);

  // "" for an id that is out of range.
  std::string_view Name(RefKind kind, std::int64_t id) const;
  // The id is in range and no other element of that kind has its name.
  bool IsUnique(RefKind kind, std::int64_t id) const;
  // The first element of that name.
  std::optional<std::int32_t> Find(RefKind kind, std::string_view name) const;
  std::int64_t Size(RefKind kind) const { return static_cast<std::int64_t>(Table(kind).names.size()); }

 private:
  struct NameTable {
    std::vector<std::string_view> names;
    std::vector<bool> unique;
    std::unordered_map<std::string_view, std::int32_t> first;  // only looked up, never iterated
    void Add(std::string_view name);
  };
  const NameTable& Table(RefKind kind) const { return tables_[static_cast<std::size_t>(kind)]; }

  std::array<NameTable, kRefKinds> tables_;
};

}  // namespace shardplan

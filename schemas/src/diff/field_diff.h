// Differences of two values of a document type, field by field, in words.
#pragma once

#include <fmt/format.h>

#include <string>
#include <type_traits>
#include <vector>

#include "json/json_fields.h"
#include "json/json_writer.h"

namespace shardplan {

template <typename T>
inline constexpr bool kHasFields = !std::is_same_v<std::remove_cvref_t<decltype(kFields<T>)>, std::nullptr_t>;

// A value as inline JSON, shortened.
template <typename T>
std::string ShortJson(const T& value, const PlanNames* names) {
  constexpr std::size_t kMaxBytes = 120;
  JsonWriter writer(names);
  writer.WriteInline(value);
  std::string text = writer.Take();
  if (text.size() > kMaxBytes) text = text.substr(0, kMaxBytes) + "...";
  return text;
}

// What a list's elements are told apart by, where they have it: an FQN or a name.
template <typename T>
std::string ElementKey(const T& element, std::size_t position) {
  if constexpr (requires { element.fqn; }) {
    return DisplayName(element.fqn);
  } else if constexpr (requires { element.name; }) {
    return element.name;
  } else {
    return fmt::format("{}", position);
  }
}

// Appends "PATH: X in A, Y in B" for every field that differs. Names of references are those of the two
// plans.
class FieldDiff {
 public:
  FieldDiff(const PlanNames* names_a, const PlanNames* names_b) : names_a_(names_a), names_b_(names_b) {}

  template <typename T>
  void Compare(const std::string& path, const T& a, const T& b) {
    ForEachField<T>([&](const auto& field) {
      CompareValue(path, field, a.*field.member, b.*field.member);
      return true;
    });
  }
  std::vector<std::string> Take() { return std::move(sentences_); }

 private:
  template <typename Field, typename T>
  void CompareValue(const std::string& path, const Field& field, const T& a, const T& b) {
    const std::string name = fmt::format("{} {}", path, field.name);
    if constexpr (kHasFields<T>) {
      Compare(name, a, b);
    } else if constexpr (requires { a.has_value(); }) {
      const std::string text_a = a.has_value() ? ShortJson(*a, names_a_) : "not given";
      const std::string text_b = b.has_value() ? ShortJson(*b, names_b_) : "not given";
      Report(name, text_a, text_b, a == b);
    } else if constexpr (requires {
                           kHasFields<typename T::value_type>;
                           a.size();
                         }) {
      CompareList(name, a, b);
    } else if constexpr (std::is_same_v<T, std::int32_t>) {
      if (IsNamed(field.spec.ref)) {
        Report(name, Reference(names_a_, field.spec.ref, a), Reference(names_b_, field.spec.ref, b), false);
      } else {
        Report(name, ShortJson(a, nullptr), ShortJson(b, nullptr), a == b);
      }
    } else {
      Report(name, ShortJson(a, names_a_), ShortJson(b, names_b_), a == b);
    }
  }
  template <typename T>
  void CompareList(const std::string& name, const std::vector<T>& a, const std::vector<T>& b) {
    if constexpr (kHasFields<T>) {
      if (a.size() == b.size() && SameKeys(a, b)) {
        for (std::size_t i = 0; i < a.size(); ++i) {
          Compare(fmt::format("{} {}", name, ElementKey(a[i], i)), a[i], b[i]);
        }
        return;
      }
    }
    Report(name, ShortJson(a, names_a_), ShortJson(b, names_b_), a == b);
  }
  void CompareList(const std::string& name, const std::string& a, const std::string& b) {
    Report(name, ShortJson(a, nullptr), ShortJson(b, nullptr), a == b);
  }
  template <typename T>
  static bool SameKeys(const std::vector<T>& a, const std::vector<T>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (ElementKey(a[i], i) != ElementKey(b[i], i)) return false;
    }
    return true;
  }
  static std::string Reference(const PlanNames* names, RefKind kind, std::int32_t id) {
    if (id < 0) return "none";
    if (names == nullptr || id >= names->Size(kind)) return fmt::format("#{}", id);
    return fmt::format("\"{}\"", names->Name(kind, id));
  }
  void Report(const std::string& name, const std::string& a, const std::string& b, bool equal) {
    // Values that differ beyond what is shown still have to be told apart.
    if (equal || (a == b && !a.ends_with("..."))) return;
    sentences_.push_back(a == b ? fmt::format("{}: differs after {}", name, a)
                                : fmt::format("{}: {} in A, {} in B", name, a, b));
  }

  const PlanNames* names_a_;
  const PlanNames* names_b_;
  std::vector<std::string> sentences_;
};

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
// Values that a plan has very many of, in little memory. They behave as std::vector and std::string do for
// those who read them; whoever changes one asks for it by Edit().
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardplan {

// A list whose copies share their elements until one of them is edited. A reference that Edit() gave is used
// before the list is copied, not after.
template <typename T>
class SharedList {
 public:
  using value_type = T;
  using const_iterator = typename std::vector<T>::const_iterator;
  using iterator = const_iterator;

  SharedList() = default;
  SharedList(std::initializer_list<T> values) : SharedList(std::vector<T>(values)) {}
  SharedList(std::vector<T> values) {  // NOLINT(google-explicit-constructor): as a vector is assigned
    if (!values.empty()) values_ = std::make_shared<std::vector<T>>(std::move(values));
  }

  const std::vector<T>& list() const {
    static const std::vector<T> kNone;
    return values_ == nullptr ? kNone : *values_;
  }
  operator const std::vector<T>&() const { return list(); }  // NOLINT(google-explicit-constructor)
  // The list alone, to change it.
  std::vector<T>& Edit() {
    if (values_ == nullptr) {
      values_ = std::make_shared<std::vector<T>>();
    } else if (values_.use_count() > 1) {
      values_ = std::make_shared<std::vector<T>>(*values_);
    }
    return *values_;
  }
  // Both are one list in memory.
  bool Shares(const SharedList& other) const { return values_ == other.values_; }

  bool empty() const { return list().empty(); }
  std::size_t size() const { return list().size(); }
  const_iterator begin() const { return list().begin(); }
  const_iterator end() const { return list().end(); }
  const T& operator[](std::size_t i) const { return list()[i]; }
  const T& front() const { return list().front(); }
  const T& back() const { return list().back(); }
  bool operator==(const SharedList& other) const { return Shares(other) || list() == other.list(); }

 private:
  std::shared_ptr<std::vector<T>> values_;  // null: empty
};

// Ids of which most instructions have none: a pointer where a vector takes three.
class IdList {
 public:
  using value_type = std::int32_t;
  using const_iterator = const std::int32_t*;
  using iterator = const_iterator;

  IdList() = default;
  IdList(std::initializer_list<std::int32_t> ids) : IdList(std::vector<std::int32_t>(ids)) {}
  IdList(std::vector<std::int32_t> ids) {  // NOLINT(google-explicit-constructor): as a vector is assigned
    if (!ids.empty()) ids_ = std::make_unique<std::vector<std::int32_t>>(std::move(ids));
  }
  IdList(const IdList& other) : IdList(other.list()) {}
  IdList(IdList&&) noexcept = default;
  IdList& operator=(const IdList& other) { return *this = IdList(other); }
  IdList& operator=(IdList&&) noexcept = default;
  ~IdList() = default;

  const std::vector<std::int32_t>& list() const {
    static const std::vector<std::int32_t> kNone;
    return ids_ == nullptr ? kNone : *ids_;
  }
  operator const std::vector<std::int32_t>&() const { return list(); }  // NOLINT(google-explicit-constructor)
  std::vector<std::int32_t>& Edit() {
    if (ids_ == nullptr) ids_ = std::make_unique<std::vector<std::int32_t>>();
    return *ids_;
  }
  void clear() { ids_.reset(); }

  bool empty() const { return list().empty(); }
  std::size_t size() const { return list().size(); }
  const std::int32_t* data() const { return list().data(); }
  const_iterator begin() const { return data(); }
  const_iterator end() const { return data() + size(); }
  std::int32_t operator[](std::size_t i) const { return list()[i]; }
  bool operator==(const IdList& other) const { return list() == other.list(); }

 private:
  std::unique_ptr<std::vector<std::int32_t>> ids_;  // null: none
};

// A text whose copies share their characters: one of the few that many instructions have.
class SharedText {
 public:
  SharedText() = default;
  SharedText(std::string_view text) {  // NOLINT(google-explicit-constructor): as a string is assigned
    if (!text.empty()) text_ = std::make_shared<const std::string>(text);
  }
  SharedText(const std::string& text) : SharedText(std::string_view(text)) {}  // NOLINT
  SharedText(const char* text) : SharedText(std::string_view(text)) {}         // NOLINT

  const std::string& str() const {
    static const std::string kNone;
    return text_ == nullptr ? kNone : *text_;
  }
  bool empty() const { return text_ == nullptr; }
  void clear() { text_.reset(); }
  bool operator==(const SharedText& other) const { return text_ == other.text_ || str() == other.str(); }

 private:
  std::shared_ptr<const std::string> text_;  // null: ""
};

}  // namespace shardplan

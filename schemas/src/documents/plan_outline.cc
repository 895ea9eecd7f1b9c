// SPDX-License-Identifier: Apache-2.0
#include "documents/plan_outline.h"

#include <algorithm>
#include <utility>

namespace shardplan {
namespace {

constexpr std::string_view kBegin = "{\n  \"schema\": \"shardplan.plan/1\"";
constexpr std::size_t kWindowBytes = std::size_t{1} << 20;

// The text, byte by byte.
class Cursor {
 public:
  explicit Cursor(DocumentBytes& bytes) : bytes_(bytes) { Fill(0); }

  std::size_t position() const { return begin_ + at_; }
  bool AtEnd() const { return at_ == window_.size(); }
  char Peek() const { return AtEnd() ? '\0' : window_[at_]; }
  void Next() {
    if (++at_ == window_.size()) Fill(begin_ + at_);
  }
  char Take() {
    const char c = Peek();
    if (!AtEnd()) Next();
    return c;
  }
  void SkipSpace() {
    while (!AtEnd() && (Peek() == ' ' || Peek() == '\n' || Peek() == '\t' || Peek() == '\r')) Next();
  }

 private:
  void Fill(std::size_t begin) {
    begin_ = begin;
    at_ = 0;
    window_ = bytes_.Read(begin, std::min(bytes_.size(), begin + kWindowBytes));
  }

  DocumentBytes& bytes_;
  std::string_view window_;
  std::size_t begin_ = 0;
  std::size_t at_ = 0;
};

// Knows strings and brackets: what stands between them is for the reader of the part. Every function returns
// false where the text has another form.
class Outliner {
 public:
  explicit Outliner(DocumentBytes& bytes) : cursor_(bytes) {}

  std::optional<PlanOutline> Run() {
    const bool good = ReadObject([&](const std::string& field) { return ReadField(field); });
    cursor_.SkipSpace();
    if (!good || !cursor_.AtEnd()) return std::nullopt;
    return std::move(outline_);
  }

 private:
  // Copies an object, whose fields `read_value` reads, to the rest.
  template <typename ReadValue>
  bool ReadObject(ReadValue read_value) {
    std::vector<std::string> fields;
    if (!Copy('{')) return false;
    cursor_.SkipSpace();
    if (cursor_.Peek() == '}') return Copy('}');
    while (true) {
      cursor_.SkipSpace();
      std::string field;
      if (!ReadName(field)) return false;
      if (std::ranges::find(fields, field) != fields.end()) return false;
      fields.push_back(field);
      outline_.rest += '"' + field + '"';
      cursor_.SkipSpace();
      if (!Copy(':')) return false;
      cursor_.SkipSpace();
      if (!read_value(field)) return false;
      cursor_.SkipSpace();
      if (cursor_.Peek() == '}') return Copy('}');
      if (!Copy(',')) return false;
    }
  }

  bool ReadField(const std::string& field) {
    if (field == "buffers") return ReadList(outline_.buffers);
    if (field == "segments") return ReadList(outline_.segments);
    if (field == "procedures") return ReadList(outline_.procedures);
    if (field == "steps") return ReadSteps();
    return SkipValue(&outline_.rest);
  }

  bool ReadSteps() {
    if (!Copy('[')) return false;
    while (true) {
      cursor_.SkipSpace();
      std::vector<TextRange>& triggers = outline_.triggers.emplace_back();
      const bool good = ReadObject([&](const std::string& field) {
        return field == "triggers" ? ReadList(triggers) : SkipValue(&outline_.rest);
      });
      if (!good) return false;
      cursor_.SkipSpace();
      if (cursor_.Peek() == ']') return Copy(']');
      if (!Copy(',')) return false;
    }
  }

  // Notes where the elements of a list are; the rest gets an empty one.
  bool ReadList(std::vector<TextRange>& elements) {
    if (cursor_.Take() != '[') return false;
    outline_.rest += "[]";
    cursor_.SkipSpace();
    if (cursor_.Peek() == ']') {
      cursor_.Next();
      return true;
    }
    while (true) {
      cursor_.SkipSpace();
      const std::size_t begin = cursor_.position();
      if (!SkipValue(nullptr)) return false;
      elements.push_back({begin, cursor_.position()});
      cursor_.SkipSpace();
      const char next = cursor_.Take();
      if (next == ']') return true;
      if (next != ',') return false;
    }
  }

  bool ReadName(std::string& name) {
    if (cursor_.Take() != '"') return false;
    while (true) {
      if (cursor_.AtEnd() || cursor_.Peek() == '\\') return false;
      const char c = cursor_.Take();
      if (c == '"') return true;
      name += c;
    }
  }

  // An object, a list, a string or a word of at least one byte. `copy`: where it goes to; may be null.
  bool SkipValue(std::string* copy) {
    std::size_t depth = 0;
    std::size_t length = 0;
    const auto take = [&] {
      const char c = cursor_.Take();
      if (copy != nullptr) *copy += c;
      ++length;
      return c;
    };
    while (!cursor_.AtEnd()) {
      const char next = cursor_.Peek();
      if (depth == 0 && (next == ',' || next == ']' || next == '}' || next == ' ' || next == '\n')) break;
      const char c = take();
      if (c == '{' || c == '[') ++depth;
      if ((c == '}' || c == ']') && --depth == 0) break;
      if (c != '"') continue;
      while (true) {
        if (cursor_.AtEnd()) return false;
        const char in_string = take();
        if (in_string == '\\' && !cursor_.AtEnd()) take();
        if (in_string == '"') break;
      }
      if (depth == 0) break;
    }
    return depth == 0 && length > 0;
  }

  bool Copy(char expected) {
    if (cursor_.AtEnd() || cursor_.Take() != expected) return false;
    outline_.rest += expected;
    return true;
  }

  Cursor cursor_;
  PlanOutline outline_;
};

}  // namespace

std::optional<PlanOutline> OutlineOf(DocumentBytes& bytes) {
  if (bytes.Read(0, std::min(bytes.size(), kBegin.size())) != kBegin) return std::nullopt;
  return Outliner(bytes).Run();
}

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
// The stack machine of pickles, which makes values and calls nothing.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "checkpoints/files/pickle.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

using Kind = PickleValue::Kind;

class PickleReader {
 public:
  explicit PickleReader(std::string_view bytes) : bytes_(bytes) {}

  Result<Pickle> Run() {
    while (!stopped_) {
      opcode_at_ = at_;
      const std::string_view opcode = Take(1);
      if (!opcode.empty()) Execute(static_cast<unsigned char>(opcode[0]));
      if (error_) return std::unexpected(std::move(*error_));
    }
    return std::move(pickle_);
  }

 private:
  // ---- bytes ----

  std::string_view Take(std::uint64_t count) {
    if (count > bytes_.size() - at_) {
      Fail("the pickle ends in the midst of a value", fmt::format("{} bytes more", bytes_.size() - at_),
           fmt::format("{}", count));
      return {};
    }
    const std::string_view taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }
  std::uint64_t Number(std::size_t bytes) {
    std::uint64_t value = 0;
    const std::string_view taken = Take(bytes);
    for (std::size_t i = 0; i < taken.size(); ++i)
      value |= std::uint64_t{static_cast<unsigned char>(taken[i])} << (8 * i);
    return value;
  }
  std::string_view Line() {
    const std::size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) {
      Fail("a name without an end", {}, {});
      return {};
    }
    const std::string_view line = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return line;
  }

  // ---- stack ----

  void Fail(std::string message, std::string found, std::string expected) {
    if (error_) return;
    error_ = Error{.code = ErrorCode::kBadInput,
                   .message = std::move(message),
                   .pointer = fmt::format("byte {}", opcode_at_),
                   .found = std::move(found),
                   .expected = std::move(expected)};
  }
  PickleValue& Make(Kind kind) {
    PickleValue& value = pickle_.values.emplace_back();
    value.kind = kind;
    value.position = opcode_at_;
    return value;
  }
  void Push(PickleValue& value) { stack_.push_back(&value); }
  void PushText(Kind kind, std::string_view text) {
    PickleValue& value = Make(kind);
    value.text = text;
    Push(value);
  }
  void PushInt(std::int64_t integer, Kind kind = Kind::kInt) {
    PickleValue& value = Make(kind);
    value.integer = integer;
    Push(value);
  }
  std::size_t Floor() const { return marks_.empty() ? 0 : marks_.back(); }
  PickleValue* Pop() {
    if (stack_.size() <= Floor()) {
      Fail("a value is missing on the pickle's stack", {}, {});
      return &nothing_;
    }
    PickleValue* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  PickleValue* Top() {
    if (stack_.size() > Floor()) return stack_.back();
    Fail("a value is missing on the pickle's stack", {}, {});
    return &nothing_;
  }
  std::vector<const PickleValue*> PopToMark() {
    if (marks_.empty()) {
      Fail("a mark is missing on the pickle's stack", {}, {});
      return {};
    }
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<const PickleValue*> values(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return values;
  }
  std::vector<const PickleValue*> PopSome(std::size_t count) {
    std::vector<const PickleValue*> values(count);
    for (std::size_t i = count; i-- > 0;) values[i] = Pop();
    return values;
  }
  void PushItems(Kind kind, std::vector<const PickleValue*> items) {
    PickleValue& value = Make(kind);
    value.items = std::move(items);
    Push(value);
  }

  // ---- opcodes ----

  void Execute(unsigned char opcode) {
    if (!Scalar(opcode) && !Container(opcode) && !Reference(opcode))
      Fail("an opcode that no state needs", fmt::format("0x{:02x}", opcode), {});
  }

  bool Scalar(unsigned char opcode) {
    switch (opcode) {
      case 'N':
        Push(Make(Kind::kNone));
        return true;
      case 0x88:
      case 0x89:
        PushInt(opcode == 0x88 ? 1 : 0, Kind::kBool);
        return true;
      case 'J':
        PushInt(static_cast<std::int32_t>(Number(4)));
        return true;
      case 'K':
        PushInt(static_cast<std::int64_t>(Number(1)));
        return true;
      case 'M':
        PushInt(static_cast<std::int64_t>(Number(2)));
        return true;
      case 0x8a:
        PushLong(Take(Number(1)));
        return true;
      case 0x8b:
        PushLong(Take(Number(4)));
        return true;
      case 'G': {
        std::uint64_t bits = 0;
        for (const char byte : Take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
        PickleValue& value = Make(Kind::kFloat);
        value.real = std::bit_cast<double>(bits);
        Push(value);
        return true;
      }
      case 'X':
        PushText(Kind::kString, Take(Number(4)));
        return true;
      case 0x8c:
        PushText(Kind::kString, Take(Number(1)));
        return true;
      case 0x8d:
        PushText(Kind::kString, Take(Number(8)));
        return true;
      case 'T':  // a string of Python 2
        PushText(Kind::kString, Take(Number(4)));
        return true;
      case 'U':
        PushText(Kind::kString, Take(Number(1)));
        return true;
      case 'B':
        PushText(Kind::kBytes, Take(Number(4)));
        return true;
      case 'C':
        PushText(Kind::kBytes, Take(Number(1)));
        return true;
      case 0x8e:
        PushText(Kind::kBytes, Take(Number(8)));
        return true;
      default:
        return false;
    }
  }

  void PushLong(std::string_view digits) {
    if (digits.size() > 8) return PushText(Kind::kLong, digits);
    std::uint64_t value = !digits.empty() && (digits.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;
    for (std::size_t i = digits.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(digits[i]);
    PushInt(static_cast<std::int64_t>(value));
  }

  bool Container(unsigned char opcode) {
    switch (opcode) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case ')':
        Push(Make(Kind::kTuple));
        return true;
      case 't':
        PushItems(Kind::kTuple, PopToMark());
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        PushItems(Kind::kTuple, PopSome(opcode - 0x84U));
        return true;
      case ']':
        Push(Make(Kind::kList));
        return true;
      case '}':
        Push(Make(Kind::kDict));
        return true;
      case 0x8f:
        Push(Make(Kind::kSet));
        return true;
      case 0x91:
        PushItems(Kind::kFrozenSet, PopToMark());
        return true;
      case 'a':
        Append(PopSome(1));
        return true;
      case 'e':
      case 0x90:
        Append(PopToMark());
        return true;
      case 's':
        SetItems(PopSome(2));
        return true;
      case 'u':
        SetItems(PopToMark());
        return true;
      default:
        return false;
    }
  }

  void Append(const std::vector<const PickleValue*>& values) {
    PickleValue* target = Top();
    if (target->kind != Kind::kList && target->kind != Kind::kSet && target->kind != Kind::kObject)
      return Fail("elements are appended to what is no list", {}, {});
    auto& elements = target->kind == Kind::kObject ? target->appended : target->items;
    elements.insert(elements.end(), values.begin(), values.end());
  }
  void SetItems(const std::vector<const PickleValue*>& values) {
    PickleValue* target = Top();
    if ((target->kind != Kind::kDict && target->kind != Kind::kObject) || values.size() % 2 != 0)
      return Fail("keys are set in what is no dict", {}, {});
    auto& pairs = target->kind == Kind::kObject ? target->pairs : target->items;
    pairs.insert(pairs.end(), values.begin(), values.end());
  }

  bool Reference(unsigned char opcode) {
    switch (opcode) {
      case 0x80:
        if (const std::uint64_t version = Number(1); version > 5)
          Fail("a protocol that is not known", fmt::format("{}", version), "2 to 5");
        return true;
      case 0x95:
        (void)Number(8);
        return true;
      case '.':
        Stop();
        return true;
      case '0':
        (void)Pop();
        return true;
      case 'q':
        memo_[Number(1)] = Top();
        return true;
      case 'r':
        memo_[Number(4)] = Top();
        return true;
      case 0x94:
        memo_[memo_.size()] = Top();
        return true;
      case 'h':
        Get(Number(1));
        return true;
      case 'j':
        Get(Number(4));
        return true;
      case 'c': {
        const std::string_view module = Line();
        PushGlobal(module, Line());
        return true;
      }
      case 0x93: {
        const PickleValue* name = Pop();
        const PickleValue* module = Pop();
        if (name->kind != Kind::kString || module->kind != Kind::kString)
          Fail("a name that is no string", {}, {});
        PushGlobal(module->text, name->text);
        return true;
      }
      case 'R':
      case 0x81:
        Call(opcode == 0x81);
        return true;
      case 'b': {
        const PickleValue* state = Pop();
        PickleValue* target = Top();
        if (target->kind != Kind::kObject) Fail("a state for what is no object", {}, {});
        target->state = state;
        return true;
      }
      case 'Q':
        PushItems(Kind::kPersistent, PopSome(1));
        return true;
      default:
        return false;
    }
  }

  void Stop() {
    pickle_.root = Pop();
    stopped_ = true;
    if (!stack_.empty() || !marks_.empty()) Fail("values are left on the pickle's stack", {}, {});
  }
  void Get(std::uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) return Fail("a value that was not kept", fmt::format("{}", index), {});
    stack_.push_back(found->second);
  }
  void PushGlobal(std::string_view module, std::string_view name) {
    if (error_) return;
    const std::string global = fmt::format("{} {}", module, name);
    if (!IsKnownGlobal(global)) {
      return Fail("the pickle needs code that is not run, or a class that is not known",
                  Printable(fmt::format("{}.{}", module, name)),
                  "tensors, numbers, strings, and containers of them");
    }
    PushText(Kind::kGlobal, global);
  }
  void Call(bool is_new) {
    std::vector<const PickleValue*> parts = PopSome(2);
    if (parts[0]->kind != Kind::kGlobal || parts[1]->kind != Kind::kTuple)
      return Fail("a call of what is no name, or without arguments", {}, {});
    PushItems(Kind::kObject, std::move(parts));
    stack_.back()->is_new = is_new;
  }

  std::string_view bytes_;
  std::size_t at_ = 0;
  std::size_t opcode_at_ = 0;
  bool stopped_ = false;
  std::optional<Error> error_;
  Pickle pickle_;
  PickleValue nothing_;
  std::vector<PickleValue*> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, PickleValue*> memo_;
};

}  // namespace

Result<Pickle> ReadPickle(std::string_view bytes) { return PickleReader(bytes).Run(); }

}  // namespace shardplan

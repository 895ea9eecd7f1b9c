// SPDX-License-Identifier: Apache-2.0
// Pickles as data: a tree of values. Nothing is imported or called; names that a pickle refers to are those
// of an allow-list, everything else is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shardplan/schemas/error.h"

namespace shardplan {

struct PickleValue {
  enum class Kind : std::uint8_t {
    kNone,
    kBool,
    kInt,
    kLong,  // of more than 8 bytes
    kFloat,
    kString,
    kBytes,
    kTuple,
    kList,
    kDict,
    kSet,
    kFrozenSet,
    kGlobal,
    kObject,
    kPersistent
  };
  Kind kind = Kind::kNone;
  bool is_new = false;       // kObject: made by __new__, not by a call
  std::int64_t integer = 0;  // kBool, kInt
  double real = 0;           // kFloat
  std::string text;          // kString, kBytes; kLong: little-endian two's complement; kGlobal: "module name"
  // Elements; kDict: keys and values in turn; kObject: what is called and its arguments; kPersistent: the id.
  std::vector<const PickleValue*> items;
  std::vector<const PickleValue*> pairs;     // kObject: keys and values set afterwards
  std::vector<const PickleValue*> appended;  // kObject: elements appended afterwards
  const PickleValue* state = nullptr;        // kObject, kDict: what it was built with afterwards
  std::size_t position = 0;                  // in the pickle
};

// Holds the values; they point to one another, and may do so in circles.
struct Pickle {
  std::deque<PickleValue> values;
  const PickleValue* root = nullptr;
};

// kBadInput with the byte of the pickle at which it is wrong.
Result<Pickle> ReadPickle(std::string_view bytes);

// Whether pickles may refer to it ("module name").
bool IsKnownGlobal(std::string_view name);

// ---- looking at values ----

bool IsGlobal(const PickleValue& value, std::string_view name);
// An object that `name` ("module name") was called, or made, for.
bool IsObjectOf(const PickleValue& value, std::string_view name);
// A dict, or an OrderedDict, defaultdict or Counter.
bool IsMapping(const PickleValue& value);
// Calls visit(key, value) until it returns false; false if it did.
template <typename Visit>
bool ForEachPair(const PickleValue& value, const Visit& visit) {
  for (const auto* pairs : {&value.items, &value.pairs}) {
    if (pairs == &value.items && value.kind == PickleValue::Kind::kObject) continue;
    for (std::size_t i = 0; i + 1 < pairs->size(); i += 2) {
      if (!visit(*(*pairs)[i], *(*pairs)[i + 1])) return false;
    }
  }
  return true;
}
// The value of a string key of a mapping, or nullptr.
const PickleValue* Find(const PickleValue& mapping, std::string_view key);
// An integer, a tuple of integers, torch.Size of one: false if it is another value.
bool ToInteger(const PickleValue& value, std::int64_t& integer);
bool ToIntegers(const PickleValue& value, std::vector<std::int64_t>& integers);

// ---- writing, protocol 2, with the opcodes that torch.load(weights_only=True) reads ----

class PickleWriter {
 public:
  PickleWriter() : bytes_("\x80\x02") {}
  void None() { bytes_ += 'N'; }
  void Bool(bool value) { bytes_ += value ? '\x88' : '\x89'; }
  void Int(std::int64_t value);
  void Float(double value);
  void String(std::string_view text);
  void Global(std::string_view module_and_name);
  void Mark() { bytes_ += '('; }
  void Op(char opcode) { bytes_ += opcode; }
  void EmptyTuple() { bytes_ += ')'; }
  void Size(const std::vector<std::int64_t>& size);       // torch.Size
  void IntTuple(const std::vector<std::int64_t>& items);  // a tuple
  // A value that was read. kBadInput: nested too deep, or with a tensor in it.
  Status Value(const PickleValue& value) {
    known_.clear();  // values of another pickle may have had the same places
    return Value(value, 0);
  }
  std::string Finish() {
    bytes_ += '.';
    return std::move(bytes_);
  }

 private:
  Status Value(const PickleValue& value, int depth);
  Status Values(const std::vector<const PickleValue*>& values, int depth);
  Status Container(const PickleValue& value, int depth);
  Status Object(const PickleValue& value, int depth);
  void Remember(const PickleValue& value);

  std::string bytes_;
  std::unordered_map<const PickleValue*, std::uint32_t> known_;  // written, by their memo
  std::uint32_t memos_ = 0;
};

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <limits>

#include "checkpoints/files/pickle.h"

namespace shardplan {
namespace {

using Kind = PickleValue::Kind;
constexpr int kMostDepth = 200;

void AppendNumber(std::string& bytes, std::uint64_t value, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) bytes += static_cast<char>(value >> (8 * i));
}

}  // namespace

void PickleWriter::Int(std::int64_t value) {
  if (value >= 0 && value < 256) {
    bytes_ += 'K';
    AppendNumber(bytes_, static_cast<std::uint64_t>(value), 1);
  } else if (value >= std::numeric_limits<std::int32_t>::min() &&
             value <= std::numeric_limits<std::int32_t>::max()) {
    bytes_ += 'J';
    AppendNumber(bytes_, static_cast<std::uint64_t>(value), 4);
  } else {
    bytes_ += "\x8a\x08";
    AppendNumber(bytes_, static_cast<std::uint64_t>(value), 8);
  }
}

void PickleWriter::Float(double value) {
  bytes_ += 'G';
  const auto bits = std::bit_cast<std::uint64_t>(value);
  for (int shift = 56; shift >= 0; shift -= 8) bytes_ += static_cast<char>(bits >> shift);
}

void PickleWriter::String(std::string_view text) {
  bytes_ += 'X';
  AppendNumber(bytes_, text.size(), 4);
  bytes_ += text;
}

void PickleWriter::Global(std::string_view module_and_name) {
  const std::size_t space = module_and_name.find(' ');
  bytes_ += 'c';
  bytes_ += module_and_name.substr(0, space);
  bytes_ += '\n';
  bytes_ += module_and_name.substr(space + 1);
  bytes_ += '\n';
}

void PickleWriter::IntTuple(const std::vector<std::int64_t>& items) {
  if (items.empty()) return EmptyTuple();
  Mark();
  for (const std::int64_t item : items) Int(item);
  Op('t');
}

void PickleWriter::Size(const std::vector<std::int64_t>& size) {
  Global("torch Size");
  IntTuple(size);
  Op('\x85');
  Op('R');
}

void PickleWriter::Remember(const PickleValue& value) {
  if (!known_.try_emplace(&value, memos_).second) return;
  bytes_ += 'r';
  AppendNumber(bytes_, memos_++, 4);
}

Status PickleWriter::Values(const std::vector<const PickleValue*>& values, int depth) {
  for (const PickleValue* value : values) {
    if (Status status = Value(*value, depth + 1); !status) return status;
  }
  return {};
}

Status PickleWriter::Value(const PickleValue& value, int depth) {
  if (depth > kMostDepth) return MakeInputError({}, "values are nested too deep to be written");
  if (const auto known = known_.find(&value); known != known_.end()) {
    bytes_ += 'j';
    AppendNumber(bytes_, known->second, 4);
    return {};
  }
  switch (value.kind) {
    case Kind::kNone:
      None();
      return {};
    case Kind::kBool:
      Bool(value.integer != 0);
      return {};
    case Kind::kInt:
      Int(value.integer);
      return {};
    case Kind::kLong:
      bytes_ += value.text.size() < 256 ? '\x8a' : '\x8b';
      AppendNumber(bytes_, value.text.size(), value.text.size() < 256 ? 1 : 4);
      bytes_ += value.text;
      return {};
    case Kind::kFloat:
      Float(value.real);
      return {};
    case Kind::kString:
      String(value.text);
      return {};
    case Kind::kGlobal:
      Global(value.text);
      return {};
    case Kind::kPersistent:
      return MakeInputError({}, "a tensor within a value that is no dict or list of its own");
    case Kind::kObject:
      return Object(value, depth);
    default:
      return Container(value, depth);
  }
}

Status PickleWriter::Container(const PickleValue& value, int depth) {
  if (value.kind == Kind::kBytes) {
    Global("_codecs encode");
    std::string text;  // each byte as the character of its number
    for (const char byte : value.text) {
      const auto code = static_cast<unsigned char>(byte);
      if (code >= 0x80) text += static_cast<char>(0xc0 | code >> 6);
      text += static_cast<char>(code < 0x80 ? code : 0x80 | (code & 0x3f));
    }
    String(text);
    String("latin1");
    Op('\x86');
    Op('R');
    Remember(value);
    return {};
  }
  if (value.kind == Kind::kTuple) {
    if (value.items.empty()) {
      EmptyTuple();
      return {};
    }
    Mark();
    if (Status status = Values(value.items, depth); !status) return status;
    Op('t');
    Remember(value);
    return {};
  }
  const bool is_set = value.kind == Kind::kSet || value.kind == Kind::kFrozenSet;
  if (is_set) Global(value.kind == Kind::kSet ? "__builtin__ set" : "__builtin__ frozenset");
  Op(value.kind == Kind::kDict ? '}' : ']');
  if (!is_set) Remember(value);
  if (!value.items.empty()) {
    Mark();
    if (Status status = Values(value.items, depth); !status) return status;
    Op(value.kind == Kind::kDict ? 'u' : 'e');
  }
  if (is_set) {
    Op('\x85');
    Op('R');
    Remember(value);
  }
  return {};
}

Status PickleWriter::Object(const PickleValue& value, int depth) {
  if (Status status = Values(value.items, depth); !status) return status;
  Op(value.is_new ? '\x81' : 'R');
  Remember(value);
  if (!value.appended.empty()) {
    Mark();
    if (Status status = Values(value.appended, depth); !status) return status;
    Op('e');
  }
  if (!value.pairs.empty()) {
    Mark();
    if (Status status = Values(value.pairs, depth); !status) return status;
    Op('u');
  }
  if (value.state == nullptr) return {};
  if (Status status = Value(*value.state, depth + 1); !status) return status;
  Op('b');
  return {};
}

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
// Types as data, for the reader and the writer. reader.cc and writer.cc are compiled once for all
// types; a type costs the compiler a table (tables.h).
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "json/fields.h"
#include "json/tape.h"
#include "shardplan/schemas/program.h"

namespace shardplan {

class JsonReader;
class JsonWriter;

struct JsonListType;
struct JsonObjectType;

// Values of one type. Each function is given values of that type.
struct JsonValueType {
  bool (*read)(JsonReader& reader, JsonIndex node, void* value, const Spec& spec);
  void (*write)(JsonWriter& writer, const void* value, const Spec& spec, int indent);
  bool (*equal)(const void* a, const void* b);
  bool is_block;
  bool is_string;
  bool is_id;                         // what a reference by name is stored in
  bool (*given)(const void* value);   // of an optional; null for other types
  const JsonListType* list;           // null unless it is a list
  const JsonObjectType& (*object)();  // null unless it is a struct with a list of fields
};

struct JsonListType {
  const JsonValueType* element;
  std::size_t (*size)(const void* list);
  const void* (*at)(const void* list, std::size_t position);
};

struct JsonField {
  std::string_view name;
  bool required;
  bool lines;
  Spec spec;
  RefKind defines;
  const JsonValueType* type;
  void* (*in)(void* object);  // where the field is in an object
  const void* Of(const void* object) const { return in(const_cast<void*>(object)); }  // only read
};

struct JsonObjectType {
  std::span<const JsonField> fields;
  std::string_view tag;  // of an alternative of a variant
  bool is_event;
  const void* (*defaults)();                                         // an object with default values
  void (*after_reading)(void* object, InstructionSharing& sharing);  // may be null
};

// The type of a struct with a list of fields. One file of each document defines it for the types of the
// document:
//   #include "json/tables.h"
//   template const JsonObjectType& JsonObjectTypeOf<Trace>();
template <typename T>
const JsonObjectType& JsonObjectTypeOf();

// An alternative of a variant.
struct JsonAlternative {
  const JsonObjectType& (*type)();
  void* (*emplace)(void* variant);  // makes it the variant's value
};

}  // namespace shardplan

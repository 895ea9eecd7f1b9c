// SPDX-License-Identifier: Apache-2.0
// The JSON Schema files (schemas/json) made from the field lists of the documents.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace shardplan {

struct JsonSchemaFile {
  std::string name;  // "trace.schema.json"
  std::string text;
};

// A file for each of the documents.
std::vector<JsonSchemaFile> JsonSchemaFiles();

// "/plan/unit/fqn" of every field and type that says nothing of itself.
std::vector<std::string> FieldsWithoutWords();

}  // namespace shardplan

// write_json_schemas DIRECTORY: writes the JSON Schema file of every document there (tools/update_schemas).
#include <cstdio>

#include "shardplan/schemas/io.h"
#include "tests/schemas/json_schema/json_schema.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: write_json_schemas DIRECTORY\n", stderr);
    return 2;
  }
  for (const shardplan::JsonSchemaFile& file : shardplan::JsonSchemaFiles()) {
    const std::string path = std::string(argv[1]) + "/" + file.name;
    const shardplan::Status written = shardplan::WriteFileAtomically(path, file.text);
    if (!written) {
      std::fprintf(stderr, "%s\n", shardplan::ToString(written.error()).c_str());
      return 4;
    }
  }
  return 0;
}

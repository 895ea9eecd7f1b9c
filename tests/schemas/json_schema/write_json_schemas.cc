// write_json_schemas DIRECTORY PAGE: writes the JSON Schema file of every document there, and the table of
// instructions into the page (dev/update_schemas).
#include <cstdio>
#include <string>

#include "shardplan/schemas/io.h"
#include "tests/schemas/json_schema/instruction_table.h"
#include "tests/schemas/json_schema/json_schema.h"

namespace {

using shardplan::Status;

Status WriteAll(const std::string& folder, const std::string& page) {
  for (const shardplan::JsonSchemaFile& file : shardplan::JsonSchemaFiles()) {
    if (Status written = shardplan::WriteFileAtomically(folder + "/" + file.name, file.text); !written)
      return written;
  }
  const shardplan::Result<std::string> text = shardplan::ReadFile(page);
  if (!text) return std::unexpected(text.error());
  const std::string with_table = shardplan::WithInstructionTable(*text);
  if (with_table.empty()) return shardplan::MakeInputError("", page + ": there is no table of instructions");
  return shardplan::WriteFileAtomically(page, with_table);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: write_json_schemas DIRECTORY PAGE\n", stderr);
    return 2;
  }
  const Status written = WriteAll(argv[1], argv[2]);
  if (written) return 0;
  std::fprintf(stderr, "%s\n", shardplan::ToString(written.error()).c_str());
  return 4;
}

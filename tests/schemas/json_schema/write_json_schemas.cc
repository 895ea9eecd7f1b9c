// SPDX-License-Identifier: Apache-2.0
// write_json_schemas DIRECTORY PLAN_PAGE VERSIONS_PAGE: writes the JSON Schema file of every document there,
// the table of instructions into the one page and that of PyTorch's releases into the other
// (dev/update_schemas).
#include <cstdio>
#include <string>
#include <string_view>

#include "shardplan/schemas/io.h"
#include "tests/schemas/json_schema/instruction_table.h"
#include "tests/schemas/json_schema/json_schema.h"
#include "tests/schemas/json_schema/pytorch_rules_table.h"

namespace {

using shardplan::Status;

Status Rewrite(const std::string& page, std::string (*with_table)(std::string_view)) {
  const shardplan::Result<std::string> text = shardplan::ReadFile(page);
  if (!text) return std::unexpected(text.error());
  const std::string rewritten = with_table(*text);
  if (rewritten.empty()) return shardplan::MakeInputError("", page + ": its table is not there");
  return shardplan::WriteFileAtomically(page, rewritten);
}

Status WriteAll(const std::string& folder, const std::string& plan_page, const std::string& versions_page) {
  for (const shardplan::JsonSchemaFile& file : shardplan::JsonSchemaFiles()) {
    if (Status written = shardplan::WriteFileAtomically(folder + "/" + file.name, file.text); !written)
      return written;
  }
  if (Status written = Rewrite(plan_page, shardplan::WithInstructionTable); !written) return written;
  return Rewrite(versions_page, shardplan::WithPyTorchRulesTable);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: write_json_schemas DIRECTORY PLAN_PAGE VERSIONS_PAGE\n", stderr);
    return 2;
  }
  const Status written = WriteAll(argv[1], argv[2], argv[3]);
  if (written) return 0;
  std::fprintf(stderr, "%s\n", shardplan::ToString(written.error()).c_str());
  return 4;
}

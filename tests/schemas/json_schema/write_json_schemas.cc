// SPDX-License-Identifier: Apache-2.0
// write_json_schemas DIRECTORY PAGES: writes the JSON Schema file of every document into the one folder, and
// the tables that pages have from the sources into the pages of the other (dev/update_schemas).
#include <cstdio>
#include <string>
#include <string_view>

#include "shardplan/schemas/io.h"
#include "tests/schemas/json_schema/json_schema.h"
#include "tests/schemas/json_schema/page_tables.h"

namespace {

using shardplan::Status;

Status Rewrite(const std::string& page, std::string (*with_table)(std::string_view)) {
  const shardplan::Result<std::string> text = shardplan::ReadFile(page);
  if (!text) return std::unexpected(text.error());
  const std::string rewritten = with_table(*text);
  if (rewritten.empty()) return shardplan::MakeInputError("", page + ": its table is not there");
  return shardplan::WriteFileAtomically(page, rewritten);
}

Status WriteAll(const std::string& folder, const std::string& pages) {
  for (const shardplan::JsonSchemaFile& file : shardplan::JsonSchemaFiles()) {
    if (Status written = shardplan::WriteFileAtomically(folder + "/" + file.name, file.text); !written)
      return written;
  }
  for (const shardplan::PageTable& table : shardplan::PageTables()) {
    if (Status written = Rewrite(pages + "/" + table.page, table.with); !written) return written;
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: write_json_schemas DIRECTORY PAGES\n", stderr);
    return 2;
  }
  const Status written = WriteAll(argv[1], argv[2]);
  if (written) return 0;
  std::fprintf(stderr, "%s\n", shardplan::ToString(written.error()).c_str());
  return 4;
}

// SPDX-License-Identifier: Apache-2.0
// For tests in other languages: what the C++ reader says of documents.
//   read_documents                 documents on stdin, each ended by a NUL byte -> one line each on stdout:
//                                  "ok", or "error<TAB>pointer<TAB>message"
//   read_documents write SEED      a random document of each kind on stdout, each ended by a NUL byte
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <string>

#include "shardplan/schemas/io.h"
#include "tests/support/random_documents.h"

namespace {

void Write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fputc('\0', stdout);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace shardplan;
  if (argc == 3 && std::string(argv[1]) == "write") {
    const std::uint64_t seed = std::strtoull(argv[2], nullptr, 10);
    Write(ToJson(test::RandomTrace(seed)));
    Write(ToJson(test::RandomCluster(seed)));
    Write(ToJson(test::RandomStrategy(seed)));
    Write(ToJson(test::RandomPlan(seed)));
    Write(ToJson(test::RandomReport(seed)));
    Write(ToJson(test::RandomStateLayout(seed)));
    Write(ToJson(test::RandomReshard(seed)));
    return 0;
  }
  std::string text;
  while (std::getline(std::cin, text, '\0')) {
    const Result<Document> document = ParseDocument(text);
    if (document.has_value()) {
      std::puts("ok");
    } else {
      std::printf("error\t%s\t%s\n", document.error().pointer.c_str(), document.error().message.c_str());
    }
  }
  return 0;
}

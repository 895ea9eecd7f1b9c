// SPDX-License-Identifier: Apache-2.0
// docs/reference/verifier.md and the code: every rule has a section, and the functions that a section names
// are there.
#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "shardplan/schemas/io.h"
#include "shardplan/verifier/verifier.h"

namespace shardplan {
namespace {

const std::string kRoot = SHARDPLAN_SOURCE_DIR;
const std::string kFolder = "schemas/verifier/";

std::string Text(const std::string& path) {
  const Result<std::string> text = ReadFile(kRoot + "/" + path);
  EXPECT_TRUE(text.has_value()) << path;
  return text.value_or("");
}

std::set<std::string> RuleNames() {
  std::set<std::string> names;
  for (int i = 0; Name(static_cast<Rule>(i)) != "?"; ++i) names.emplace(Name(static_cast<Rule>(i)));
  return names;
}

// The text of each "### a, b" section below "## Rules", by each of the names in its heading.
std::map<std::string, std::string> Sections() {
  const std::string page = Text("docs/reference/verifier.md");
  const std::size_t begin = page.find("\n## Rules\n");
  EXPECT_NE(begin, std::string::npos);
  const std::string rules = page.substr(begin, page.find("\n## ", begin + 5) - begin);
  std::map<std::string, std::string> sections;
  for (std::size_t at = rules.find("\n### "); at != std::string::npos;) {
    const std::size_t next = rules.find("\n### ", at + 5);
    const std::string section = rules.substr(at + 5, next - at - 5);
    std::string heading = section.substr(0, section.find('\n'));
    static const std::regex kName("[a-z_]+");
    for (std::sregex_iterator name(heading.begin(), heading.end(), kName); name != std::sregex_iterator();
         ++name) {
      sections[name->str()] = section;
    }
    at = next;
  }
  return sections;
}

struct Proof {
  std::string file, function;
};
// `folder/file.cc:Function`, as often as the section says it.
std::vector<Proof> Proofs(const std::string& section) {
  static const std::regex kProof("`([a-z_/]+\\.cc):([A-Za-z]+)`");
  std::vector<Proof> proofs;
  for (std::sregex_iterator proof(section.begin(), section.end(), kProof); proof != std::sregex_iterator();
       ++proof) {
    proofs.push_back({(*proof)[1], (*proof)[2]});
  }
  return proofs;
}

TEST(RulesPage, HasASectionForEveryRuleAndForNothingElse) {
  std::set<std::string> on_page;
  for (const auto& [name, section] : Sections()) on_page.insert(name);
  EXPECT_EQ(RuleNames().size(), 21U);
  EXPECT_EQ(on_page, RuleNames());
}

TEST(RulesPage, EverySectionNamesFunctionsThatTheCodeDefines) {
  for (const auto& [name, section] : Sections()) {
    const std::vector<Proof> proofs = Proofs(section);
    EXPECT_FALSE(proofs.empty()) << name << " names no `folder/file.cc:Function` that is its proof";
    for (const Proof& proof : proofs) {
      // A definition starts a line; a call is indented.
      const std::regex definition("(^|\n)[A-Za-z0-9_:<>, ]*[ >]" + proof.function + "\\(");
      EXPECT_TRUE(std::regex_search(Text("schemas/" + proof.file), definition))
          << name << ": " << proof.file << " does not define " << proof.function;
    }
  }
}

// The name of a rule's function starts with the rule's: read_before_write, ReadBeforeWrite.
TEST(RulesPage, EveryRuleFunctionIsNamedOnThePage) {
  std::set<std::string> named;
  for (const auto& [name, section] : Sections()) {
    for (const Proof& proof : Proofs(section)) named.insert(proof.function);
  }
  const std::string header = Text(kFolder + "rules.h");
  const std::string declared = header.substr(0, header.find("// ---- what the gradient rules"));
  static const std::regex kFunction("\n[A-Za-z_:<>0-9]+ ([A-Z][A-Za-z]+)\\(");
  int functions = 0;
  for (std::sregex_iterator f(declared.begin(), declared.end(), kFunction); f != std::sregex_iterator();
       ++f) {
    const std::string function = (*f)[1];
    if (function == "ExpectedDivisor") continue;  // not a rule: what grad_division compares with
    EXPECT_TRUE(named.contains(function)) << function << " is in no section of docs/reference/verifier.md";
    ++functions;
  }
  EXPECT_GT(functions, 20);
}

}  // namespace
}  // namespace shardplan

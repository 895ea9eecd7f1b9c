// SPDX-License-Identifier: Apache-2.0
// shardplan-conformance DIR [CASE...]: plans every recording in DIR and compares the plan's events with what
// PyTorch did.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <sstream>
#include <system_error>

#include "events.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"

namespace {

using namespace shardplan;
namespace fs = std::filesystem;

// The cases of the folder in order of their names: those wanted, or all.
Result<std::vector<std::string>> FindCases(const std::string& folder,
                                           const std::vector<std::string>& wanted) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() == ".log") names.push_back(entry->path().stem().string());
  }
  const auto bad = [&](std::string message) {
    return std::unexpected(Error{ErrorCode::kBadInput, std::move(message), folder, "", "", ""});
  };
  if (error) return bad("cannot read the folder of recordings: " + error.message());
  if (names.empty()) return bad("the folder has no recording (CASE.log)");
  std::ranges::sort(names);
  for (const std::string& name : wanted) {
    if (!std::ranges::binary_search(names, name)) return bad("the folder has no recording " + name + ".log");
  }
  if (wanted.empty()) return names;
  std::erase_if(names,
                [&](const std::string& name) { return std::ranges::find(wanted, name) == wanted.end(); });
  return names;
}

// Whether the case matches, in words on standard output. kEnvironment where they cannot be written.
Result<bool> CompareCase(const std::string& folder, const std::string& name) {
  const Result<conformance::Recording> recording = conformance::ReadRecording(folder + "/" + name);
  if (!recording) return std::unexpected(recording.error());
  const conformance::Comparison comparison = conformance::Compare(*recording);
  std::string text = Printable(name);
  if (comparison.matches) {
    text += fmt::format(": matches ({} events)\n", recording->events.size());
    if (!comparison.objection.empty()) text += fmt::format("    but {}\n", comparison.objection);
  } else {
    text += ": differs at " + comparison.difference;
    if (!text.ends_with("\n")) text += "\n";
  }
  if (Status written = WriteStandardOutput(PrintableLines(text)); !written)
    return std::unexpected(written.error());
  return comparison.matches;
}

int Fail(const Error& error) {
  std::fputs(fmt::format("shardplan conformance: {}\n", ToString(error)).c_str(), stderr);
  return ExitCode(error.code);
}

// The exit code. A recording that cannot be read does not keep the others from being compared.
int Run(const std::string& folder, const std::vector<std::string>& wanted) {
  const Result<std::vector<std::string>> names = FindCases(folder, wanted);
  if (!names) return Fail(names.error());
  std::size_t matched = 0;
  std::optional<int> failed;
  for (const std::string& name : *names) {
    const Result<bool> matches = CompareCase(folder, name);
    if (matches) {
      matched += *matches ? 1 : 0;
    } else {
      failed = Fail(matches.error());
      if (matches.error().code == ErrorCode::kEnvironment) return *failed;
    }
  }
  const Status written = WriteStandardOutput(fmt::format("matched {} of {} cases\n", matched, names->size()));
  if (!written) return Fail(written.error());
  return failed.value_or(matched == names->size() ? 0 : ExitCode(ErrorCode::kNegative));
}

}  // namespace

int main(int argc, char** argv) {
  (void)std::signal(SIGPIPE, SIG_IGN);  // a pipe that nobody reads is an error that is told
  CLI::App app{"Plan every recording of a folder and compare the plan's events with what PyTorch did.",
               "shardplan-conformance"};
  std::string folder;
  std::vector<std::string> wanted;
  app.add_option("DIR", folder, "A folder of recordings (CASE.log)")->required();
  app.add_option("CASE", wanted, "Names of recordings of the folder (default: all)");
  app.footer(
      "A plan has no log: what PyTorch would log of it is read out of its triggers and instructions by rules "
      "of\n"
      "this program's own (docs/internals/conformance.md).\n"
      "Exit codes: 0 every case matches; 1 one differs; 2 usage; 3 a folder or a recording is missing or "
      "damaged.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream text, wrong;
    const bool asked = app.exit(error, text, wrong) == 0;
    std::fputs(PrintableLines(wrong.str()).c_str(), stderr);
    if (!asked) return ExitCode(ErrorCode::kUsage);
    const Status written = WriteStandardOutput(text.str());
    return written ? 0 : Fail(written.error());
  }
  return Run(folder, wanted);
}

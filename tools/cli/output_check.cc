// SPDX-License-Identifier: Apache-2.0
// Checks of a command's outputs before it works: none is an input or another output.
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "shardplan/schemas/io.h"
#include "support.h"

namespace shardplan::cli {
namespace {

// The file that a name stands for: an inode, or a place where a file will be.
struct Identity {
  dev_t device = 0;
  ino_t inode = 0;
  std::string place;  // of what does not exist

  bool operator==(const Identity&) const = default;
};

// A device (a terminal, /dev/null) is no file that one output would take from another.
std::optional<Identity> IdentityOf(const struct stat& status) {
  if (S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode)) return std::nullopt;
  return Identity{.device = status.st_dev, .inode = status.st_ino, .place = {}};
}

std::optional<Identity> IdentityOf(const std::string& path) {
  struct stat status = {};
  if (path == "-") {
    if (::fstat(STDOUT_FILENO, &status) == 0 && S_ISREG(status.st_mode)) return IdentityOf(status);
    return Identity{.place = "-"};
  }
  if (::stat(path.c_str(), &status) == 0) return IdentityOf(status);
  const Result<std::string> target = WritableTarget(path);
  return target ? std::optional(Identity{.place = *target}) : std::nullopt;
}

std::string FlagText(const OutputFile& output) {
  return output.flag.empty() ? "the text on standard output" : fmt::format("{} {}", output.flag, output.path);
}

std::unexpected<Error> Refused(std::string message, const OutputFile& output, std::string expected) {
  return std::unexpected(Error{.code = ErrorCode::kUsage,
                               .message = std::move(message),
                               .found = FlagText(output),
                               .expected = std::move(expected)});
}

}  // namespace

bool HasStandardOutput(const std::vector<OutputFile>& outputs) {
  return std::ranges::find(outputs, "-", &OutputFile::path) != outputs.end();
}

Status CheckOutputs(const std::vector<std::string>& inputs, const std::vector<OutputFile>& outputs,
                    bool prints) {
  std::vector<OutputFile> written;
  std::ranges::copy_if(outputs, std::back_inserter(written),
                       [](const OutputFile& output) { return !output.path.empty(); });
  if (prints) written.push_back({"", "-"});
  std::vector<std::pair<Identity, const OutputFile*>> seen;
  for (const OutputFile& output : written) {
    if (output.path != "-") {
      if (const Result<std::string> target = WritableTarget(output.path); !target)
        return std::unexpected(target.error());
    }
    const std::optional<Identity> identity = IdentityOf(output.path);
    if (!identity) continue;
    for (const std::string& input : inputs) {
      struct stat status = {};
      if (!input.empty() && ::stat(input.c_str(), &status) == 0 && IdentityOf(status) == identity)
        return Refused("an output is a file that is read, and would replace it", output,
                       fmt::format("another file than the input {}", input));
    }
    const auto same = std::ranges::find(seen, *identity, &std::pair<Identity, const OutputFile*>::first);
    if (same != seen.end())
      return Refused("two outputs are one file", output, "another file than " + FlagText(*same->second));
    seen.emplace_back(*identity, &output);
  }
  return {};
}

}  // namespace shardplan::cli

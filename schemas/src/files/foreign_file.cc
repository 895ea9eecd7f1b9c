// SPDX-License-Identifier: Apache-2.0
#include "files/foreign_file.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <utility>

namespace shardplan {
namespace {

constexpr std::size_t kLooksAt = 1 << 20;

struct ForeignKind {
  std::string_view is, expected;
};
constexpr ForeignKind kSnapshot = {"a memory snapshot of PyTorch, a pickle",
                                   "a document; `shardplan import-profile PROFILE --snapshot FILE` takes it"};
constexpr ForeignKind kPickle = {
    "a pickle of Python",
    "a document; of a memory snapshot of PyTorch `shardplan import-profile PROFILE "
    "--snapshot FILE` takes one"};
constexpr ForeignKind kZip = {"a zip file, as torch.save writes",
                              "a document; `shardplan reshard-checkpoint` takes checkpoints"};
constexpr ForeignKind kSafetensors = {"a file of safetensors",
                                      "a document; `shardplan reshard-checkpoint` takes checkpoints"};
constexpr ForeignKind kProfile = {"a profile of torch.profiler",
                                  "a document; `shardplan import-profile` makes one of it"};
constexpr ForeignKind kConfig = {"a model config of Hugging Face",
                                 "a document; `shardplan trace` makes one of it"};
constexpr ForeignKind kToml = {
    "TOML", "a document in JSON; settings of a job are flags of `shardplan plan`, or a strategy in JSON"};
constexpr ForeignKind kYaml = {
    "YAML", "a document in JSON; settings of a job are flags of `shardplan plan`, or a strategy in JSON"};
constexpr ForeignKind kTable = {"a table of measurements", "a document; `shardplan cost` takes it"};

bool IsWord(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.' || c == '"' || c == '\'';
  });
}

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) text.remove_suffix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) text.remove_prefix(1);
  return text;
}

// The first line that says something, of TOML and of YAML.
std::string_view FirstLine(std::string_view text) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = Trimmed(text.substr(0, end));
    if (!line.empty() && line[0] != '#' && line != "---") return line;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return {};
}

bool IsToml(std::string_view line) {
  if (line.starts_with('[')) {
    const std::size_t close = line.find(']');
    std::string_view name = line.substr(1, close == std::string_view::npos ? close : close - 1);
    if (name.starts_with('[')) name.remove_prefix(1);
    return close != std::string_view::npos && IsWord(Trimmed(name)) &&
           std::isdigit(static_cast<unsigned char>(Trimmed(name)[0])) == 0;
  }
  const std::size_t equals = line.find('=');
  return equals != std::string_view::npos && IsWord(Trimmed(line.substr(0, equals)));
}

bool IsYaml(std::string_view line) {
  const std::size_t colon = line.find(':');
  return colon != std::string_view::npos && (colon + 1 == line.size() || line[colon + 1] == ' ') &&
         IsWord(line.substr(0, colon)) && line[0] != '"';
}

const ForeignKind* KindOf(std::string_view bytes) {
  const std::string_view head = bytes.substr(0, kLooksAt);
  const auto has = [&](std::string_view part) { return head.find(part) != std::string_view::npos; };
  if (head.size() > 1 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5)
    return has("segments") || has("device_traces") ? &kSnapshot : &kPickle;
  if (head.starts_with("PK\x03\x04")) return &kZip;
  if (head.size() > 9 && head[8] == '{' && head[7] == '\0') return &kSafetensors;
  const std::string_view text = Trimmed(head);
  if (text.starts_with('{')) {
    if (text.substr(0, 200).find("\"schema\"") != std::string_view::npos) return nullptr;
    if (has("\"traceEvents\"")) return &kProfile;
    if (has("\"model_type\"") || has("\"architectures\"")) return &kConfig;
    return nullptr;
  }
  if (head.find('\0') != std::string_view::npos) return nullptr;
  if ((has("# ") && has("algbw")) || has("full_tensor_bytes") || text.starts_with("device,")) return &kTable;
  const std::string_view line = FirstLine(text);
  if (IsToml(line)) return &kToml;
  return IsYaml(line) ? &kYaml : nullptr;
}

}  // namespace

std::optional<Error> ForeignFile(std::string_view bytes) {
  const ForeignKind* kind = KindOf(bytes);
  if (kind == nullptr) return std::nullopt;
  return Error{.code = ErrorCode::kBadInput,
               .message = "the file is no document of shardplan",
               .found = std::string(kind->is),
               .expected = std::string(kind->expected)};
}

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/files/journal.h"

#include <fcntl.h>
#include <sys/file.h>

#include <filesystem>
#include <sstream>

#include "shardplan/schemas/io.h"

namespace shardplan {
namespace {

constexpr std::string_view kFirstWord = "shardplan.checksums/1";

std::string FirstLine(const std::string& fingerprint) {
  return fmt::format("{} {}", kFirstWord, fingerprint);
}

// A line "<crc32> <bytes> <file>". A line that a killed process did not end does not count.
bool ParseLine(const std::string& line, std::map<std::string, WrittenPart>& written) {
  std::istringstream in(line);
  WrittenPart part;
  std::string file;
  in >> std::hex >> part.crc32 >> std::dec >> part.bytes;
  if (!in || in.get() != ' ' || !std::getline(in, file) || file.empty()) return false;
  written[file] = part;
  return true;
}

}  // namespace

std::map<std::string, WrittenPart> Journal::Read(const std::string& folder, const std::string& fingerprint) {
  std::map<std::string, WrittenPart> written;
  const std::string path = (std::filesystem::path(folder) / kJournalName).string();
  const Result<std::string> text = ReadFile(path);
  if (!text) return written;
  std::size_t at = 0;
  for (std::size_t end = text->find('\n'); end != std::string::npos; end = text->find('\n', at)) {
    const std::string line = text->substr(at, end - at);
    if (at == 0 ? line != FirstLine(fingerprint) : !ParseLine(line, written)) return {};
    at = end + 1;
  }
  return written;
}

Result<Journal> Journal::Open(const std::string& folder, const std::string& fingerprint) {
  const std::string path = (std::filesystem::path(folder) / kJournalName).string();
  Journal journal(path, Descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666)));
  if (journal.descriptor_.value() < 0) return SystemError(ErrorCode::kEnvironment, path, "open the file");
  if (::flock(journal.descriptor_.value(), LOCK_EX | LOCK_NB) != 0)
    return std::unexpected(Error{.code = ErrorCode::kEnvironment,
                                 .message = "another process writes this checkpoint",
                                 .file = folder});
  std::string first(FirstLine(fingerprint).size() + 1, '\0');
  const ssize_t got = ::pread(journal.descriptor_.value(), first.data(), first.size(), 0);
  journal.is_same_ = got == static_cast<ssize_t>(first.size()) && first == FirstLine(fingerprint) + "\n";
  if (journal.is_same_) {
    journal.written_ = Read(folder, fingerprint);
    // A line that a killed process did not end.
    const Result<std::string> text = ReadFile(path);
    const std::size_t whole = text ? text->rfind('\n') + 1 : 0;
    if (text && whole < text->size() &&
        ::ftruncate(journal.descriptor_.value(), static_cast<off_t>(whole)) != 0)
      return SystemError(ErrorCode::kEnvironment, path, "cut the file");
    return journal;
  }
  const std::string line = FirstLine(fingerprint) + "\n";
  if (::ftruncate(journal.descriptor_.value(), 0) != 0 ||
      ::write(journal.descriptor_.value(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    return SystemError(ErrorCode::kEnvironment, path, "write the file");
  return journal;
}

Status Journal::Add(const std::string& file, WrittenPart part) {
  written_[file] = part;
  const std::string line = fmt::format("{:08x} {} {}\n", part.crc32, part.bytes, file);
  if (::write(descriptor_.value(), line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    return SystemError(ErrorCode::kEnvironment, path_, "write the file");
  return {};
}

Status Journal::Flush() {
  if (::fsync(descriptor_.value()) == 0) return {};
  return SystemError(ErrorCode::kEnvironment, path_, "write the file");
}

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/files/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>

namespace shardplan {

Result<InputFile> InputFile::Open(const std::string& path) {
  // A pipe that nobody writes to would not be opened.
  InputFile file(path, Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)));
  struct stat status = {};
  if (file.descriptor_.value() < 0 || ::fstat(file.descriptor_.value(), &status) != 0)
    return SystemError(ErrorCode::kBadInput, path, "open the file for reading");
  if (!S_ISREG(status.st_mode))
    return std::unexpected(Error{.code = ErrorCode::kBadInput, .message = "no regular file", .file = path});
  file.size_ = status.st_size;
  file.modified_ns_ = status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec;
  return file;
}

InputFile InputFile::OfBytes(std::string name, std::string bytes) {
  InputFile file(std::move(name), Descriptor(-1));
  file.size_ = static_cast<std::int64_t>(bytes.size());
  file.memory_ = std::move(bytes);
  return file;
}

Status InputFile::Read(std::int64_t offset, char* bytes, std::int64_t count) const {
  if (offset < 0 || count < 0 || offset > size_ || count > size_ - offset)
    return ErrorAt(offset, "the file ends before what is said to be there", fmt::format("{} bytes", size_),
                   fmt::format("{} bytes from there", count));
  if (descriptor_.value() < 0) {
    std::copy_n(memory_.data() + offset, count, bytes);
    return {};
  }
  for (std::int64_t have = 0; have < count;) {
    const ssize_t got = ::pread(descriptor_.value(), bytes + have, static_cast<std::size_t>(count - have),
                                static_cast<off_t>(offset + have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(ErrorCode::kEnvironment, path_, "read the file");
    if (got == 0) return ErrorAt(offset + have, "the file became shorter while it was read");
    have += got;
  }
  return {};
}

Result<std::string> InputFile::Read(std::int64_t offset, std::int64_t count) const {
  std::string bytes;
  if (offset >= 0 && count >= 0 && offset <= size_ && count <= size_ - offset)
    bytes.resize(static_cast<std::size_t>(count));
  if (Status status = Read(offset, bytes.data(), count); !status) return std::unexpected(status.error());
  return bytes;
}

std::unexpected<Error> InputFile::ErrorAt(std::int64_t offset, std::string message, std::string found,
                                          std::string expected) const {
  return std::unexpected(Error{.code = ErrorCode::kBadInput,
                               .message = std::move(message),
                               .file = path_,
                               .pointer = fmt::format("byte {}", offset),
                               .found = std::move(found),
                               .expected = std::move(expected)});
}

}  // namespace shardplan

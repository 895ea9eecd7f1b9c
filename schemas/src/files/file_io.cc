// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "documents/descriptor.h"
#include "files/available_memory.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

namespace {

// Bytes that a reader takes for every byte of a file: the byte, and the values of the text (JsonTape).
constexpr std::int64_t kReadingTakes = 5;
constexpr int kTriesForWriter = 150;
constexpr int kBetweenReadsMs = 20;

// Waits for what a pipe begins with. False: nobody has come to write to it. `bytes` gets what has been read.
bool BeginPipe(int pipe, std::string& bytes) {
  for (int tries = 0; tries < kTriesForWriter; ++tries) {
    char first = 0;
    const ssize_t got = ::read(pipe, &first, 1);
    if (got == 1) bytes += first;
    if (got != 0) return true;
    (void)::poll(nullptr, 0, kBetweenReadsMs);
  }
  return false;
}

}  // namespace

Result<std::string> ReadFile(const std::string& path) {
  // Opening a pipe that nobody writes to would wait for ever.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (file.value() < 0) return SystemError(ErrorCode::kBadInput, path, "open the file for reading");
  struct stat status = {};
  std::string bytes;
  if (::fstat(file.value(), &status) == 0 && S_ISFIFO(status.st_mode) && !BeginPipe(file.value(), bytes)) {
    return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                 .message = "cannot read the pipe: no process writes to it",
                                 .file = path});
  }
  (void)::fcntl(file.value(), F_SETFL, O_RDONLY);
  if (S_ISREG(status.st_mode)) {
    if (Status checked = CheckMemory("reading it", kReadingTakes * status.st_size); !checked) {
      checked.error().file = path;
      return std::unexpected(std::move(checked.error()));
    }
    bytes.reserve(static_cast<std::size_t>(status.st_size) + 1);
  }
  std::string chunk(std::size_t{1} << 16, '\0');
  while (true) {
    const ssize_t got = ::read(file.value(), chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(ErrorCode::kBadInput, path, "read the file");
    if (got == 0) return bytes;
    bytes.append(chunk, 0, static_cast<std::size_t>(got));
  }
}

}  // namespace shardplan

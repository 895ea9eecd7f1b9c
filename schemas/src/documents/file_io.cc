#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "shardplan/schemas/io.h"

namespace shardplan {
namespace {

// A POSIX file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  int value() const { return value_; }
  // close() reports what a network file system could not write.
  bool Close() { return ::close(std::exchange(value_, -1)) == 0; }

 private:
  int value_;
};

std::unexpected<Error> SystemError(ErrorCode code, const std::string& path, const std::string& action) {
  const int reason = errno;
  return std::unexpected(Error{
      .code = code, .message = fmt::format("cannot {}: {}", action, std::strerror(reason)), .file = path});
}

bool WriteAll(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

// A name next to `path` that no other writer of this or another process uses.
std::string TemporaryName(const std::string& path) {
  static std::atomic<int> counter = 0;
  return fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter++);
}

}  // namespace

Result<std::string> ReadFile(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.value() < 0) return SystemError(ErrorCode::kBadInput, path, "open the file for reading");
  struct stat status = {};
  std::string bytes;
  if (::fstat(file.value(), &status) == 0 && S_ISREG(status.st_mode)) {
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

Status WriteFileAtomically(const std::string& path, std::string_view bytes) {
  // A symbolic link stays one: what it points to is replaced.
  std::error_code ignored;
  std::filesystem::path target = path;
  if (std::filesystem::is_symlink(target, ignored)) {
    const std::filesystem::path resolved = std::filesystem::weakly_canonical(target, ignored);
    if (!ignored) target = resolved;
  }
  struct stat status = {};
  const bool exists = ::stat(target.c_str(), &status) == 0;
  // A pipe or a device cannot be replaced by a file; it takes the bytes as they come.
  if (exists && !S_ISREG(status.st_mode)) {
    Descriptor file(::open(target.c_str(), O_WRONLY | O_CLOEXEC));
    if (file.value() < 0 || !WriteAll(file.value(), bytes) || !file.Close()) {
      return SystemError(ErrorCode::kEnvironment, path, "write");
    }
    return {};
  }
  const std::string temporary = TemporaryName(target);
  const mode_t mode = exists ? status.st_mode & 0777 : 0666;
  Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (file.value() < 0) return SystemError(ErrorCode::kEnvironment, path, "create a file in its folder");
  if (!WriteAll(file.value(), bytes) || ::fsync(file.value()) != 0 || !file.Close() ||
      ::rename(temporary.c_str(), target.c_str()) != 0) {
    auto error = SystemError(ErrorCode::kEnvironment, path, "write the file (the old content is kept)");
    ::unlink(temporary.c_str());
    return error;
  }
  return {};
}

}  // namespace shardplan

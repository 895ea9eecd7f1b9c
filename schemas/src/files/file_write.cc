// SPDX-License-Identifier: Apache-2.0
// Files are replaced whole or not at all, and nothing else is left in their folder.
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <atomic>
#include <climits>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>

#include "documents/descriptor.h"
#include "shardplan/schemas/io.h"

namespace shardplan {
namespace {

namespace fs = std::filesystem;

// tools/python/shardplan/files.py writes names of the same kind, and removes ours.
constexpr std::string_view kTemporaryBegin = ".shardplan-";
constexpr std::string_view kTemporaryEnd = ".tmp";
constexpr int kMostLinks = 40;  // as Linux follows
constexpr mode_t kPermissions = 07777;
constexpr int kTriesForReader = 100;
constexpr int kBetweenTriesMs = 20;

bool WriteAll(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {  // somebody made the pipe non-blocking
      struct pollfd ready = {.fd = descriptor, .events = POLLOUT, .revents = 0};
      (void)::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool WriteAll(int descriptor, const TextInPieces& text) {
  bool written = true;
  int reason = 0;  // the sink's caller may change errno
  text([&](std::string_view piece) {
    if (!written || WriteAll(descriptor, piece)) return;
    written = false;
    reason = errno;
  });
  errno = reason;
  return written;
}

// Signals that end the process wait while a temporary file has a name. Faults of the program do not.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigset_t held;
    sigfillset(&held);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGXFSZ, SIGPIPE})
      sigdelset(&held, fault);
    pthread_sigmask(SIG_BLOCK, &held, &before_);
  }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;
  ~SignalsHeld() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_ = {};
};

// A name that no other writer of this or another process uses.
std::string TemporaryName() {
  static std::atomic<int> counter = 0;
  return fmt::format("{}{}-{}{}", kTemporaryBegin, ::getpid(), counter++, kTemporaryEnd);
}

// Removes what writers that were killed have left. A writer holds a lock on its file as long as it lives.
void RemoveLeftovers(int folder) {
  const int listed = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (listed < 0) return;
  const auto close = [](DIR* open) { ::closedir(open); };
  const std::unique_ptr<DIR, decltype(close)> entries(::fdopendir(listed), close);
  if (entries == nullptr) return;
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string_view name = entry->d_name;
    if (!name.starts_with(kTemporaryBegin) || !name.ends_with(kTemporaryEnd)) continue;
    const Descriptor file(::openat(folder, entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file.value() >= 0 && ::flock(file.value(), LOCK_EX | LOCK_NB) == 0)
      ::unlinkat(folder, entry->d_name, 0);
  }
}

struct Target {
  fs::path path;                        // links followed
  std::optional<struct stat> replaces;  // what is there
};

// A link may point to what is not there yet.
Result<fs::path> FollowLinks(const std::string& path) {
  fs::path at = path;
  std::error_code error;
  for (int links = 0; fs::is_symlink(fs::symlink_status(at, error)); ++links) {
    if (links == kMostLinks) {
      errno = ELOOP;
      return SystemError(ErrorCode::kEnvironment, path, "write");
    }
    const fs::path to = fs::read_symlink(at, error);
    if (error) break;
    at = to.is_absolute() ? to : at.parent_path() / to;
  }
  return at;
}

std::unexpected<Error> CannotWrite(const std::string& path, int reason) {
  errno = reason;
  return SystemError(ErrorCode::kEnvironment, path, "write");
}

fs::path FolderOf(const fs::path& file) {
  return file.has_parent_path() ? file.parent_path() : fs::path(".");
}

Result<Target> FindTarget(const std::string& path) {
  Target target = {.path = path, .replaces = {}};
  struct stat status = {};
  if (::stat(path.c_str(), &status) == 0) {
    target.replaces = status;
    if (S_ISDIR(status.st_mode)) return CannotWrite(path, EISDIR);
    if (::access(path.c_str(), W_OK) != 0) return CannotWrite(path, errno);
    if (!S_ISREG(status.st_mode)) return target;
  } else if (errno != ENOENT) {
    return CannotWrite(path, errno);
  }
  Result<fs::path> followed = FollowLinks(path);
  if (!followed) return std::unexpected(std::move(followed.error()));
  target.path = std::move(*followed);
  if (!target.path.has_filename()) return CannotWrite(path, path.empty() ? ENOENT : EISDIR);
  const fs::path folder = FolderOf(target.path);
  if (::stat(folder.c_str(), &status) != 0) return CannotWrite(path, errno);
  if (!S_ISDIR(status.st_mode)) return CannotWrite(path, ENOTDIR);
  if (target.path.filename().native().size() > NAME_MAX) return CannotWrite(path, ENAMETOOLONG);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) return CannotWrite(path, errno);
  return target;
}

// A file without a name, or with one that nobody else uses where the file system has no others. The name
// goes with the object unless it became that of the target.
class Temporary {
 public:
  explicit Temporary(int folder) : folder_(folder), file_(::openat(folder, ".", kFlags | O_TMPFILE, 0666)) {
    if (file_.value() >= 0 || errno == EACCES || errno == ENOSPC) return;
    held_.emplace();
    // A cleaner may take a file for a leftover until it is locked.
    for (struct stat status = {}; status.st_nlink == 0;) {
      name_ = TemporaryName();
      file_ = Descriptor(::openat(folder, name_.c_str(), kFlags | O_CREAT | O_EXCL, 0666));
      if (file_.value() < 0) return;
      Lock();
      if (::fstat(file_.value(), &status) != 0) return;
    }
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() {
    if (!name_.empty()) ::unlinkat(folder_, name_.c_str(), 0);
  }

  int descriptor() const { return file_.value(); }

  // Gives the file the name of the target, in place of what had it.
  bool Replace(const std::string& target) {
    if (!held_) held_.emplace();
    if (name_.empty()) {
      Lock();
      const std::string open = fmt::format("/proc/self/fd/{}", file_.value());
      std::string name = TemporaryName();
      if (::linkat(AT_FDCWD, open.c_str(), folder_, name.c_str(), AT_SYMLINK_FOLLOW) != 0 &&
          ::linkat(file_.value(), "", folder_, name.c_str(), AT_EMPTY_PATH) != 0)
        return false;
      name_ = std::move(name);
    }
    if (::renameat(folder_, name_.c_str(), folder_, target.c_str()) != 0) return false;
    name_.clear();
    return true;
  }

 private:
  static constexpr int kFlags = O_WRONLY | O_CLOEXEC;
  void Lock() { (void)::flock(file_.value(), LOCK_EX | LOCK_NB); }

  std::optional<SignalsHeld> held_;  // goes last
  int folder_;
  Descriptor file_;
  std::string name_;
};

// The file that comes has the owner and the permissions of the one that goes.
bool KeepOwnerAndMode(int file, const struct stat& replaced) {
  struct stat made = {};
  if (::fstat(file, &made) != 0) return false;
  const bool same = made.st_uid == replaced.st_uid && made.st_gid == replaced.st_gid;
  if (!same && ::fchown(file, replaced.st_uid, replaced.st_gid) != 0) return false;
  return ::fchmod(file, replaced.st_mode & kPermissions) == 0;
}

// A pipe or a device cannot be replaced by a file; it takes the bytes as they come. A reader of a pipe may be
// about to open it.
Status WriteInPlace(const std::string& path, bool is_pipe, const TextInPieces& text) {
  constexpr int kFlags = O_WRONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
  Descriptor file(::open(path.c_str(), kFlags));
  for (int tries = 0; is_pipe && file.value() < 0 && errno == ENXIO && tries < kTriesForReader; ++tries) {
    (void)::poll(nullptr, 0, kBetweenTriesMs);
    file = Descriptor(::open(path.c_str(), kFlags));
  }
  if (is_pipe && file.value() < 0 && errno == ENXIO) {
    return std::unexpected(Error{.code = ErrorCode::kEnvironment,
                                 .message = "cannot write to the pipe: no process reads it",
                                 .file = path});
  }
  if (file.value() < 0 || !WriteAll(file.value(), text) || !file.Close())
    return SystemError(ErrorCode::kEnvironment, path, "write");
  return {};
}

}  // namespace

Result<std::string> WritableTarget(const std::string& path) {
  Result<Target> target = FindTarget(path);
  if (!target) return std::unexpected(std::move(target.error()));
  std::error_code error;
  const fs::path canonical = fs::canonical(FolderOf(target->path), error) / target->path.filename();
  return error ? target->path.string() : canonical.string();
}

Status WriteFileAtomically(const std::string& path, std::string_view bytes) {
  return WriteFileAtomically(path, [&](const JsonSink& sink) { sink(bytes); });
}

Status WriteFileAtomically(const std::string& path, const TextInPieces& text) {
  const Result<Target> target = FindTarget(path);
  if (!target) return std::unexpected(target.error());
  if (target->replaces && !S_ISREG(target->replaces->st_mode))
    return WriteInPlace(path, S_ISFIFO(target->replaces->st_mode), text);
  const fs::path in = FolderOf(target->path);
  Descriptor folder(::open(in.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.value() < 0) folder = Descriptor(::open(in.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (folder.value() < 0) return SystemError(ErrorCode::kEnvironment, path, "open its folder");
  RemoveLeftovers(folder.value());
  Temporary file(folder.value());
  if (file.descriptor() < 0) return SystemError(ErrorCode::kEnvironment, path, "create a file in its folder");
  if (target->replaces && !KeepOwnerAndMode(file.descriptor(), *target->replaces))
    return SystemError(ErrorCode::kEnvironment, path, "keep the file's owner and mode (its content is kept)");
  const bool flushed = WriteAll(file.descriptor(), text) && ::fsync(file.descriptor()) == 0;
  if (!flushed || !file.Replace(target->path.filename()))
    return SystemError(ErrorCode::kEnvironment, path, "write the file (the old content is kept)");
  (void)::fsync(folder.value());  // some file systems cannot
  return {};
}

Status WriteStandardOutput(std::string_view bytes) {
  return WriteStandardOutput([&](const JsonSink& sink) { sink(bytes); });
}

Status WriteStandardOutput(const TextInPieces& text) {
  if (std::fflush(stdout) == 0 && WriteAll(STDOUT_FILENO, text)) return {};
  return MakeError(ErrorCode::kEnvironment,
                   fmt::format("cannot write to standard output: {}", std::strerror(errno)));
}

}  // namespace shardplan

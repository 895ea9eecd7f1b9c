// SPDX-License-Identifier: Apache-2.0
#include "files/file_bytes.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace shardplan {
namespace {

constexpr std::size_t kWindow = std::size_t{1} << 18;

// A pipe is not opened: its writer would see a reader that goes at once.
int OpenFile(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return -1;
  return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
}

}  // namespace

FileBytes::FileBytes(const std::string& path) : descriptor_(OpenFile(path)) {
  struct stat status = {};
  if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) return;
  size_ = static_cast<std::size_t>(status.st_size);
}

FileBytes::~FileBytes() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::string_view FileBytes::Read(std::size_t begin, std::size_t end) {
  if (begin < begin_ || end > begin_ + window_.size()) {
    begin_ = begin;
    window_.resize(std::min(std::max(end - begin, kWindow), size_ - std::min(begin, size_)));
    std::size_t have = 0;
    while (have < window_.size()) {
      const ssize_t got = ::pread(descriptor_, window_.data() + have, window_.size() - have,
                                  static_cast<off_t>(begin + have));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      have += static_cast<std::size_t>(got);
    }
    window_.resize(have);
  }
  return std::string_view(window_).substr(std::min(begin - begin_, window_.size()), end - begin);
}

}  // namespace shardplan

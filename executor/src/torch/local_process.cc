// SPDX-License-Identifier: Apache-2.0
#include "torch/local_process.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

namespace shardplan::executor {
namespace {

std::string LinkOf(const char* path) {
  std::error_code ignored;
  return std::filesystem::read_symlink(path, ignored).string();
}

// Addresses that the kernel chooses are abstract: a zero byte, then a few letters.
sockaddr_un MailboxAddress(const std::string& name, socklen_t& size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t letters = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), letters);
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + letters);
  return address;
}

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}
Descriptor::~Descriptor() {
  if (number_ >= 0) (void)close(number_);
}

std::string LocalHost() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::string host = boot + LinkOf("/proc/self/ns/pid") + LinkOf("/proc/self/ns/net");
  std::ranges::replace(host, ' ', '_');
  return host;
}

std::string LocalProcess::ToText() const { return fmt::format("{} {} {}", rank, pid, address); }

LocalProcess LocalProcess::Parse(const std::string& text) {
  LocalProcess process;
  std::istringstream stream(text);
  stream >> process.rank >> process.pid >> process.address;
  if (!stream) process.rank = -1;
  return process;
}

bool LocalProcess::Open() {
  end = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  return end.number() >= 0 || errno != ESRCH;
}

bool LocalProcess::IsStopped() const {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text);
  const std::size_t name_end = text.rfind(") ");
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return false;
  const char state = text[name_end + 2];
  return state == 'T' || state == 't';
}

std::optional<Mailbox> Mailbox::Open() {
  Mailbox mailbox;
  mailbox.socket_ = Descriptor(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t size = sizeof(sa_family_t);  // no name: the kernel gives one
  if (mailbox.descriptor() < 0 ||
      bind(mailbox.descriptor(), reinterpret_cast<const sockaddr*>(&address), size) != 0)
    return std::nullopt;
  size = sizeof(address);
  if (getsockname(mailbox.descriptor(), reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      size <= offsetof(sockaddr_un, sun_path) + 1)
    return std::nullopt;
  mailbox.address_.assign(address.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
  return mailbox;
}

void Mailbox::Send(const std::string& address, const std::string& message) const {
  socklen_t size = 0;
  const sockaddr_un to = MailboxAddress(address, size);
  (void)sendto(descriptor(), message.data(), message.size(), MSG_NOSIGNAL,
               reinterpret_cast<const sockaddr*>(&to), size);
}

std::optional<std::string> Mailbox::Receive() const {
  std::array<char, 256> buffer;
  const ssize_t size = recv(descriptor(), buffer.data(), buffer.size(), 0);
  if (size < 0) return std::nullopt;
  return std::string(buffer.data(), static_cast<std::size_t>(size));
}

}  // namespace shardplan::executor

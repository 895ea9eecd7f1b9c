// SPDX-License-Identifier: Apache-2.0
// Processes of one machine: what tells that one has ended or is stopped, and a word from one to another.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace shardplan::executor {

// Closes a file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int number() const { return number_; }

 private:
  int number_ = -1;
};

// Processes that name the same one can watch each other: of one boot of a machine, one space of process ids,
// one network (which has the mailboxes). Without blanks.
std::string LocalHost();

// A rank's process on this machine.
struct LocalProcess {
  std::int64_t rank = -1;
  pid_t pid = -1;
  std::string address;  // of its mailbox; "-": none
  Descriptor end;       // readable once it has ended

  // "rank pid address" and back. A text that is none gives rank -1.
  std::string ToText() const;
  static LocalProcess Parse(const std::string& text);
  // Watches it from here on. False: it has ended.
  bool Open();
  bool IsStopped() const;
};

// A datagram socket with an address of the kernel's choice, for a few words between processes of this
// machine.
class Mailbox {
 public:
  static std::optional<Mailbox> Open();
  const std::string& address() const { return address_; }
  int descriptor() const { return socket_.number(); }
  void Send(const std::string& address, const std::string& message) const;  // lost where nobody is
  std::optional<std::string> Receive() const;                               // does not wait

 private:
  Descriptor socket_;
  std::string address_;
};

}  // namespace shardplan::executor

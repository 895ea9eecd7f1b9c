// SPDX-License-Identifier: Apache-2.0
#include "device/nccl/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace shardplan::softdevice {
namespace {

constexpr std::size_t kHeadBytes = (sizeof(SharedHead) + 4095) / 4096 * 4096;
constexpr std::size_t kSlotsBytes = std::size_t{kMaxRanks} * kSlots * SharedFile::kSlotBytes;
constexpr std::size_t kBytes =
    kHeadBytes + kSlotsBytes + std::size_t{kMaxRanks} * kMaxRanks * kSlots * SharedFile::kMessageBytes;

}  // namespace

std::unique_ptr<SharedFile> SharedFile::Map(int descriptor) {
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (memory == MAP_FAILED) {
    (void)close(descriptor);
    return nullptr;
  }
  return std::unique_ptr<SharedFile>(new SharedFile(descriptor, memory));
}

std::unique_ptr<SharedFile> SharedFile::Make() {
  const int descriptor = memfd_create("nccl of the device in software", MFD_CLOEXEC);
  if (descriptor < 0) return nullptr;
  if (ftruncate(descriptor, static_cast<off_t>(kBytes)) != 0) {
    (void)close(descriptor);
    return nullptr;
  }
  return Map(descriptor);
}

std::unique_ptr<SharedFile> SharedFile::Open(pid_t pid, int descriptor) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, descriptor);
  const int own = open(path, O_RDWR | O_CLOEXEC);
  return own < 0 ? nullptr : Map(own);
}

SharedFile::~SharedFile() {
  (void)munmap(memory_, kBytes);
  CloseDescriptor();
}

void SharedFile::CloseDescriptor() {
  if (descriptor_ >= 0) (void)close(descriptor_);
  descriptor_ = -1;
}

std::byte* SharedFile::Slot(int rank, std::uint64_t number) const {
  const std::size_t index = static_cast<std::size_t>(rank) * kSlots + number % kSlots;
  return static_cast<std::byte*>(memory_) + kHeadBytes + index * kSlotBytes;
}

std::byte* SharedFile::MessageSlot(int from, int to, std::uint64_t number) const {
  const std::size_t pair = static_cast<std::size_t>(from) * kMaxRanks + static_cast<std::size_t>(to);
  return static_cast<std::byte*>(memory_) + kHeadBytes + kSlotsBytes +
         (pair * kSlots + number % kSlots) * kMessageBytes;
}

bool IsAlive(pid_t pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return false;
  char line[512] = {};
  const char* read = std::fgets(line, sizeof(line), file);
  std::fclose(file);
  const char* end_of_name = read == nullptr ? nullptr : std::strrchr(line, ')');
  return end_of_name != nullptr && end_of_name[1] == ' ' && end_of_name[2] != 'Z' && end_of_name[2] != 'X';
}

}  // namespace shardplan::softdevice

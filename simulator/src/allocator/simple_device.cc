#include "allocator/allocator_sizes.h"
#include "shardplan/simulator/caching_allocator.h"

namespace shardplan {

std::optional<DeviceAddress> SimpleDevice::AllocateSegment(Bytes size_bytes, std::int32_t) {
  if (used_bytes_ + size_bytes > total_bytes_) return std::nullopt;
  used_bytes_ += size_bytes;
  const DeviceAddress address = next_address_;
  next_address_ += RoundUp(size_bytes.value, kRoundLargeBytes);
  return address;
}

void SimpleDevice::FreeSegment(DeviceAddress, Bytes size_bytes) { used_bytes_ -= size_bytes; }

DeviceAddress SimpleDevice::ReserveAddresses(Bytes size_bytes, std::int32_t) {
  const DeviceAddress address = next_address_;
  next_address_ += RoundUp(size_bytes.value, kRoundLargeBytes);
  return address;
}

bool SimpleDevice::MapPages(DeviceAddress, Bytes size_bytes) {
  if (used_bytes_ + size_bytes > total_bytes_) return false;
  used_bytes_ += size_bytes;
  return true;
}

void SimpleDevice::UnmapPages(DeviceAddress, Bytes size_bytes) { used_bytes_ -= size_bytes; }

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
#include "allocator/sizes.h"
#include "shardplan/simulator/caching_allocator.h"

namespace shardplan {

DeviceAddress SimpleDevice::NextAddress(Bytes size_bytes) {
  constexpr DeviceAddress kLowest = DeviceAddress{1} << 32;
  constexpr DeviceAddress kHighest = DeviceAddress{1} << 56;
  const Bytes before = handed_out_bytes_;
  handed_out_bytes_ += Bytes{RoundUp(size_bytes.value, kRoundLargeBytes)};
  return order_ == AddressOrder::kUpwards ? kLowest + before.value : kHighest - handed_out_bytes_.value;
}

std::optional<DeviceAddress> SimpleDevice::AllocateSegment(Bytes size_bytes, std::int32_t) {
  if (used_bytes_ + size_bytes > total_bytes_) return std::nullopt;
  used_bytes_ += size_bytes;
  return NextAddress(size_bytes);
}

void SimpleDevice::FreeSegment(DeviceAddress, Bytes size_bytes) { used_bytes_ -= size_bytes; }

DeviceAddress SimpleDevice::ReserveAddresses(Bytes size_bytes, std::int32_t) {
  return NextAddress(size_bytes);
}

bool SimpleDevice::MapPages(DeviceAddress, Bytes size_bytes) {
  if (used_bytes_ + size_bytes > total_bytes_) return false;
  used_bytes_ += size_bytes;
  return true;
}

void SimpleDevice::UnmapPages(DeviceAddress, Bytes size_bytes) { used_bytes_ -= size_bytes; }

}  // namespace shardplan

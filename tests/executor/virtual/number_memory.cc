// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/number_memory.h"

#include <cstring>
#include <utility>

#include "executor/src/replay/host_kernels.h"

namespace shardplan::test {

void DoOnHost(const NumberWork& work, std::span<const std::byte* const> reads,
              std::span<std::byte* const> writes) {
  if (work.check) work.check(reads);
  for (std::size_t i = 0; i < work.writes.size(); ++i) {
    const NumberWork::Write& write = work.writes[i];
    const std::span<const std::byte> value = write.value;
    if (!write.adds) {
      std::memcpy(writes[i], value.data(), value.size());
      continue;
    }
    const auto numel = static_cast<std::int64_t>(value.size()) / SizeBytes(write.dtype);
    for (std::int64_t e = 0; e < numel; ++e) {
      executor::StoreElement(writes[i], write.dtype, e,
                             executor::LoadElement(writes[i], write.dtype, e) +
                                 executor::LoadElement(value.data(), write.dtype, e));
    }
  }
}

std::byte* VirtualNumbers::At(const BytePlace& place, std::size_t bytes) const {
  const std::span<std::byte> memory = machine_.Memory(rank_, place.buffer, place.part);
  const auto first = static_cast<std::size_t>(place.byte);
  return first + bytes <= memory.size() ? memory.data() + first : nullptr;
}

Status VirtualNumbers::Enqueue(StreamId stream, NumberWork work) {
  std::vector<BufferId> uses;
  std::vector<const std::byte*> reads;
  std::vector<std::byte*> writes;
  bool fits = true;
  const auto use = [&](const BytePlace& place, std::size_t bytes) {
    if (uses.empty() || uses.back() != place.buffer) uses.push_back(place.buffer);
    std::byte* const at = At(place, bytes);
    fits = fits && at != nullptr;
    return at;
  };
  for (const NumberWork::Read& read : work.reads) reads.push_back(use(read.at, read.bytes));
  for (const NumberWork::Write& write : work.writes) writes.push_back(use(write.at, write.value.size()));
  if (!fits) return MakeError(ErrorCode::kBadInput, "the model uses memory that is not there");
  machine_.Enqueue(rank_, stream, uses,
                   [work = std::move(work), reads = std::move(reads), writes = std::move(writes)] {
                     DoOnHost(work, reads, writes);
                   });
  return {};
}

}  // namespace shardplan::test

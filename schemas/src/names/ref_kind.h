// SPDX-License-Identifier: Apache-2.0
// The kinds of lists that ids refer to.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardplan {

// Lists that integers elsewhere in the same document index. The ones from kUnit on may also be referred to by
// name.
enum class RefKind : std::uint8_t {
  kNone,
  kModule,
  kParameter,
  kTensor,
  kForward,
  kBackward,
  kThread,
  kPlace,
  kRecordedStream,
  kRecordedCommunicator,
  kUnit,
  kBuffer,
  kStream,
  kEvent,
  kCommunicator,
  kSegment,
  kExchange,
};
inline constexpr std::size_t kRefKinds = 17;
constexpr bool IsNamed(RefKind kind) { return kind >= RefKind::kUnit; }

}  // namespace shardplan

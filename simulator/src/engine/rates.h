// SPDX-License-Identifier: Apache-2.0
// How fast what runs at the same time goes (engine.h has the rules).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/stream_state.h"
#include "shardplan/schemas/assert.h"

namespace shardplan::internal {

class Rates {
 public:
  explicit Rates(const EngineProgram& program) : program_(program) {}

  // Work of a stream begins (1) or ends (-1).
  void Count(const StreamState& stream, std::int32_t change);
  // Whether something began or ended since it was asked last: only then a rate can be another one.
  bool TakeChanged();
  // The rate of an active stream, one of `streams`; kFullRate: alone.
  std::int64_t Of(const StreamState& stream, const std::vector<StreamState>& streams);

  bool computes() const { return computing_ > 0; }
  bool communicates() const { return collectives_ > 0; }

 private:
  std::int64_t OfCollective(const StreamState& stream, const std::vector<StreamState>& streams,
                            std::int64_t ppm);
  std::int64_t OnLink(const std::vector<StreamState>& streams, std::size_t link, std::int32_t load,
                      std::int64_t ppm);

  const EngineProgram& program_;
  std::vector<std::int32_t> sharing_;  // loads of one link (OnLink), kept for its memory
  std::int32_t computing_ = 0;
  std::int32_t kernels_ = 0;
  std::int32_t collectives_ = 0;
  std::int32_t to_host_ = 0;
  std::int32_t to_device_ = 0;
  bool changed_ = false;
};

// In the header: the engine calls them for every event.
inline bool Rates::TakeChanged() { return std::exchange(changed_, false); }

inline void Rates::Count(const StreamState& stream, std::int32_t change) {
  changed_ = true;
  switch (stream.work) {
    case WorkClass::kCompute:
      computing_ += change;
      [[fallthrough]];
    case WorkClass::kCopy:
      kernels_ += change;
      break;
    case WorkClass::kCollective:
      collectives_ += change;
      break;
    case WorkClass::kToHost:
      to_host_ += change;
      break;
    case WorkClass::kToDevice:
      to_device_ += change;
      break;
  }
}

inline std::int64_t Rates::Of(const StreamState& stream, const std::vector<StreamState>& streams) {
  const std::int64_t kernel_ppm = collectives_ > 0 ? program_.compute_rate_ppm : 1'000'000;
  const std::int64_t link_ppm = kernels_ > 0 ? program_.communication_rate_ppm : 1'000'000;
  switch (stream.work) {
    case WorkClass::kCompute:
    case WorkClass::kCopy:
      SHARDPLAN_ASSERT(kernels_ > 0, "an active kernel is counted");
      return kernel_ppm * kSharers / kernels_;
    case WorkClass::kCollective:
      SHARDPLAN_ASSERT(collectives_ > 0, "an active collective is counted");
      return OfCollective(stream, streams, link_ppm);
    case WorkClass::kToHost:
      SHARDPLAN_ASSERT(to_host_ > 0, "an active copy is counted");
      return kFullRate / to_host_;
    case WorkClass::kToDevice:
      SHARDPLAN_ASSERT(to_device_ > 0, "an active copy is counted");
      return kFullRate / to_device_;
  }
  return kFullRate;
}

inline std::int64_t Rates::OfCollective(const StreamState& stream, const std::vector<StreamState>& streams,
                                        std::int64_t ppm) {
  std::int64_t rate = ppm * kSharers;
  if (collectives_ == 1) return rate;
  const LinkLoads& loads = program_.loads[static_cast<std::size_t>(stream.loads)];
  for (std::size_t link = 0; link < loads.ppm.size(); ++link) {
    if (loads.ppm[link] > 0) rate = std::min(rate, OnLink(streams, link, loads.ppm[link], ppm));
  }
  return rate;
}

// [Note: shares of a link] Collectives in flight are served from the smallest load up: each has what it
// needs, or an equal share of what is left for it and those after it. With equal loads that is one of c for
// all c.
inline std::int64_t Rates::OnLink(const std::vector<StreamState>& streams, std::size_t link,
                                  std::int32_t load, std::int64_t ppm) {
  sharing_.clear();
  for (const StreamState& other : streams) {
    if (other.status != StreamStatus::kActive || other.work != WorkClass::kCollective) continue;
    const std::int32_t wanted = program_.loads[static_cast<std::size_t>(other.loads)].ppm[link];
    if (wanted > 0) sharing_.push_back(wanted);
  }
  std::ranges::sort(sharing_);
  std::int64_t left = 1'000'000;
  auto sharers = static_cast<std::int64_t>(sharing_.size());
  for (const std::int32_t wanted : sharing_) {
    if (wanted * sharers > left) break;
    if (wanted >= load) return ppm * kSharers;
    left -= wanted;
    --sharers;
  }
  return static_cast<std::int64_t>(Int128{ppm} * kSharers * left / (sharers * load));
}

}  // namespace shardplan::internal

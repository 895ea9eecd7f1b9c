// How fast what runs at the same time goes (engine.h has the rules).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/stream_state.h"

namespace shardplan::internal {

class Rates {
 public:
  explicit Rates(const EngineProgram& program) : program_(program) {}

  // Work of a stream begins (1) or ends (-1).
  void Count(const StreamState& stream, std::int32_t change);
  // Whether something began or ended since it was asked last: only then a rate can be another one.
  bool TakeChanged();
  // Of an active stream, one of `streams`; kFullRate: alone.
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

}  // namespace shardplan::internal

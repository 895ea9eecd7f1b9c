// SPDX-License-Identifier: Apache-2.0
#include "recorded/work.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "shardplan/schemas/dtype.h"

namespace shardplan::internal {
namespace {

// Their first tensor is read where the indices point, as much as is written: as the tracer has it
// (tools/python/shardplan/tracer/operators.py).
constexpr std::array<std::string_view, 6> kLookups = {"aten::embedding", "aten::index_select",
                                                      "aten::gather",    "aten::index",
                                                      "aten::take",      "aten::nll_loss_forward"};
// In place, and what was there before is not read.
constexpr std::array<std::string_view, 9> kOverwrites = {
    "aten::copy_",   "aten::fill_",    "aten::zero_",          "aten::_foreach_copy_", "aten::_foreach_zero_",
    "aten::normal_", "aten::uniform_", "aten::_foreach_fill_", "aten::random_"};

// Each once: an expanded dimension is one element.
std::int64_t ElementsOf(const MemoryRegion& region) {
  std::int64_t elements = 1;
  for (std::size_t d = 0; d < region.shape.size(); ++d) {
    const bool expanded = !region.strides.empty() && region.strides[d] == 0;
    if (!expanded) elements *= region.shape[d];
  }
  return elements;
}
std::int64_t SizeOf(const MemoryRegion& region) { return ElementsOf(region) * SizeBytes(region.dtype); }

const MemoryRegion* LargestFloating(const std::vector<MemoryRegion>& regions) {
  const MemoryRegion* largest = nullptr;
  for (const MemoryRegion& region : regions) {
    if (!IsFloatingPoint(region.dtype)) continue;
    if (largest == nullptr || SizeOf(region) > SizeOf(*largest)) largest = &region;
  }
  return largest;
}

}  // namespace

std::int64_t BytesOf(const std::vector<MemoryRegion>& regions) {
  std::int64_t bytes = 0;
  for (const MemoryRegion& region : regions) bytes += SizeOf(region);
  return bytes;
}

OperatorEvent OperatorOf(const IssuedKernel& kernel) {
  OperatorEvent event;
  event.name = kernel.name;
  event.flops = kernel.flops;
  const std::int64_t written = BytesOf(kernel.writes);
  std::int64_t read = BytesOf(kernel.reads);
  const bool looks_up = std::ranges::find(kLookups, kernel.name) != kLookups.end();
  if (looks_up && kernel.reads.size() > 1) {
    const MemoryRegion& table = kernel.reads.front();
    const bool is_loss = kernel.name == "aten::nll_loss_forward";  // one element of each row
    const std::int64_t rows = is_loss ? ElementsOf(kernel.reads[1]) * SizeBytes(table.dtype) : written;
    read += std::min(rows, SizeOf(table)) - SizeOf(table);
  }
  if (kernel.name == "aten::nll_loss_backward" && kernel.reads.size() > 1) {
    read -= SizeOf(kernel.reads[1]);  // there for its shape
  }
  const bool in_place = kernel.name.ends_with('_') || kernel.name.starts_with("aten::_fused_");
  if (in_place && std::ranges::find(kOverwrites, kernel.name) == kOverwrites.end()) read += written;
  event.bytes_read = {read};
  event.bytes_written = {written};
  const MemoryRegion* of = LargestFloating(kernel.reads);
  if (of == nullptr) of = LargestFloating(kernel.writes);
  if (of != nullptr) {
    event.dtype = of->dtype;
  } else if (!kernel.writes.empty()) {
    event.dtype = kernel.writes.front().dtype;
  }
  return event;
}

bool IsOfFramework(const Recording& recording, RecordedId place) {
  if (place < 0) return false;
  const std::vector<RecordedFrame>& frames = recording.places[static_cast<std::size_t>(place)].frames;
  constexpr std::size_t kNear = 12;  // a decorator, a hook and torch's own functions lie between
  for (std::size_t i = 0; i < std::min(kNear, frames.size()); ++i) {
    if (frames[i].file.find("/torch/distributed/fsdp/") != std::string::npos) return true;
    if (frames[i].file.find("/torch/") == std::string::npos) return false;
  }
  return false;
}

bool IsEmbedding(const Recording& recording, const IssuedKernel& kernel) {
  if (kernel.reads.size() < 2) return false;
  // A kernel of Inductor has the names of what is fused in it.
  const bool is_fused =
      kernel.name.starts_with("triton_") && kernel.name.find("embedding") != std::string::npos;
  if (is_fused) return kernel.name.find("backward") == std::string::npos;
  const bool looks_up = std::ranges::find(kLookups, kernel.name) != kLookups.end();
  if (!looks_up || kernel.place < 0 || kernel.reads[0].shape.size() != 2) return false;
  const std::vector<RecordedFrame>& frames = recording.places[static_cast<std::size_t>(kernel.place)].frames;
  return std::ranges::any_of(frames, [](const RecordedFrame& frame) {
    return frame.function == "embedding" && frame.file.ends_with("/torch/nn/functional.py");
  });
}

bool IsInForward(const Recording& recording, RecordedId place) {
  return place >= 0 && !recording.places[static_cast<std::size_t>(place)].module.empty();
}

}  // namespace shardplan::internal

// SPDX-License-Identifier: Apache-2.0
// The contents of a checkpoint's file to be written: known bytes, and tensors' elements between them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shardplan {

// Four bytes of a literal: the CRC-32 of the data of a step before.
struct CrcSlot {
  std::size_t at = 0;
  std::int32_t step = 0;
};

// A literal, and behind it the elements of a box of a tensor in row-major order.
struct OutputStep {
  std::string literal;
  std::vector<CrcSlot> crcs;
  std::int32_t tensor = -1;  // -1: no data
  std::vector<std::int64_t> low, size;
  std::int64_t data_bytes = 0;
};

struct OutputFile {
  std::string name;
  std::vector<OutputStep> steps;
  std::int64_t size_bytes = 0;

  void Append(std::string_view literal) {
    Open().literal += literal;
    size_bytes += static_cast<std::int64_t>(literal.size());
  }
  void AppendCrcOf(std::int32_t step) {
    OutputStep& open = Open();
    open.crcs.push_back({open.literal.size(), step});
    Append(std::string_view("\0\0\0\0", 4));
  }
  // The index of the step that has it.
  std::int32_t AppendData(std::int32_t tensor, std::vector<std::int64_t> low, std::vector<std::int64_t> size,
                          std::int64_t bytes) {
    OutputStep& open = Open();
    open.tensor = tensor;
    open.low = std::move(low);
    open.size = std::move(size);
    open.data_bytes = bytes;
    size_bytes += bytes;
    return static_cast<std::int32_t>(steps.size()) - 1;
  }

 private:
  OutputStep& Open() {
    if (steps.empty() || steps.back().tensor >= 0) steps.emplace_back();
    return steps.back();
  }
};

}  // namespace shardplan

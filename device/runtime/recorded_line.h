// SPDX-License-Identifier: Apache-2.0
// Lines of JSON that a recording is written in.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "device/runtime/software_device.h"

namespace shardplan::softdevice {

// A string of JSON.
void AppendText(std::string& to, std::string_view text);

// One line, built up field by field.
class RecordedLine {
 public:
  explicit RecordedLine(std::string_view tag);
  RecordedLine() = default;  // fields that another line ends with
  RecordedLine& Append(const RecordedLine& fields);
  RecordedLine& Number(std::int64_t number);
  RecordedLine& Truth(bool truth);
  RecordedLine& Text(std::string_view text);
  RecordedLine& Tensors(std::span<const RecordedTensor> tensors);
  std::string Take();

 private:
  std::string text_;
};

}  // namespace shardplan::softdevice

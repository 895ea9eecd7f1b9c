// SPDX-License-Identifier: Apache-2.0
#include "device/runtime/recorded_line.h"

#include <utility>
#include <vector>

namespace shardplan::softdevice {
namespace {

void AppendList(std::string& to, const std::vector<std::int64_t>& numbers) {
  to += '[';
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) to += ',';
    to += std::to_string(numbers[i]);
  }
  to += ']';
}

}  // namespace

void AppendText(std::string& to, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  to += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      to += '\\';
      to += c;
    } else if (byte < 0x20) {
      to += "\\u00";
      to += kHex[byte >> 4];
      to += kHex[byte & 15];
    } else {
      to += c;
    }
  }
  to += '"';
}

RecordedLine::RecordedLine(std::string_view tag) : text_("[") { AppendText(text_, tag); }
RecordedLine& RecordedLine::Append(const RecordedLine& fields) {
  text_ += fields.text_;
  return *this;
}
RecordedLine& RecordedLine::Number(std::int64_t number) {
  text_ += ',';
  text_ += std::to_string(number);
  return *this;
}
RecordedLine& RecordedLine::Truth(bool truth) {
  text_ += truth ? ",true" : ",false";
  return *this;
}
RecordedLine& RecordedLine::Text(std::string_view text) {
  text_ += ',';
  AppendText(text_, text);
  return *this;
}
RecordedLine& RecordedLine::Tensors(std::span<const RecordedTensor> tensors) {
  text_ += ",[";
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    text_ += i == 0 ? R"({"address":)" : R"(,{"address":)";
    text_ += std::to_string(tensors[i].address);
    text_ += R"(,"dtype":)";
    AppendText(text_, tensors[i].dtype);
    text_ += R"(,"shape":)";
    AppendList(text_, tensors[i].shape);
    if (!tensors[i].strides.empty()) {
      text_ += R"(,"strides":)";
      AppendList(text_, tensors[i].strides);
    }
    text_ += '}';
  }
  text_ += ']';
  return *this;
}
std::string RecordedLine::Take() { return std::move(text_.append("]\n")); }

}  // namespace shardplan::softdevice

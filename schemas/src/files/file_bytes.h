// SPDX-License-Identifier: Apache-2.0
// A file that is read piece by piece.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "documents/plan_parts.h"

namespace shardplan {

class FileBytes final : public DocumentBytes {
 public:
  // Empty if the file cannot be opened, or is no file (a pipe can be read once only).
  explicit FileBytes(const std::string& path);
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;
  ~FileBytes() override;

  std::size_t size() const override { return size_; }
  std::string_view Read(std::size_t begin, std::size_t end) override;

 private:
  const int descriptor_;
  std::size_t size_ = 0;
  std::size_t begin_ = 0;  // of the window
  std::string window_;
};

}  // namespace shardplan

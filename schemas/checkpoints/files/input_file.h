// SPDX-License-Identifier: Apache-2.0
// A file of a checkpoint, read at positions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "documents/descriptor.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

class InputFile {
 public:
  // kBadInput: it is not there, or no regular file.
  static Result<InputFile> Open(const std::string& path);
  // Bytes in memory; errors call them `name`.
  static InputFile OfBytes(std::string name, std::string bytes);

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }
  std::int64_t modified_ns() const { return modified_ns_; }

  // kBadInput where the file ends before.
  Status Read(std::int64_t offset, char* bytes, std::int64_t count) const;
  Result<std::string> Read(std::int64_t offset, std::int64_t count) const;

  // An error at a byte of the file.
  std::unexpected<Error> ErrorAt(std::int64_t offset, std::string message, std::string found = {},
                                 std::string expected = {}) const;

 private:
  InputFile(std::string path, Descriptor descriptor)
      : path_(std::move(path)), descriptor_(std::move(descriptor)) {}

  std::string path_;
  Descriptor descriptor_;  // none: of bytes in memory
  std::string memory_;
  std::int64_t size_ = 0;
  std::int64_t modified_ns_ = 0;
};

}  // namespace shardplan

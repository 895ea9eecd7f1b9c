// SPDX-License-Identifier: Apache-2.0
// Zip archives as torch.save makes them: stored records, of a file or of a archive within a file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/files/input_file.h"

namespace shardplan {

struct ZipRecord {
  std::string name;
  std::int64_t header = 0;  // of its local header, in the file
  std::int64_t size = 0;
};

class ZipReader {
 public:
  // The archive in `length` bytes at `begin`.
  static Result<ZipReader> Open(const InputFile& file, std::int64_t begin, std::int64_t length);

  const std::vector<ZipRecord>& records() const { return records_; }
  const InputFile& file() const { return *file_; }
  // The record whose name is `name` behind the archive's own first folder; nullptr: there is none.
  const ZipRecord* Find(std::string_view name) const;
  // The offset of the record's bytes in the file; they are within the archive.
  Result<std::int64_t> DataOffset(const ZipRecord& record) const;
  Result<std::string> ReadAll(const ZipRecord& record) const;
  // The offset of the archive in the file.
  std::int64_t begin() const { return begin_; }

 private:
  struct Directory {
    std::int64_t at = 0, size = 0, count = 0;
  };
  ZipReader(const InputFile& file, std::int64_t begin, std::int64_t length)
      : file_(&file), begin_(begin), length_(length) {}
  Result<Directory> FindDirectory() const;
  Status ReadDirectory(const Directory& directory);

  const InputFile* file_;
  std::int64_t begin_, length_;
  std::vector<ZipRecord> records_;
};

}  // namespace shardplan

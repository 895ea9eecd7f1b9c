// SPDX-License-Identifier: Apache-2.0
// A file of a checkpoint that is being written: its bytes in order, and their checksums.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoints/files/journal.h"
#include "checkpoints/files/output_file.h"

namespace shardplan {

class FileSink {
 public:
  // `kept`: what the file has of an earlier run; it is read back instead of written, as far as it goes.
  static Result<FileSink> Open(const std::string& folder, const OutputFile& output, WrittenPart kept);

  // The parts of a step, in order: its literal, then its data in pieces.
  Status Literal(std::int32_t step);
  Status Data(std::int32_t step, const char* bytes, std::int64_t count);
  // Whether the next `count` bytes are there already. They are not written again.
  bool Has(std::int64_t count) const { return position_ + count <= kept_.bytes; }
  // Reads them back, as data of the step.
  Status Keep(std::int32_t step, std::int64_t count);
  // The prefix of `kept` that fits into the file.
  WrittenPart kept() const { return kept_; }
  // Whether what was kept is what the journal says. Asked once all of it has been passed.
  bool KeptIsRight() const { return kept_is_right_; }

  WrittenPart written() const { return {position_, crc_}; }
  // The file has these bytes and no others.
  Status Finish();

 private:
  FileSink(std::string path, const OutputFile& output, Descriptor descriptor, WrittenPart kept)
      : path_(std::move(path)),
        output_(&output),
        descriptor_(std::move(descriptor)),
        kept_(kept),
        step_crcs_(output.steps.size(), 0) {}
  Status Write(const char* bytes, std::int64_t count);
  void Pass(const char* bytes, std::int64_t count);

  std::string path_;
  const OutputFile* output_;
  Descriptor descriptor_;
  WrittenPart kept_;
  bool kept_is_right_ = true;
  std::int64_t position_ = 0;
  std::int64_t begun_ = 0;  // so far the disk has been told to write
  std::uint32_t crc_ = 0;
  std::vector<std::uint32_t> step_crcs_;  // of the data of each step
  std::vector<char> buffer_;
};

// Flushes the file's bytes to the disk.
Status FlushFile(const std::string& path);

// The CRC-32 and the size of a file. kEnvironment: it cannot be read.
Result<WrittenPart> ChecksumOfFile(const std::string& path);

}  // namespace shardplan

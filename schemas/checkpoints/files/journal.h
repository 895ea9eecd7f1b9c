// SPDX-License-Identifier: Apache-2.0
// The list of what has been written of a checkpoint, with checksums. It lies with the files, and stays there.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "documents/descriptor.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

inline constexpr std::string_view kJournalName = ".shardplan-checksums";

struct WrittenPart {
  std::int64_t bytes = 0;   // from the begin of the file
  std::uint32_t crc32 = 0;  // of them
};

class Journal {
 public:
  // Opens or begins the one of a folder, alone: kEnvironment where another process has it. Entries of another
  // `fingerprint` are dropped, and `is_same` is false.
  static Result<Journal> Open(const std::string& folder, const std::string& fingerprint);
  // The written parts of a folder, by file; empty where it is of another fingerprint, or has none.
  static std::map<std::string, WrittenPart> Read(const std::string& folder, const std::string& fingerprint);

  bool is_same() const { return is_same_; }
  const std::map<std::string, WrittenPart>& written() const { return written_; }
  Status Add(const std::string& file, WrittenPart part);
  Status Flush();

 private:
  Journal(std::string path, Descriptor descriptor)
      : path_(std::move(path)), descriptor_(std::move(descriptor)) {}

  std::string path_;
  Descriptor descriptor_;
  bool is_same_ = false;
  std::map<std::string, WrittenPart> written_;
};

}  // namespace shardplan

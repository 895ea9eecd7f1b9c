// SPDX-License-Identifier: Apache-2.0
// Zip archives as torch.save writes them: stored records that begin at multiples of 64 bytes of the archive.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/files/output_file.h"
#include "shardplan/schemas/dtype.h"

namespace shardplan {

// Appends one archive to a file, which has no archive under way.
class ZipWriter {
 public:
  explicit ZipWriter(OutputFile& file) : file_(file), begin_(file.size_bytes) {}

  void Add(std::string_view name, std::string_view bytes);
  void AddData(std::string_view name, std::int32_t tensor, std::vector<std::int64_t> low,
               std::vector<std::int64_t> size, std::int64_t bytes);
  void Finish();

 private:
  struct Entry {
    std::string name;
    std::int64_t header = 0, size = 0;
    std::int32_t step = -1;  // whose data it has; -1: the CRC is known
    std::uint32_t crc = 0;
  };
  void BeginRecord(std::string_view name, std::int64_t size);
  void EndRecord();
  void AppendCrc(const Entry& entry);
  void AppendNumber(std::uint64_t value, std::size_t bytes);
  std::int64_t Position() const { return file_.size_bytes - begin_; }

  OutputFile& file_;
  std::int64_t begin_;
  std::vector<Entry> entries_;
};

// The records of torch.save around a pickle: Begin, then the storages ("data/0", ...), then End.
void BeginTorchArchive(ZipWriter& zip, std::string_view pickle);
void EndTorchArchive(ZipWriter& zip);
// A whole file of torch.save, without storages.
std::string TorchArchiveOf(std::string_view pickle);

class PickleWriter;
// A contiguous tensor whose storage is data/<key>.
void WriteTorchTensor(PickleWriter& pickle, DType dtype, const std::vector<std::int64_t>& size,
                      std::string_view key);

}  // namespace shardplan

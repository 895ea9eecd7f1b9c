// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/files/zip_writer.h"

#include <fmt/format.h>
#include <libdeflate.h>

#include <algorithm>

#include "checkpoints/files/little_endian.h"
#include "checkpoints/files/pickle.h"
#include "checkpoints/files/torch_archive.h"

namespace shardplan {
namespace {

constexpr std::int64_t kAlignment = 64;
constexpr std::int64_t kRecordHeader = 30;
constexpr std::int64_t kExtraHeader = 4;
constexpr std::int64_t kMost32 = 0xffffffff;
constexpr std::size_t kMostNames = 0xffff;
constexpr std::uint16_t kFlags = 0x0808;  // CRC and sizes follow the data, names are UTF-8
constexpr std::string_view kFolder = "archive/";

bool Needs64(std::int64_t value) { return value >= kMost32; }

}  // namespace

void ZipWriter::AppendNumber(std::uint64_t value, std::size_t bytes) {
  std::string text;
  AppendLittleEndian(text, value, bytes);
  file_.Append(text);
}

void ZipWriter::AppendCrc(const Entry& entry) {
  if (entry.step >= 0) {
    file_.AppendCrcOf(entry.step);
  } else {
    AppendNumber(entry.crc, 4);
  }
}

void ZipWriter::BeginRecord(std::string_view name, std::int64_t size) {
  Entry entry{.name = fmt::format("{}{}", kFolder, name), .header = Position(), .size = size};
  const bool is_64 = Needs64(size);
  const std::int64_t fields = kRecordHeader + static_cast<std::int64_t>(entry.name.size()) +
                              (is_64 ? kExtraHeader + 16 : 0) + kExtraHeader;
  const std::int64_t padding = (kAlignment - (Position() + fields) % kAlignment) % kAlignment;
  file_.Append("PK\x03\x04");
  AppendNumber(is_64 ? 45 : 0, 2);
  AppendNumber(kFlags, 2);
  AppendNumber(0, 6);  // method, time, date
  AppendNumber(0, 4);  // the CRC
  AppendNumber(is_64 ? kMost32 : 0, 4);
  AppendNumber(is_64 ? kMost32 : 0, 4);
  AppendNumber(entry.name.size(), 2);
  AppendNumber(static_cast<std::uint64_t>((is_64 ? kExtraHeader + 16 : 0) + kExtraHeader + padding), 2);
  file_.Append(entry.name);
  if (is_64) {
    AppendNumber(1, 2);
    AppendNumber(16, 2);
    AppendNumber(0, 8);
    AppendNumber(0, 8);
  }
  file_.Append("FB");
  AppendNumber(static_cast<std::uint64_t>(padding), 2);
  file_.Append(std::string(static_cast<std::size_t>(padding), 'Z'));
  entries_.push_back(std::move(entry));
}

void ZipWriter::EndRecord() {
  const Entry& entry = entries_.back();
  file_.Append("PK\x07\x08");
  AppendCrc(entry);
  const std::size_t bytes = Needs64(entry.size) ? 8 : 4;
  AppendNumber(static_cast<std::uint64_t>(entry.size), bytes);
  AppendNumber(static_cast<std::uint64_t>(entry.size), bytes);
}

void ZipWriter::Add(std::string_view name, std::string_view bytes) {
  BeginRecord(name, static_cast<std::int64_t>(bytes.size()));
  entries_.back().crc = libdeflate_crc32(0, bytes.data(), bytes.size());
  file_.Append(bytes);
  EndRecord();
}

void ZipWriter::AddData(std::string_view name, std::int32_t tensor, std::vector<std::int64_t> low,
                        std::vector<std::int64_t> size, std::int64_t bytes) {
  BeginRecord(name, bytes);
  if (bytes > 0) entries_.back().step = file_.AppendData(tensor, std::move(low), std::move(size), bytes);
  EndRecord();
}

void ZipWriter::Finish() {
  const std::int64_t directory = Position();
  for (const Entry& entry : entries_) {
    std::string extra;
    if (Needs64(entry.size)) {
      AppendLittleEndian(extra, static_cast<std::uint64_t>(entry.size), 8);
      AppendLittleEndian(extra, static_cast<std::uint64_t>(entry.size), 8);
    }
    if (Needs64(entry.header)) AppendLittleEndian(extra, static_cast<std::uint64_t>(entry.header), 8);
    const auto size32 = static_cast<std::uint64_t>(Needs64(entry.size) ? kMost32 : entry.size);
    file_.Append("PK\x01\x02");
    AppendNumber(extra.empty() ? 0 : 45, 2);
    AppendNumber(extra.empty() ? 0 : 45, 2);
    AppendNumber(kFlags, 2);
    AppendNumber(0, 6);  // method, time, date
    AppendCrc(entry);
    AppendNumber(size32, 4);
    AppendNumber(size32, 4);
    AppendNumber(entry.name.size(), 2);
    AppendNumber(extra.empty() ? 0 : extra.size() + kExtraHeader, 2);
    AppendNumber(0, 6);  // comment, disk, inner attributes
    AppendNumber(0, 4);  // outer attributes
    AppendNumber(static_cast<std::uint64_t>(Needs64(entry.header) ? kMost32 : entry.header), 4);
    file_.Append(entry.name);
    if (extra.empty()) continue;
    AppendNumber(1, 2);
    AppendNumber(extra.size(), 2);
    file_.Append(extra);
  }
  const std::int64_t end = Position();
  const auto count = static_cast<std::uint64_t>(entries_.size());
  const auto size = static_cast<std::uint64_t>(end - directory);
  file_.Append("PK\x06\x06");
  AppendNumber(44, 8);
  AppendNumber(45, 2);
  AppendNumber(45, 2);
  AppendNumber(0, 8);
  AppendNumber(count, 8);
  AppendNumber(count, 8);
  AppendNumber(size, 8);
  AppendNumber(static_cast<std::uint64_t>(directory), 8);
  file_.Append("PK\x06\x07");
  AppendNumber(0, 4);
  AppendNumber(static_cast<std::uint64_t>(end), 8);
  AppendNumber(1, 4);
  file_.Append("PK\x05\x06");
  AppendNumber(0, 4);
  const std::uint64_t count16 = std::min<std::uint64_t>(count, kMostNames);
  AppendNumber(count16, 2);
  AppendNumber(count16, 2);
  AppendNumber(Needs64(end - directory) ? kMost32 : size, 4);
  AppendNumber(static_cast<std::uint64_t>(std::min(directory, kMost32)), 4);
  AppendNumber(0, 2);
}

void BeginTorchArchive(ZipWriter& zip, std::string_view pickle) {
  zip.Add("data.pkl", pickle);
  zip.Add(".format_version", "1");
  zip.Add(".storage_alignment", fmt::format("{}", kAlignment));
  zip.Add("byteorder", "little");
}

void EndTorchArchive(ZipWriter& zip) {
  zip.Add("version", "3\n");
  zip.Finish();
}

std::string TorchArchiveOf(std::string_view pickle) {
  OutputFile file;
  ZipWriter zip(file);
  BeginTorchArchive(zip, pickle);
  EndTorchArchive(zip);
  return std::move(file.steps.front().literal);
}

void WriteTorchTensor(PickleWriter& pickle, DType dtype, const std::vector<std::int64_t>& size,
                      std::string_view key) {
  std::int64_t numel = 1;
  for (const std::int64_t extent : size) numel *= extent;
  std::vector<std::int64_t> strides(size.size(), 1);
  for (std::size_t d = size.size(); d-- > 1;)
    strides[d - 1] = strides[d] * std::max<std::int64_t>(1, size[d]);
  const std::string_view storage = TorchStorageOf(dtype);
  pickle.Global(storage.empty() ? "torch._utils _rebuild_tensor_v3" : "torch._utils _rebuild_tensor_v2");
  pickle.Mark();
  pickle.Mark();
  pickle.String("storage");
  pickle.Global(storage.empty() ? "torch.storage UntypedStorage" : storage);
  pickle.String(key);
  pickle.String("cpu");
  pickle.Int(storage.empty() ? numel * SizeBytes(dtype) : numel);
  pickle.Op('t');
  pickle.Op('Q');
  pickle.Int(0);
  pickle.IntTuple(size);
  pickle.IntTuple(strides);
  pickle.Bool(false);
  pickle.Global("collections OrderedDict");
  pickle.EmptyTuple();
  pickle.Op('R');
  if (storage.empty()) pickle.Global(fmt::format("torch {}", Name(dtype)));
  pickle.Op('t');
  pickle.Op('R');
}

}  // namespace shardplan

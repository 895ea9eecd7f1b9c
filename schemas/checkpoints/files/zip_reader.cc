// SPDX-License-Identifier: Apache-2.0
// The fields are those of PKWARE's APPNOTE.TXT, 4.3.
#include "checkpoints/files/zip_reader.h"

#include <algorithm>

#include "checkpoints/files/little_endian.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

constexpr std::int64_t kEndBytes = 22;
constexpr std::int64_t kEnd64Bytes = 56;
constexpr std::int64_t kLocatorBytes = 20;
constexpr std::int64_t kEntryBytes = 46;
constexpr std::int64_t kLocalBytes = 30;
constexpr std::uint64_t kIn64 = 0xffffffff;
constexpr std::int64_t kLongestComment = 0xffff;

constexpr std::string_view kEndSign("PK\x05\x06", 4);
constexpr std::string_view kEnd64Sign("PK\x06\x06", 4);
constexpr std::string_view kLocatorSign("PK\x06\x07", 4);
constexpr std::string_view kEntrySign("PK\x01\x02", 4);
constexpr std::string_view kLocalSign("PK\x03\x04", 4);

// Sizes and offsets that do not fit into their fields stand in an extra field, in their order.
void TakeFrom64(std::string_view extra, std::initializer_list<std::uint64_t*> values) {
  for (std::size_t at = 0; at + 4 <= extra.size();) {
    const std::size_t size = LittleEndian(extra, at + 2, 2);
    if (LittleEndian(extra, at, 2) == 1) {
      std::size_t field = at + 4;
      for (std::uint64_t* value : values) {
        if (*value != kIn64 || field + 8 > std::min(extra.size(), at + 4 + size)) continue;
        *value = LittleEndian(extra, field, 8);
        field += 8;
      }
    }
    at += 4 + size;
  }
}

}  // namespace

Result<ZipReader> ZipReader::Open(const InputFile& file, std::int64_t begin, std::int64_t length) {
  if (begin < 0 || length < 0 || begin > file.size() || length > file.size() - begin)
    return file.ErrorAt(begin, "the file ends before the end of a archive in it",
                        fmt::format("{} bytes", file.size()), fmt::format("{} bytes from there", length));
  ZipReader zip(file, begin, length);
  const Result<Directory> directory = zip.FindDirectory();
  if (!directory) return std::unexpected(directory.error());
  if (Status status = zip.ReadDirectory(*directory); !status) return std::unexpected(status.error());
  return zip;
}

Result<ZipReader::Directory> ZipReader::FindDirectory() const {
  if (length_ < kEndBytes)
    return file_->ErrorAt(begin_, "too short for what torch.save writes", fmt::format("{} bytes", length_),
                          fmt::format("at least {}", kEndBytes));
  // Without a comment the end is the last bytes.
  std::int64_t tail_bytes = std::min(length_, kEndBytes + kLocatorBytes + kEnd64Bytes);
  Result<std::string> tail = file_->Read(begin_ + length_ - tail_bytes, tail_bytes);
  if (!tail) return std::unexpected(tail.error());
  std::size_t end = tail->size() - kEndBytes;
  if (tail->compare(end, 4, kEndSign) != 0) {
    tail_bytes = std::min(length_, kEndBytes + kLongestComment + kLocatorBytes + kEnd64Bytes);
    tail = file_->Read(begin_ + length_ - tail_bytes, tail_bytes);
    if (!tail) return std::unexpected(tail.error());
    end = tail->rfind(kEndSign, tail->size() - kEndBytes);
    if (end == std::string::npos)
      return file_->ErrorAt(begin_ + length_ - kEndBytes,
                            "no end of a zip archive, so no file that torch.save has written whole", {},
                            "the bytes PK\\x05\\x06");
  }
  const std::int64_t end_at = begin_ + length_ - tail_bytes + static_cast<std::int64_t>(end);
  std::uint64_t count = LittleEndian(*tail, end + 10, 2);
  std::uint64_t size = LittleEndian(*tail, end + 12, 4);
  std::uint64_t offset = LittleEndian(*tail, end + 16, 4);
  if (count == 0xffff || size == kIn64 || offset == kIn64) {
    const std::int64_t locator_at = end_at - kLocatorBytes;
    if (locator_at < begin_) return file_->ErrorAt(end_at, "the zip archive's end of 64 bits is missing");
    const Result<std::string> locator = file_->Read(locator_at, kLocatorBytes);
    if (!locator) return std::unexpected(locator.error());
    const std::uint64_t end64 = LittleEndian(*locator, 8, 8);
    if (!locator->starts_with(kLocatorSign) || end64 > static_cast<std::uint64_t>(length_ - kEnd64Bytes))
      return file_->ErrorAt(locator_at, "the zip archive's end of 64 bits is missing");
    const std::int64_t end64_at = begin_ + static_cast<std::int64_t>(end64);
    const Result<std::string> found = file_->Read(end64_at, kEnd64Bytes);
    if (!found) return std::unexpected(found.error());
    if (!found->starts_with(kEnd64Sign))
      return file_->ErrorAt(end64_at, "no end of a zip archive of 64 bits", {}, "the bytes PK\\x06\\x06");
    count = LittleEndian(*found, 32, 8);
    size = LittleEndian(*found, 40, 8);
    offset = LittleEndian(*found, 48, 8);
  }
  const auto length = static_cast<std::uint64_t>(length_);
  if (offset > length || size > length - offset || count > size / kEntryBytes)
    return file_->ErrorAt(end_at, "the zip archive's directory does not lie in it",
                          fmt::format("{} entries in {} bytes at {}", count, size, offset),
                          fmt::format("within {} bytes", length_));
  return Directory{begin_ + static_cast<std::int64_t>(offset), static_cast<std::int64_t>(size),
                   static_cast<std::int64_t>(count)};
}

Status ZipReader::ReadDirectory(const Directory& directory) {
  const Result<std::string> bytes = file_->Read(directory.at, directory.size);
  if (!bytes) return std::unexpected(bytes.error());
  records_.reserve(static_cast<std::size_t>(directory.count));
  std::size_t at = 0;
  for (std::int64_t e = 0; e < directory.count; ++e) {
    const std::int64_t here = directory.at + static_cast<std::int64_t>(at);
    if (bytes->size() - at < kEntryBytes || bytes->compare(at, 4, kEntrySign) != 0)
      return file_->ErrorAt(here, "no entry of a zip archive's directory", {}, "the bytes PK\\x01\\x02");
    const std::uint64_t method = LittleEndian(*bytes, at + 10, 2);
    std::uint64_t packed = LittleEndian(*bytes, at + 20, 4);
    std::uint64_t size = LittleEndian(*bytes, at + 24, 4);
    const std::size_t name_bytes = LittleEndian(*bytes, at + 28, 2);
    const std::size_t extra_bytes = LittleEndian(*bytes, at + 30, 2);
    const std::size_t more = name_bytes + extra_bytes + LittleEndian(*bytes, at + 32, 2);
    std::uint64_t header = LittleEndian(*bytes, at + 42, 4);
    if (bytes->size() - at - kEntryBytes < more)
      return file_->ErrorAt(here, "the zip archive's directory ends in an entry");
    std::string name = bytes->substr(at + kEntryBytes, name_bytes);
    TakeFrom64(std::string_view(*bytes).substr(at + kEntryBytes + name_bytes, extra_bytes),
               {&size, &packed, &header});
    if (method != 0 || packed != size)
      return file_->ErrorAt(here, "a compressed record, which torch.save does not write",
                            fmt::format("{} by method {}", Printable(name), method), "a stored record");
    const auto length = static_cast<std::uint64_t>(length_);
    if (header > length || size > length - header)
      return file_->ErrorAt(here, fmt::format("the record {} does not lie in the archive", Printable(name)),
                            fmt::format("{} bytes at {}", size, header),
                            fmt::format("within {} bytes", length_));
    records_.push_back(
        {std::move(name), begin_ + static_cast<std::int64_t>(header), static_cast<std::int64_t>(size)});
    at += kEntryBytes + more;
  }
  return {};
}

const ZipRecord* ZipReader::Find(std::string_view name) const {
  for (const ZipRecord& record : records_) {
    const std::size_t slash = record.name.find('/');
    if (slash != std::string::npos && std::string_view(record.name).substr(slash + 1) == name) return &record;
  }
  return nullptr;
}

Result<std::int64_t> ZipReader::DataOffset(const ZipRecord& record) const {
  const Result<std::string> local = file_->Read(record.header, kLocalBytes);
  if (!local) return std::unexpected(local.error());
  if (!local->starts_with(kLocalSign))
    return file_->ErrorAt(record.header, fmt::format("no header of the record {}", Printable(record.name)),
                          {}, "the bytes PK\\x03\\x04");
  const std::int64_t data =
      record.header + kLocalBytes +
      static_cast<std::int64_t>(LittleEndian(*local, 26, 2) + LittleEndian(*local, 28, 2));
  if (data + record.size > begin_ + length_)
    return file_->ErrorAt(
        record.header, fmt::format("the record {} does not lie in the archive", Printable(record.name)),
        fmt::format("{} bytes at {}", record.size, data), fmt::format("an end at {}", begin_ + length_));
  return data;
}

Result<std::string> ZipReader::ReadAll(const ZipRecord& record) const {
  const Result<std::int64_t> offset = DataOffset(record);
  if (!offset) return std::unexpected(offset.error());
  return file_->Read(*offset, record.size);
}

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/files/file_sink.h"

#include <fcntl.h>
#include <libdeflate.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

namespace shardplan {
namespace {

constexpr std::int64_t kBeginBytes = std::int64_t{16} << 20;
constexpr std::int64_t kReadBytes = std::int64_t{4} << 20;

std::uint32_t Crc32(std::uint32_t crc, const char* bytes, std::int64_t count) {
  return libdeflate_crc32(crc, bytes, static_cast<std::size_t>(count));
}

}  // namespace

Result<FileSink> FileSink::Open(const std::string& folder, const OutputFile& output, WrittenPart kept) {
  std::string path = (std::filesystem::path(folder) / output.name).string();
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | (kept.bytes == 0 ? O_TRUNC : 0);
  Descriptor descriptor(::open(path.c_str(), flags, 0666));
  if (descriptor.value() < 0) return SystemError(ErrorCode::kEnvironment, path, "create the file");
  struct stat status = {};
  if (::fstat(descriptor.value(), &status) != 0 || status.st_size < kept.bytes) kept = {};
  return FileSink(std::move(path), output, std::move(descriptor), kept);
}

void FileSink::Pass(const char* bytes, std::int64_t count) {
  crc_ = Crc32(crc_, bytes, count);
  position_ += count;
  if (position_ == kept_.bytes) kept_is_right_ = crc_ == kept_.crc32;
}

Status FileSink::Write(const char* bytes, std::int64_t count) {
  if (position_ < kept_.bytes && position_ + count > kept_.bytes) kept_is_right_ = false;
  for (std::int64_t have = 0; have < count;) {
    const ssize_t written =
        ::pwrite(descriptor_.value(), bytes + have, static_cast<std::size_t>(count - have),
                 static_cast<off_t>(position_ + have));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return SystemError(ErrorCode::kEnvironment, path_, "write the file");
    have += written;
  }
  Pass(bytes, count);
  if (position_ - begun_ >= kBeginBytes) {  // the disk has less to do at the end
    (void)::sync_file_range(descriptor_.value(), static_cast<off_t>(begun_),
                            static_cast<off_t>(position_ - begun_), SYNC_FILE_RANGE_WRITE);
    begun_ = position_;
  }
  return {};
}

Status FileSink::Literal(std::int32_t step) {
  const OutputStep& of = output_->steps[step];
  std::string bytes = of.literal;
  for (const CrcSlot& slot : of.crcs) {
    for (std::size_t i = 0; i < 4; ++i)
      bytes[slot.at + i] = static_cast<char>(step_crcs_[slot.step] >> (8 * i));
  }
  if (Has(std::ssize(bytes))) return Keep(-1, std::ssize(bytes));
  return Write(bytes.data(), std::ssize(bytes));
}

Status FileSink::Data(std::int32_t step, const char* bytes, std::int64_t count) {
  step_crcs_[step] = Crc32(step_crcs_[step], bytes, count);
  return Write(bytes, count);
}

Status FileSink::Keep(std::int32_t step, std::int64_t count) {
  buffer_.resize(static_cast<std::size_t>(std::min(count, kReadBytes)));
  while (count > 0) {
    const ssize_t got =
        ::pread(descriptor_.value(), buffer_.data(), static_cast<std::size_t>(std::min(count, kReadBytes)),
                static_cast<off_t>(position_));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return SystemError(ErrorCode::kEnvironment, path_, "read back what was written");
    if (step >= 0) step_crcs_[step] = Crc32(step_crcs_[step], buffer_.data(), got);
    Pass(buffer_.data(), got);
    count -= got;
  }
  return {};
}

Status FileSink::Finish() {
  if (::ftruncate(descriptor_.value(), static_cast<off_t>(position_)) == 0 && descriptor_.Close()) return {};
  return SystemError(ErrorCode::kEnvironment, path_, "write the file");
}

Status FlushFile(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.value() >= 0 && ::fsync(file.value()) == 0) return {};
  return SystemError(ErrorCode::kEnvironment, path, "write the file");
}

Result<WrittenPart> ChecksumOfFile(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.value() < 0) return SystemError(ErrorCode::kEnvironment, path, "read back what was written");
  std::vector<char> buffer(static_cast<std::size_t>(kReadBytes));
  WrittenPart part;
  while (true) {
    const ssize_t got = ::pread(file.value(), buffer.data(), buffer.size(), static_cast<off_t>(part.bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(ErrorCode::kEnvironment, path, "read back what was written");
    if (got == 0) return part;
    part.crc32 = Crc32(part.crc32, buffer.data(), got);
    part.bytes += got;
  }
}

}  // namespace shardplan

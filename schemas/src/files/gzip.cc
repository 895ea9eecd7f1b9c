// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <libdeflate.h>

#include <memory>

#include "files/available_memory.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

std::string Gzip(std::string_view text) {
  constexpr int kLevel = 6;
  const std::unique_ptr<libdeflate_compressor, decltype(&libdeflate_free_compressor)> compressor(
      libdeflate_alloc_compressor(kLevel), &libdeflate_free_compressor);
  std::string bytes(libdeflate_gzip_compress_bound(compressor.get(), text.size()), '\0');
  bytes.resize(
      libdeflate_gzip_compress(compressor.get(), text.data(), text.size(), bytes.data(), bytes.size()));
  SHARDPLAN_ASSERT(!bytes.empty(), "the bound is enough");
  return bytes;
}

bool IsGzip(std::string_view bytes) { return bytes.starts_with("\x1f\x8b"); }

Result<std::string> Gunzip(std::string_view bytes) {
  constexpr std::size_t kFooter = 4, kLeast = 18, kMostOfDeflate = 1032;  // RFC 1951: 258 bytes for 2 bits
  if (!IsGzip(bytes) || bytes.size() < kLeast)
    return MakeInputError("", "the gzip file is cut off", fmt::format("{} bytes", bytes.size()),
                          fmt::format("at least {}", kLeast));
  std::size_t size = 0;
  for (std::size_t b = 0; b < kFooter; ++b) {
    const auto byte = static_cast<unsigned char>(bytes[bytes.size() - kFooter + b]);
    size |= static_cast<std::size_t>(byte) << (8 * b);
  }
  if (size / kMostOfDeflate > bytes.size())
    return MakeInputError("", "the gzip file is damaged: it cannot hold what its end says",
                          fmt::format("{} bytes in {}", size, bytes.size()), {});
  if (Status there = CheckMemory("unpacking it", static_cast<std::int64_t>(size)); !there)
    return std::unexpected(std::move(there.error()));
  const std::unique_ptr<libdeflate_decompressor, decltype(&libdeflate_free_decompressor)> decompressor(
      libdeflate_alloc_decompressor(), &libdeflate_free_decompressor);
  std::string text(size, '\0');
  std::size_t read = 0, written = 0;
  const libdeflate_result result = libdeflate_gzip_decompress_ex(
      decompressor.get(), bytes.data(), bytes.size(), text.data(), text.size(), &read, &written);
  if (result != LIBDEFLATE_SUCCESS || written != size)
    return MakeInputError("", "the gzip file is damaged", "bytes that do not unpack to what its end says",
                          {});
  if (read != bytes.size())
    return MakeInputError("", "something follows the gzip file's one member",
                          fmt::format("{} bytes more", bytes.size() - read), "nothing");
  return text;
}

}  // namespace shardplan

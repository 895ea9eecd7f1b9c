// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/gzip.h"

#include <libdeflate.h>

#include <memory>

#include "shardplan/schemas/assert.h"

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

}  // namespace shardplan

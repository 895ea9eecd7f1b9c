// SPDX-License-Identifier: Apache-2.0
// The format of torch.save: a pickle and the bytes of storages, in a zip archive.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoints/files/input_file.h"
#include "checkpoints/files/pickle.h"
#include "checkpoints/files/zip_reader.h"
#include "shardplan/schemas/dtype.h"

namespace shardplan {

// "torch FloatStorage"; empty for dtypes whose storages torch saves without a type.
std::string_view TorchStorageOf(DType dtype);

struct TorchTensor {
  DType dtype = DType::kFloat32;
  std::int64_t offset = 0;  // in the file, of the first element
  std::vector<std::int64_t> size, strides;
};

class TorchArchive {
 public:
  static Result<TorchArchive> Open(const InputFile& file, std::int64_t begin, std::int64_t length);

  const PickleValue& root() const { return *pickle_.root; }
  std::size_t values() const { return pickle_.values.size(); }

  // The tensor within a parameter, or the value itself.
  static const PickleValue& WithoutParameter(const PickleValue& value);
  static bool IsTensor(const PickleValue& value);
  // Its elements lie within the archive. kBadInput: a kind of tensor that is not supported, or a wrong one.
  Result<TorchTensor> Tensor(const PickleValue& value) const;

  std::unexpected<Error> ErrorAt(const PickleValue& value, std::string message, std::string found = {},
                                 std::string expected = {}) const;

 private:
  TorchArchive(ZipReader zip, Pickle pickle, std::int64_t pickle_at);
  // Takes a tensor's id, and what rebuilds it.
  Result<DType> DTypeOf(const PickleValue& made, const PickleValue& storage) const;
  Result<const ZipRecord*> StorageOf(const PickleValue& id) const;

  ZipReader zip_;
  Pickle pickle_;
  std::int64_t pickle_at_;                                           // in the file
  std::unordered_map<std::string_view, const ZipRecord*> storages_;  // by what follows "data/"
};

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/files/torch_archive.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

using Kind = PickleValue::Kind;

constexpr auto kStorages = std::to_array<std::pair<std::string_view, DType>>({
    {"torch DoubleStorage", DType::kFloat64},
    {"torch FloatStorage", DType::kFloat32},
    {"torch BFloat16Storage", DType::kBFloat16},
    {"torch HalfStorage", DType::kFloat16},
    {"torch LongStorage", DType::kInt64},
    {"torch IntStorage", DType::kInt32},
    {"torch ShortStorage", DType::kInt16},
    {"torch CharStorage", DType::kInt8},
    {"torch ByteStorage", DType::kUInt8},
    {"torch BoolStorage", DType::kBool},
    {"torch ComplexFloatStorage", DType::kComplex64},
    {"torch ComplexDoubleStorage", DType::kComplex128},
});

// Functions that may be called to make a tensor, with the position of its dtype (0: that of the storage).
struct Rebuild {
  std::string_view name;
  std::size_t least_arguments, dtype_at;
};
constexpr auto kRebuilds = std::to_array<Rebuild>({{"torch._utils _rebuild_tensor", 4, 0},
                                                   {"torch._utils _rebuild_tensor_v2", 4, 0},
                                                   {"torch._utils _rebuild_tensor_v3", 7, 6}});

// The bytes of a tensor's last element behind its first, or -1: more than numbers hold.
std::int64_t LastElement(const std::vector<std::int64_t>& size, const std::vector<std::int64_t>& strides) {
  std::int64_t last = 0;
  for (std::size_t d = 0; d < size.size(); ++d) {
    std::int64_t step = 0;
    if (__builtin_mul_overflow(size[d] - 1, strides[d], &step) || __builtin_add_overflow(last, step, &last))
      return -1;
  }
  return last;
}

}  // namespace

std::string_view TorchStorageOf(DType dtype) {
  const auto* found = std::ranges::find(kStorages, dtype, &std::pair<std::string_view, DType>::second);
  return found == kStorages.end() ? std::string_view() : found->first;
}

TorchArchive::TorchArchive(ZipReader zip, Pickle pickle, std::int64_t pickle_at)
    : zip_(std::move(zip)), pickle_(std::move(pickle)), pickle_at_(pickle_at) {
  for (const ZipRecord& record : zip_.records()) {
    const std::string_view name = record.name;
    const std::size_t slash = name.find('/');
    if (slash != std::string_view::npos && name.substr(slash + 1).starts_with("data/"))
      storages_.emplace(name.substr(slash + 6), &record);
  }
}

Result<TorchArchive> TorchArchive::Open(const InputFile& file, std::int64_t begin, std::int64_t length) {
  Result<ZipReader> zip = ZipReader::Open(file, begin, length);
  if (!zip) return std::unexpected(zip.error());
  const ZipRecord* record = zip->Find("data.pkl");
  if (record == nullptr)
    return file.ErrorAt(begin, "the zip archive has no pickle, so torch.save did not write it", {},
                        "a record data.pkl");
  if (const ZipRecord* order = zip->Find("byteorder"); order != nullptr) {
    const Result<std::string> name = zip->ReadAll(*order);
    if (!name) return std::unexpected(name.error());
    if (*name != "little")
      return file.ErrorAt(order->header, "numbers in another order of bytes", Printable(*name), "little");
  }
  const Result<std::int64_t> at = zip->DataOffset(*record);
  if (!at) return std::unexpected(at.error());
  const Result<std::string> bytes = file.Read(*at, record->size);
  if (!bytes) return std::unexpected(bytes.error());
  Result<Pickle> pickle = ReadPickle(*bytes);
  if (!pickle) {
    Error error = pickle.error();
    error.file = file.path();
    error.message += " (in data.pkl)";
    if (error.pointer.starts_with("byte "))
      error.pointer = fmt::format("byte {}", *at + std::stoll(error.pointer.substr(5)));
    return std::unexpected(std::move(error));
  }
  return TorchArchive(std::move(*zip), std::move(*pickle), *at);
}

std::unexpected<Error> TorchArchive::ErrorAt(const PickleValue& value, std::string message, std::string found,
                                             std::string expected) const {
  return zip_.file().ErrorAt(pickle_at_ + static_cast<std::int64_t>(value.position), std::move(message),
                             std::move(found), std::move(expected));
}

const PickleValue& TorchArchive::WithoutParameter(const PickleValue& value) {
  for (const char* name : {"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state"}) {
    if (IsObjectOf(value, name) && !value.items[1]->items.empty()) return *value.items[1]->items[0];
  }
  return value;
}

bool TorchArchive::IsTensor(const PickleValue& value) {
  const PickleValue& tensor = WithoutParameter(value);
  return std::ranges::any_of(kRebuilds, [&](const Rebuild& of) { return IsObjectOf(tensor, of.name); });
}

Result<DType> TorchArchive::DTypeOf(const PickleValue& made, const PickleValue& storage) const {
  const auto* rebuild =
      std::ranges::find_if(kRebuilds, [&](const Rebuild& of) { return IsObjectOf(made, of.name); });
  std::string_view dtype = storage.text;
  std::optional<DType> found;
  if (rebuild->dtype_at != 0) {
    dtype = made.items[1]->items[rebuild->dtype_at]->text;
    found = DTypeFromName(dtype.substr(dtype.find(' ') + 1));
  } else {
    const auto* typed = std::ranges::find(kStorages, dtype, &std::pair<std::string_view, DType>::first);
    if (typed != kStorages.end()) found = typed->second;
  }
  if (!found) return ErrorAt(made, "a dtype that is not supported", Printable(dtype));
  return *found;
}

Result<const ZipRecord*> TorchArchive::StorageOf(const PickleValue& id) const {
  if (id.kind != Kind::kTuple || id.items.size() < 5 || id.items[0]->text != "storage" ||
      id.items[1]->kind != Kind::kGlobal || id.items[2]->kind != Kind::kString)
    return ErrorAt(id, "no storage as torch.save writes it");
  const auto storage = storages_.find(id.items[2]->text);
  if (storage != storages_.end()) return storage->second;
  return ErrorAt(id, "the archive has no such storage", Printable("data/" + id.items[2]->text));
}

Result<TorchTensor> TorchArchive::Tensor(const PickleValue& value) const {
  const PickleValue& made = WithoutParameter(value);
  const auto* rebuild =
      std::ranges::find_if(kRebuilds, [&](const Rebuild& of) { return IsObjectOf(made, of.name); });
  const std::vector<const PickleValue*>& arguments = made.items[1]->items;
  TorchTensor tensor;
  if (arguments.size() < rebuild->least_arguments || arguments[0]->kind != Kind::kPersistent ||
      !ToIntegers(*arguments[2], tensor.size) || !ToIntegers(*arguments[3], tensor.strides) ||
      tensor.size.size() != tensor.strides.size() || arguments[1]->kind != Kind::kInt)
    return ErrorAt(made, "no tensor as torch.save writes it");
  const PickleValue& id = *arguments[0]->items[0];
  const Result<const ZipRecord*> storage = StorageOf(id);
  if (!storage) return std::unexpected(storage.error());
  const Result<DType> dtype = DTypeOf(made, *id.items[1]);
  if (!dtype) return std::unexpected(dtype.error());
  const Result<std::int64_t> data = zip_.DataOffset(**storage);
  if (!data) return std::unexpected(data.error());
  tensor.dtype = *dtype;
  const auto negative = [](std::int64_t number) { return number < 0; };
  const std::int64_t first = arguments[1]->integer;
  if (std::ranges::any_of(tensor.size, negative) || std::ranges::any_of(tensor.strides, negative) ||
      first < 0)
    return ErrorAt(made, "no shape of a tensor", fmt::format("[{}]", fmt::join(tensor.size, ", ")));
  tensor.offset = *data;
  if (std::ranges::find(tensor.size, 0) != tensor.size.end()) return tensor;
  const std::int64_t elements = (*storage)->size / SizeBytes(tensor.dtype);
  const std::int64_t last = LastElement(tensor.size, tensor.strides);
  if (last < 0 || first > elements || last >= elements - first)
    return ErrorAt(made, "the tensor does not lie within its storage",
                   fmt::format("[{}] from element {}", fmt::join(tensor.size, ", "), first),
                   fmt::format("{} elements in {}", elements, Printable((*storage)->name)));
  tensor.offset += first * SizeBytes(tensor.dtype);
  return tensor;
}

}  // namespace shardplan

// SPDX-License-Identifier: Apache-2.0
// Which names pickles may refer to, and looks at their values.
#include <algorithm>
#include <array>

#include "checkpoints/files/pickle.h"

namespace shardplan {
namespace {

// Sorted. Containers and tensors that torch.load(weights_only=True) lets through, and the classes of
// torch.distributed.checkpoint's metadata.
constexpr auto kGlobals = std::to_array<std::string_view>({
    "__builtin__ bool",
    "__builtin__ bytearray",
    "__builtin__ complex",
    "__builtin__ dict",
    "__builtin__ float",
    "__builtin__ frozenset",
    "__builtin__ getattr",
    "__builtin__ int",
    "__builtin__ list",
    "__builtin__ set",
    "__builtin__ str",
    "__builtin__ tuple",
    "_codecs encode",
    "builtins bool",
    "builtins bytearray",
    "builtins complex",
    "builtins dict",
    "builtins float",
    "builtins frozenset",
    "builtins getattr",
    "builtins int",
    "builtins list",
    "builtins set",
    "builtins str",
    "builtins tuple",
    "collections Counter",
    "collections OrderedDict",
    "collections defaultdict",
    "collections deque",
    "datetime datetime",
    "datetime timedelta",
    "pathlib Path",
    "pathlib PosixPath",
    "pathlib PurePath",
    "pathlib PurePosixPath",
    "pathlib._local PosixPath",
    "torch BFloat16Storage",
    "torch BoolStorage",
    "torch ByteStorage",
    "torch CharStorage",
    "torch ComplexDoubleStorage",
    "torch ComplexFloatStorage",
    "torch DoubleStorage",
    "torch FloatStorage",
    "torch HalfStorage",
    "torch IntStorage",
    "torch LongStorage",
    "torch ShortStorage",
    "torch Size",
    "torch bfloat16",
    "torch bool",
    "torch complex128",
    "torch complex32",
    "torch complex64",
    "torch device",
    "torch float16",
    "torch float32",
    "torch float64",
    "torch float8_e4m3fn",
    "torch float8_e4m3fnuz",
    "torch float8_e5m2",
    "torch float8_e5m2fnuz",
    "torch float8_e8m0fnu",
    "torch int16",
    "torch int32",
    "torch int64",
    "torch int8",
    "torch uint16",
    "torch uint32",
    "torch uint64",
    "torch uint8",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_parameter_with_state",
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    "torch.distributed.checkpoint.metadata BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata Metadata",
    "torch.distributed.checkpoint.metadata MetadataIndex",
    "torch.distributed.checkpoint.metadata StorageMeta",
    "torch.distributed.checkpoint.metadata TensorProperties",
    "torch.distributed.checkpoint.metadata TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
    "torch.nn.parameter Parameter",
    "torch.serialization _get_layout",
    "torch.storage TypedStorage",
    "torch.storage UntypedStorage",
});
static_assert(std::ranges::is_sorted(kGlobals));

}  // namespace

bool IsKnownGlobal(std::string_view name) { return std::ranges::binary_search(kGlobals, name); }

bool IsGlobal(const PickleValue& value, std::string_view name) {
  return value.kind == PickleValue::Kind::kGlobal && value.text == name;
}

bool IsObjectOf(const PickleValue& value, std::string_view name) {
  return value.kind == PickleValue::Kind::kObject && value.items[0]->text == name;
}

bool IsMapping(const PickleValue& value) {
  return value.kind == PickleValue::Kind::kDict || IsObjectOf(value, "collections OrderedDict") ||
         IsObjectOf(value, "collections defaultdict");
}

const PickleValue* Find(const PickleValue& mapping, std::string_view key) {
  const PickleValue* found = nullptr;
  ForEachPair(mapping, [&](const PickleValue& name, const PickleValue& value) {
    if (name.kind == PickleValue::Kind::kString && name.text == key) found = &value;
    return true;
  });
  return found;
}

bool ToInteger(const PickleValue& value, std::int64_t& integer) {
  integer = value.integer;
  return value.kind == PickleValue::Kind::kInt;
}

bool ToIntegers(const PickleValue& value, std::vector<std::int64_t>& integers) {
  if (IsObjectOf(value, "torch Size"))
    return value.items[1]->items.size() == 1 && value.items[1]->items[0]->kind == PickleValue::Kind::kTuple &&
           ToIntegers(*value.items[1]->items[0], integers);
  if (value.kind != PickleValue::Kind::kTuple && value.kind != PickleValue::Kind::kList) return false;
  integers.clear();
  for (const PickleValue* item : value.items) {
    if (item->kind != PickleValue::Kind::kInt) return false;
    integers.push_back(item->integer);
  }
  return true;
}

}  // namespace shardplan

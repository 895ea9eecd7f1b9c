// SPDX-License-Identifier: Apache-2.0
#include "units/layout.h"

#include <numeric>
#include <optional>

namespace shardplan {
namespace {

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::vector<ExtensionBuffer> GatheredTensors(const Unit& unit, const UnitParameter& parameter,
                                             std::int64_t ranks) {
  if (!parameter.gathered.empty()) return parameter.gathered;
  return {{ComputeDType(unit, parameter), PaddedPieceNumel(parameter, ranks)}};
}

DType GatherDType(const Unit& unit) {
  std::optional<DType> common;
  for (const UnitParameter& parameter : unit.parameters) {
    for (const ExtensionBuffer& tensor : GatheredTensors(unit, parameter, 1)) {
      if (common.value_or(tensor.dtype) != tensor.dtype) return DType::kUInt8;
      common = tensor.dtype;
    }
  }
  return common.value_or(unit.param_dtype);
}

std::vector<Bytes> GatherInputParts(const Unit& unit, std::int64_t ranks) {
  std::vector<Bytes> parts;
  for (const UnitParameter& parameter : unit.parameters) {
    Bytes bytes;
    for (const ExtensionBuffer& tensor : GatheredTensors(unit, parameter, ranks)) {
      bytes.value += tensor.numel * SizeBytes(tensor.dtype);
    }
    parts.push_back(bytes);
  }
  return parts;
}

std::vector<Bytes> OriginalShardParts(const Unit& unit, std::int64_t ranks) {
  std::vector<Bytes> parts;
  for (const UnitParameter& parameter : unit.parameters) {
    parts.push_back(Bytes{PaddedPieceNumel(parameter, ranks) * SizeBytes(parameter.dtype)});
  }
  return parts;
}

std::vector<Bytes> UnshardedParts(const Unit& unit, std::int64_t ranks) {
  std::vector<Bytes> parts;
  for (const UnitParameter& parameter : unit.parameters) {
    const ExtensionBuffer first = GatheredTensors(unit, parameter, ranks).front();
    parts.push_back(Bytes{first.numel * ranks * SizeBytes(first.dtype)});
  }
  return parts;
}

void LayOutFlat(Unit& unit, bool aligned, DType aligned_dtype, std::int64_t ranks) {
  const std::int64_t alignment = aligned ? 16 / SizeBytes(aligned_dtype) : 1;
  std::int64_t offset = 0;
  for (UnitParameter& parameter : unit.parameters) {
    offset = CeilDiv(offset, alignment) * alignment;
    parameter.flat_offset = offset;
    offset += Numel(parameter);
  }
  unit.flat_numel = CeilDiv(offset, ranks) * ranks;
}

Bytes Sum(const std::vector<Bytes>& parts) {
  return std::accumulate(parts.begin(), parts.end(), Bytes{}, [](Bytes a, Bytes b) { return a + b; });
}

}  // namespace shardplan

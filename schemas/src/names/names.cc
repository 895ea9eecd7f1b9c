// SPDX-License-Identifier: Apache-2.0
#include "names/enum_names.h"

namespace shardplan {

std::int64_t SizeBytes(DType dtype) {
  switch (dtype) {
    case DType::kComplex128:
      return 16;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kUInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kComplex32:
    case DType::kUInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt16:
    case DType::kUInt16:
      return 2;
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
      return 1;
  }
  return 1;
}

bool IsFloatingPoint(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kFloat32:
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      return true;
    default:
      return false;
  }
}

std::string_view Name(DType dtype) { return EnumName(dtype); }
std::optional<DType> DTypeFromName(std::string_view name) { return EnumFromName<DType>(name); }

std::string_view Name(CollectiveKind kind) { return EnumName(kind); }
std::string_view Name(ClusterFigure figure) { return EnumName(figure); }
std::string_view Name(FigureOrigin origin) { return EnumName(origin); }

std::string_view Name(InstructionKind kind) { return EnumName(kind); }
std::string_view Name(TriggerKind kind) { return EnumName(kind); }
std::string_view Name(MatrixCompute compute) { return EnumName(compute); }
std::string_view Name(BufferRole role) { return EnumName(role); }
std::string_view Name(StorageRole role) { return EnumName(role); }
std::string_view Name(SegmentPhase phase) { return EnumName(phase); }
std::string_view Name(ProcedureKind kind) { return EnumName(kind); }

std::string DisplayName(std::string_view fqn) {
  const bool is_root = fqn.empty() || fqn.starts_with('[');  // the latter: one of its parameter groups
  return std::string(is_root ? kRootName : "").append(fqn);
}

bool Divides(const Communicator& communicator, std::int64_t ranks) {
  std::vector<CommunicatorDim> dims = communicator.dims;
  if (dims.empty()) dims.push_back({communicator.size, communicator.stride});
  std::int64_t rest = communicator.size;
  std::int64_t above = 0;  // stride of the digit before, which is more significant
  for (const auto& [size, stride] : dims) {
    // No product: what a broken plan says may be too large for one.
    if (size < 1 || stride < 1 || ranks % size != 0 || ranks / size % stride != 0 || rest % size != 0)
      return false;
    // Both divide the ranks, so that the product is none too large.
    if (above > 0 && above % (size * stride) != 0) return false;
    above = stride;
    rest /= size;
  }
  return rest == 1 && dims.back().stride == communicator.stride;
}

Bytes SizeBytes(const Buffer& buffer) {
  Bytes sum;
  for (const Bytes part : buffer.parts_bytes) sum += part;
  return sum;
}

Bytes RoundedSizeBytes(const Buffer& buffer, Bytes granularity_bytes) {
  if (granularity_bytes.value <= 1) return SizeBytes(buffer);
  Bytes sum;
  for (const Bytes part : buffer.parts_bytes) {
    const std::int64_t blocks = (part.value + granularity_bytes.value - 1) / granularity_bytes.value;
    sum += granularity_bytes * blocks;
  }
  return sum;
}

}  // namespace shardplan

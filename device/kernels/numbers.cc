// SPDX-License-Identifier: Apache-2.0
#include "device/kernels/numbers.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/nan_to_num.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "device/kernels/on_host.h"

namespace shardplan::softdevice {
namespace {

std::vector<double> ReadShares(const char* path) {
  std::ifstream file(path);
  std::vector<double> shares;
  double share = 0.0;
  while (file >> share) {
    shares.push_back(share);
    while (file.peek() == ',' || std::isspace(file.peek()) != 0) file.get();
  }
  const bool good = file.eof() && !shares.empty() &&
                    std::ranges::all_of(shares, [](double x) { return std::isfinite(x) && x >= 0; }) &&
                    std::ranges::any_of(shares, [](double x) { return x > 0; });
  if (good) return shares;
  std::fprintf(stderr,
               "device in software: SHARDPLAN_DEVICE_ROUTING=%s: expected numbers of at least 0, not all 0\n",
               path);
  std::_Exit(2);
}

void SayOnce(std::size_t shares, std::int64_t experts) {
  static auto* const mutex = new std::mutex();
  static auto* const said = new std::set<std::int64_t>();
  const std::lock_guard lock(*mutex);
  if (!said->insert(experts).second) return;
  std::fprintf(stderr, "device in software: a choice among %lld is balanced: the routing has %zu shares\n",
               static_cast<long long>(experts), shares);
}

// Inclusion probabilities of the experts: proportional to the shares, at most 1 each, `k` in all.
std::vector<double> Inclusion(std::vector<double> shares, std::int64_t k) {
  std::vector<double> inclusion(shares.size(), 0.0);
  std::vector<bool> full(shares.size(), false);
  double left = static_cast<double>(k);
  for (bool cut = true; cut;) {
    double total = 0.0;
    for (std::size_t i = 0; i < shares.size(); ++i) total += full[i] ? 0.0 : shares[i];
    if (total <= 0.0) break;
    cut = false;
    const double scale = left / total;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      if (full[i]) continue;
      inclusion[i] = shares[i] * scale;
      if (inclusion[i] <= 1.0) continue;
      inclusion[i] = 1.0;
      full[i] = cut = true;
      left -= 1.0;
    }
  }
  return inclusion;
}

// From its first element to its last.
std::size_t BytesOf(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

bool HasRememberedFloats(const at::Tensor& tensor) {
  return tensor.is_cuda() && IsRemembered(tensor.const_data_ptr(), BytesOf(tensor));
}

}  // namespace

void WatchFrees() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const auto& entry) {
      using Entry = std::decay_t<decltype(entry)>;
      if (entry.action_ != Entry::FREE_REQUESTED) return;
      ForgetMemory(reinterpret_cast<const void*>(entry.addr_), entry.size_);
    });
  });
}

bool CanRemember(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && c10::isFloatingType(tensor.scalar_type()) &&
         tensor.numel() <= kRememberedFloats && tensor.is_non_overlapping_and_dense() &&
         tensor.storage().nbytes() == static_cast<std::size_t>(tensor.numel() * tensor.itemsize());
}

void Remember(const at::Tensor& tensor) { RememberMemory(tensor.const_data_ptr(), BytesOf(tensor)); }

bool IsKnown(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  if (tensor.layout() != at::kStrided || tensor.is_quantized()) return false;
  const at::ScalarType type = tensor.scalar_type();
  if (!c10::isIntegralType(type, /*includeBool=*/true)) {
    const bool floats = c10::isFloatingType(type) || c10::isComplexType(type);
    return floats && (tensor.numel() <= kKnownFloats || HasRememberedFloats(tensor));
  }
  const bool byte = tensor.itemsize() == 1 && type != at::kBool;
  return tensor.numel() <= (byte ? kKnownBytes : kKnownIntegers);
}

bool AreAllKnown(std::span<const c10::IValue> values) {
  bool known = true;
  for (const c10::IValue& value : values) {
    ForEachTensor(value, [&](const at::Tensor& tensor) { known = known && IsKnown(tensor); });
  }
  return known;
}

void MakeFinite(std::span<const c10::IValue> values) {
  for (const c10::IValue& value : values) {
    ForEachTensor(value, [](const at::Tensor& tensor) {
      const at::ScalarType type = tensor.scalar_type();
      const bool wide =
          type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
      if (!wide || !IsKnown(tensor) || tensor.numel() == 0) return;
      constexpr double kInfinity = std::numeric_limits<double>::infinity();
      const at::Tensor host = ViewOnHost(tensor);
      at::nan_to_num_(const_cast<at::Tensor&>(host), 0.0, kInfinity, -kInfinity);
    });
  }
}

void Zero(const c10::IValue& value) {
  ForEachTensor(value, [](const at::Tensor& tensor) {
    if (IsKnown(tensor) && tensor.numel() > 0) ViewOnHost(tensor).zero_();
  });
}

void SettleTruth(const c10::OperatorHandle& op, const c10::Stack& arguments, const c10::IValue& value) {
  if (!value.isTensor() || value.toTensor().scalar_type() != at::kBool || !IsKnown(value.toTensor())) return;
  const std::string& name = op.schema().name();
  constexpr std::array<std::string_view, 6> kComparisons = {"aten::eq", "aten::ne", "aten::lt",
                                                            "aten::le", "aten::gt", "aten::ge"};
  bool truth = name == "aten::all";
  if (std::ranges::find(kComparisons, name) != kComparisons.end()) {
    const c10::IValue& other = arguments[1];
    const double number = other.isScalar() ? other.toScalar().toDouble() : 0.0;
    truth = name == "aten::eq"   ? number == 0
            : name == "aten::ne" ? number != 0
            : name == "aten::lt" ? 0 < number
            : name == "aten::le" ? 0 <= number
            : name == "aten::gt" ? 0 > number
                                 : 0 >= number;
  }
  if (truth) ViewOnHost(value.toTensor()).fill_(true);
}

const Routing& Routing::Get() {
  static const Routing* const routing = [] {
    const char* path = std::getenv("SHARDPLAN_DEVICE_ROUTING");
    return new Routing(path == nullptr || *path == '\0' ? std::vector<double>() : ReadShares(path));
  }();
  return *routing;
}

std::vector<std::int64_t> Routing::Choose(std::int64_t rows, std::int64_t k, std::int64_t experts) const {
  std::vector<std::int64_t> chosen(static_cast<std::size_t>(rows * k));
  const bool fits = static_cast<std::int64_t>(shares_.size()) == experts;
  if (!fits && !shares_.empty()) SayOnce(shares_.size(), experts);
  if (!fits || k >= experts) {
    for (std::int64_t i = 0; i < rows * k; ++i) chosen[static_cast<std::size_t>(i)] = i % experts;
    return chosen;
  }
  const std::vector<double> inclusion = Inclusion(shares_, k);
  for (std::int64_t row = 0; row < rows; ++row) {
    double next = (static_cast<double>(row) + 0.5) / static_cast<double>(rows), sum = 0.0;
    std::int64_t taken = 0;
    for (std::int64_t expert = 0; expert < experts && taken < k; ++expert) {
      sum += inclusion[static_cast<std::size_t>(expert)];
      // Only as many are left as have to be taken: rounding of the sum must not lose one.
      const bool last = experts - expert == k - taken;
      if (sum <= next && !last) continue;
      chosen[static_cast<std::size_t>(row * k + taken++)] = expert;
      next += 1.0;
    }
  }
  return chosen;
}

std::optional<std::size_t> IndexResult(std::string_view op_name) {
  using Row = std::pair<std::string_view, std::size_t>;
  constexpr std::array<Row, 10> kRows = {
      Row{"aten::topk", 1},     Row{"aten::sort", 1},       Row{"aten::max", 1},  Row{"aten::min", 1},
      Row{"aten::kthvalue", 1}, Row{"aten::median", 1},     Row{"aten::mode", 1}, Row{"aten::argmax", 0},
      Row{"aten::argmin", 0},   Row{"aten::multinomial", 0}};
  const auto* const found = std::ranges::find(kRows, op_name, &Row::first);
  return found == kRows.end() ? std::nullopt : std::optional(found->second);
}

void SpreadIndices(const c10::OperatorHandle& op, const c10::Stack& arguments, const at::Tensor& indices) {
  if (indices.scalar_type() != at::kLong || !IsKnown(indices) || indices.numel() == 0) return;
  const at::Tensor input = arguments[0].toTensor();
  const std::string& name = op.schema().name();
  const std::int64_t dims = std::max<std::int64_t>(input.dim(), 1);
  const bool keeps_dim = indices.dim() == input.dim();
  std::optional<std::int64_t> dim;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    if (op.schema().arguments()[i].name() == "dim" && arguments[i].isInt()) dim = arguments[i].toInt();
  }
  const bool last_by_default = name == "aten::topk" || name == "aten::sort" || name == "aten::multinomial";
  if (!dim && !last_by_default) {  // of all elements
    Zero(indices);
    return;
  }
  const std::int64_t along = ((dim.value_or(-1)) + dims) % dims;
  const std::int64_t size = input.dim() == 0 ? 1 : input.size(along);
  const std::int64_t k = keeps_dim && input.dim() > 0 ? indices.size(along) : 1;
  const std::int64_t rows = indices.numel() / std::max<std::int64_t>(k, 1);
  if (size < 1) return;
  std::vector<std::int64_t> chosen = Routing::Get().Choose(rows, k, size);
  at::Tensor from = at::from_blob(chosen.data(), {rows, k}, at::TensorOptions(at::kLong));
  at::Tensor to = OnHost(indices);
  if (keeps_dim && input.dim() > 0) {
    to = to.movedim(along, -1);
    std::vector<std::int64_t> shape(to.sizes().begin(), to.sizes().end());
    from = from.view(shape);
  } else {
    from = from.view(indices.sizes());
  }
  to.copy_(from);
}

}  // namespace shardplan::softdevice

// SPDX-License-Identifier: Apache-2.0
// Puts the host's kernels in the place of torch's CUDA kernels; where nothing computes, beside them.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "device/kernels/empty_call.h"
#include "device/kernels/kernel.h"
#include "device/kernels/recorded_call.h"
#include "device/kernels/special.h"
#include "device/runtime/software_device.h"

// dev/check_torch finds out the operators that a newer release registers.
static_assert(TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11,
              "written for what torch 2.11 to 2.15 register");

namespace shardplan::softdevice {
namespace {

using BoxedFunction = void(const c10::OperatorHandle&, c10::Stack*);

// Operators that only touch the allocator, streams or the runtime stay torch's own.
constexpr std::array<std::string_view, 12> kReal = {"aten::empty",
                                                    "aten::empty_strided",
                                                    "aten::resize_",
                                                    "aten::set_",
                                                    "aten::record_stream",
                                                    "aten::is_set_to",
                                                    "aten::_pin_memory",
                                                    "aten::is_pinned",
                                                    "aten::_copy_from",
                                                    "aten::_copy_from_and_resize",
                                                    "aten::_local_scalar_dense",
                                                    "aten::_cudnn_init_dropout_state"};
// A recording says from where these come.
constexpr std::array<std::string_view, 4> kPlaced = {"aten::empty", "aten::empty_strided", "aten::resize_",
                                                     "aten::record_stream"};
// Registered for all devices together, with parts that launch kernels of CUDA.
constexpr std::array<std::string_view, 2> kAlsoReplaced = {"aten::convolution", "aten::convolution_backward"};

bool IsView(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.returns(), [](const c10::Argument& value) {
    return value.alias_info() != nullptr && !value.alias_info()->isWrite();
  });
}

// [Note: poison]
// The allocator hands out memory that the allocating stream may write at once. So the first work on it is the
// poison: who still reads it then, or reads it before it is written, computes with NaN.
void PoisonWhatIsHandedOut() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const auto& entry) {
    if (entry.action_ != std::decay_t<decltype(entry)>::ALLOC) return;
    const c10::cuda::CUDAGuard guard(entry.device_);
    void* pointer = reinterpret_cast<void*>(entry.addr_);
    EnqueueKernel(static_cast<cudaStream_t>(entry.stream_), std::string(kPoisonTask),
                  [pointer, bytes = entry.size_] { PoisonMemory(pointer, bytes); });
  });
}

// The allocator exists when the first kernel is called.
void SetUpOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (PoisonsMemory()) PoisonWhatIsHandedOut();
  });
  WatchAllocator();
}

template <BoxedFunction* function>
void AfterSetUp(const c10::OperatorHandle& op, c10::Stack* stack) {
  SetUpOnce();
  RecordedCall call(op, *stack);
  function(op, stack);
  ReadsNumbers(op) ? call.DoneAtOnce(*stack) : call.Done(*stack);
}

class Silence final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

template <BoxedFunction* function>
void Replace(const c10::OperatorName& name) {
  // Never undone: the registration ends with the process.
  static auto* const kept = new std::vector<c10::RegistrationHandleRAII>();
  kept->push_back(c10::Dispatcher::singleton().registerImpl(
      name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<function>(), std::nullopt,
      nullptr, "device in software"));
}

template <typename Kernel>
void PutBefore(c10::DispatchKey key, const c10::OperatorHandle& op) {
  static auto* const kept = new std::vector<c10::RegistrationHandleRAII>();
  kept->push_back(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), key, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op)),
      std::nullopt, nullptr, "device in software"));
}

template <typename Kernel>
void PutBeforeAll(c10::DispatchKey key) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorName> names = dispatcher.getRegistrationsForDispatchKey(key);
  names.push_back({"aten::copy_", ""});  // registered for all devices together
  for (const c10::OperatorName& name : names) {
    const bool reads_number = name.name == "aten::_local_scalar_dense";
    if (!name.name.starts_with("aten::") ||
        (std::ranges::find(kReal, name.name) != kReal.end() && !reads_number)) {
      continue;
    }
    const auto op = dispatcher.findSchema(name);
    if (op && !IsView(op->schema())) PutBefore<Kernel>(key, *op);
  }
}

// Registers the kernels of null mode.
void RegisterEmpty() {
  PutBeforeAll<EmptyKernel>(c10::DispatchKey::CUDA);
  PutBeforeAll<QuietKernel>(c10::DispatchKey::CPU);
  // cuDNN is not there.
  at::globalContext().setUserEnabledCuDNN(false);
  at::globalContext().setSDPUseCuDNN(false);
}

void RegisterOnHost() {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  int replaced = 0;
  std::vector<c10::OperatorName> names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  for (const std::string_view name : kAlsoReplaced) names.push_back({std::string(name), ""});
  for (const c10::OperatorName& name : names) {
    if (!name.name.starts_with("aten::") || std::ranges::find(kReal, name.name) != kReal.end()) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || IsView(op->schema()) || name.name == "aten::_foreach_copy_" ||
        name.name == "aten::native_dropout") {
      continue;
    }
    Replace<&AfterSetUp<&RunKernel>>(name);
    ++replaced;
  }
  Replace<&AfterSetUp<&Copy>>({"aten::copy_", ""});
  Replace<&AfterSetUp<&ForeachCopy>>({"aten::_foreach_copy_", ""});
  Replace<&AfterSetUp<&NativeDropout>>({"aten::native_dropout", ""});
  if (std::getenv("SHARDPLAN_DEVICE_VERBOSE") != nullptr) {
    std::fprintf(stderr, "device in software: %d operators run the host's kernels\n", replaced);
  }
  // These kernels have no counterpart on the host; without them torch takes plain operators.
  at::Context& context = at::globalContext();
  context.setUserEnabledCuDNN(false);
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
}

void Register() {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  ComputesNothing() ? RegisterEmpty() : RegisterOnHost();
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    if (std::ranges::find(kPlaced, name.name) != kPlaced.end()) {
      PutBefore<PlacedKernel>(c10::DispatchKey::CUDA, *op);
    } else if (!name.name.starts_with("aten::") && ComputesNothing()) {
      PutBefore<OuterKernel>(c10::DispatchKey::CUDA, *op);
    }
  }
  WatchNodes();
}

}  // namespace
}  // namespace shardplan::softdevice

extern "C" __attribute__((visibility("default"))) void shardplan_register_kernels() {
  shardplan::softdevice::Register();
}

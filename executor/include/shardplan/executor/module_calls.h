// SPDX-License-Identifier: Apache-2.0
// ModuleCalls: how a model in C++ says that it enters a module. Modules of LibTorch have no hooks, so the
// model passes those that may become units through a handle:
//
//   struct GptImpl : torch::nn::Module {
//     ModuleCalls calls;
//     at::Tensor forward(at::Tensor tokens) {
//       at::Tensor x = calls(embedding, tokens);            // embedding->forward(tokens)
//       for (auto& block : blocks) x = calls(block, x);
//       return calls.Call("head", [&](at::Tensor h) { return head->forward(norm->forward(h)); }, x);
//     }
//   };
//   calls(model, tokens);                                   // outside: the root is a module like any other
//
// Copies of a handle are one. If nobody listens, calls are what they call and nothing more. A Training
// listens to make the modules follow a plan, a TraceRecorder to write down what they do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/nn/module.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace shardplan::executor {

using TensorPointers = c10::SmallVector<at::Tensor*, 8>;

// The tensors in a value, in order: of a tensor, an optional, a vector, an array, a pair, a tuple, and of
// structs that have a function `CollectTensors(T&, TensorPointers&)` beside them. Everything else has none.
// Undefined tensors are left out.
template <class T>
void CollectTensors(T&, TensorPointers&) {}
inline void CollectTensors(at::Tensor& tensor, TensorPointers& found) {
  if (tensor.defined()) found.push_back(&tensor);
}
template <class T>
void CollectTensors(std::optional<T>& value, TensorPointers& found);
template <class T, class Allocator>
void CollectTensors(std::vector<T, Allocator>& values, TensorPointers& found);
template <class T, std::size_t N>
void CollectTensors(std::array<T, N>& values, TensorPointers& found);
template <class First, class Second>
void CollectTensors(std::pair<First, Second>& value, TensorPointers& found);
template <class... Values>
void CollectTensors(std::tuple<Values...>& value, TensorPointers& found);

// Whoever wants to know which module is entered. Modules are numbered as ModuleCalls::names.
class ModuleListener {
 public:
  virtual ~ModuleListener() = default;
  // The forward of the module begins / has ended. The tensors among its arguments (results) may be replaced:
  // the module (its caller) gets what stands there afterwards. Exceptions of these leave the call.
  virtual void Enter(std::int32_t module, std::span<at::Tensor* const> inputs) = 0;
  virtual void Leave(std::int32_t module, std::span<at::Tensor* const> outputs) = 0;
  // ... has ended with an exception.
  virtual void Abandon(std::int32_t module) noexcept = 0;
};

class ModuleCalls {
 public:
  ModuleCalls() : state_(std::make_shared<State>()) {}

  // forward(inputs...) as a call of the module named `fqn` ("": the root), as model.named_modules() names it.
  // Tensors of the inputs that the listener replaces are replaced in the copies that `forward` gets.
  // std::invalid_argument: the model that is listened to has no such module.
  template <class Forward, class... Inputs>
  auto Call(std::string_view fqn, Forward&& forward, Inputs... inputs) const {
    if (state_->listener == nullptr) return std::forward<Forward>(forward)(std::move(inputs)...);
    return Run(Find(fqn), std::forward<Forward>(forward), inputs...);
  }

  // module.forward(inputs...) as a call of the module, which may be a holder (TORCH_MODULE) or a
  // std::shared_ptr of one.
  template <class Module, class... Inputs>
  auto operator()(Module& module, Inputs... inputs) const {
    auto& implementation = Implementation(module);
    const auto forward = [&](auto&&... values) {
      return implementation.forward(std::forward<decltype(values)>(values)...);
    };
    if (state_->listener == nullptr) return forward(std::move(inputs)...);
    return Run(Find(implementation), forward, inputs...);
  }

  // From now on `listener`, which outlives the attachment, hears of the modules of `model`. std::logic_error:
  // somebody listens already. The model is held by a shared pointer, as LibTorch's named_modules() wants it.
  void Attach(const torch::nn::Module& model, ModuleListener& listener);
  // Nobody listens.
  void Detach();

  // The modules of the model that is listened to, each once under the name first seen, in the order of
  // named_modules(): the root is the first.
  const std::vector<std::string>& names() const { return state_->names; }

 private:
  struct State {
    ModuleListener* listener = nullptr;
    std::vector<std::string> names;
    std::unordered_map<std::string_view, std::int32_t> by_name;  // all names, of one module several
    std::vector<std::unique_ptr<const std::string>> keys;        // that by_name's refer to
    std::unordered_map<const torch::nn::Module*, std::int32_t> by_address;
  };

  template <class Module>
  static auto& Implementation(Module& module) {
    if constexpr (std::is_base_of_v<torch::nn::Module, Module>) {
      return module;
    } else {
      return *module;
    }
  }
  std::int32_t Find(std::string_view fqn) const;
  std::int32_t Find(const torch::nn::Module& module) const;

  // Tells the listener that a forward ends without a result.
  class Entered {
   public:
    Entered(ModuleListener& listener, std::int32_t module) : listener_(&listener), module_(module) {}
    ~Entered() {
      if (listener_ != nullptr) listener_->Abandon(module_);
    }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;
    void Left() { listener_ = nullptr; }

   private:
    ModuleListener* listener_;
    std::int32_t module_;
  };

  template <class Forward, class... Inputs>
  auto Run(std::int32_t module, Forward&& forward, Inputs&... inputs) const {
    ModuleListener& listener = *state_->listener;
    TensorPointers tensors;
    (CollectTensors(inputs, tensors), ...);
    listener.Enter(module, {tensors.data(), tensors.size()});
    Entered entered(listener, module);
    if constexpr (std::is_void_v<decltype(std::forward<Forward>(forward)(std::move(inputs)...))>) {
      std::forward<Forward>(forward)(std::move(inputs)...);
      entered.Left();
      listener.Leave(module, {});
    } else {
      auto outputs = std::forward<Forward>(forward)(std::move(inputs)...);
      entered.Left();
      tensors.clear();
      CollectTensors(outputs, tensors);
      listener.Leave(module, {tensors.data(), tensors.size()});
      return outputs;
    }
  }

  std::shared_ptr<State> state_;
};

template <class T>
void CollectTensors(std::optional<T>& value, TensorPointers& found) {
  if (value) CollectTensors(*value, found);
}
template <class T, class Allocator>
void CollectTensors(std::vector<T, Allocator>& values, TensorPointers& found) {
  if constexpr (!std::is_same_v<T, bool>) {
    for (T& value : values) CollectTensors(value, found);
  }
}
template <class T, std::size_t N>
void CollectTensors(std::array<T, N>& values, TensorPointers& found) {
  for (T& value : values) CollectTensors(value, found);
}
template <class First, class Second>
void CollectTensors(std::pair<First, Second>& value, TensorPointers& found) {
  CollectTensors(value.first, found);
  CollectTensors(value.second, found);
}
template <class... Values>
void CollectTensors(std::tuple<Values...>& value, TensorPointers& found) {
  std::apply([&](Values&... values) { (CollectTensors(values, found), ...); }, value);
}

}  // namespace shardplan::executor

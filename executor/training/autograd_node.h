// SPDX-License-Identifier: Apache-2.0
// Nodes of the autograd graph as the installed torch holds them: torch 2.11 in a std::shared_ptr, 2.15 in a
// c10::intrusive_ptr. Everything that differs is here, and is asked of torch's headers, not of its version.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace shardplan::executor {

using NodePtr = decltype(torch::autograd::Edge::function);

namespace internal {

template <class Pointer>
struct Weak;
template <class T>
struct Weak<std::shared_ptr<T>> {
  using Type = std::weak_ptr<T>;
};
template <class T>
struct Weak<c10::intrusive_ptr<T>> {
  using Type = c10::weak_intrusive_ptr<T>;
};

// In a template of its type: only there may a name be missing.
template <class Node, class... Arguments>
auto MakeNode(Arguments&&... arguments) {
  if constexpr (requires(Node * node) { deleteNode(node); }) {
    // Frees a long graph without recursion.
    return std::shared_ptr<Node>(new Node(std::forward<Arguments>(arguments)...),
                                 [](Node* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  }
}

using Outputs = std::vector<std::optional<at::Tensor>>;

template <class Pointer>
Outputs WrapOutputs(const torch::autograd::variable_list& inputs, const Outputs& outputs,
                    const Pointer& node) {
  const torch::autograd::_jvp_fn_t no_jvp = [](const torch::autograd::variable_list&,
                                               const torch::autograd::variable_list&) {
    return torch::autograd::variable_list();
  };
  const torch::autograd::_view_as_self_fn_t view = [](const at::Tensor& x) { return x.view_as(x); };
  if constexpr (requires(Pointer attached) {
                  torch::autograd::_wrap_outputs(inputs, {}, {}, outputs, node, no_jvp, {}, view, false,
                                                 attached);
                }) {
    Pointer attached;
    Outputs wrapped =
        torch::autograd::_wrap_outputs(inputs, {}, {}, outputs, node, no_jvp, {}, view, false, attached);
    if (attached) fire_node_creation_hooks(attached);
    return wrapped;
  } else {
    return torch::autograd::_wrap_outputs(inputs, {}, {}, outputs, node, no_jvp, {}, view, false);
  }
}

}  // namespace internal

using WeakNodePtr = internal::Weak<NodePtr>::Type;

// The pointer is one to `Node` itself, and converts to NodePtr.
template <class Node, class... Arguments>
auto MakeNode(Arguments&&... arguments) {
  return internal::MakeNode<Node>(std::forward<Arguments>(arguments)...);
}

// Wraps outputs that are its inputs by torch.autograd.Function's rules: views that keep their version
// counter, guarded against in-place changes.
inline internal::Outputs WrapOutputs(const torch::autograd::variable_list& inputs,
                                     const internal::Outputs& outputs, const NodePtr& node) {
  return internal::WrapOutputs(inputs, outputs, node);
}

}  // namespace shardplan::executor

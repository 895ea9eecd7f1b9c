// SPDX-License-Identifier: Apache-2.0
// The autograd nodes of a flat unit: what makes the unsharded parameters views of one flat parameter in the
// eyes of autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "training/autograd_node.h"

namespace shardplan::executor {

// [Note: when a flat gradient is done]
// FSDP1 makes the parameters of a unit by splitting its flat parameter, once per forward. Autograd runs newer
// nodes first, so a split's backward, and with it post_backward, runs when everything made after the split
// has run. Here a node of its own stands for each split; all of a unit's lead to one sink, which stands for
// the flat parameter's gradient accumulation: autograd calls it when every split that takes part in a
// backward has been reached, at once (its sequence number is the highest there is).
//
// [Note: gradients of several uses]
// Autograd sums what the splits of one flat parameter give, and adds the sum to a gradient that is there
// already. But a parameter whose data changes its dtype or device between two forwards, as that of a unit in
// mixed precision does, gets a gradient accumulation of its own for each (Tensor.set_data drops the old one):
// then each split's gradient is added alone. In low precision these are other numbers.
//
// Outlives every graph that was made through it.
class FlatGradient : public std::enable_shared_from_this<FlatGradient> {
 public:
  // By parameter; undefined: zeros.
  using Gradients = std::vector<at::Tensor>;

  // tracked: by parameter, does its gradient count? `done` is called, in the backward's thread, when the
  // gradients of a backward are complete. An exception it throws ends the backward.
  // add_alone: null, or adds the gradients of one use to those of an earlier backward; false: there are none.
  FlatGradient(std::vector<bool> tracked, std::function<void()> done,
               std::function<bool(const Gradients&)> add_alone);
  ~FlatGradient();
  FlatGradient(const FlatGradient&) = delete;
  FlatGradient& operator=(const FlatGradient&) = delete;

  // Gives those of `views` (one per parameter, detached) that are tracked the history of a fresh split.
  void Track(std::vector<at::Tensor>& views);

  // The sum of what has arrived for a parameter since Clear, without what was added alone (never the last
  // use's); undefined when nothing has.
  const at::Tensor& gradient(std::size_t parameter) const { return gradients_[parameter]; }
  void Clear();

 private:
  class Split;
  class Sink;
  void Add(const std::vector<std::size_t>& parameters, std::vector<at::Tensor>&& gradients);

  std::vector<bool> tracked_;
  Gradients gradients_;
  std::function<void()> done_;
  std::function<bool(const Gradients&)> add_alone_;
  NodePtr sink_;
};

}  // namespace shardplan::executor

// The autograd nodes of a flat unit: what makes the unsharded parameters views of one flat parameter in the
// eyes of autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace shardplan::python {

// [Note: when a flat gradient is done]
// FSDP1 makes the parameters of a unit by splitting its flat parameter, once per forward. Autograd runs newer
// nodes first, so a split's backward, and with it post_backward, runs when everything made after the split
// has run. Here a node of its own stands for each split; all of a unit's lead to one sink, which stands for
// the flat parameter's gradient accumulation: autograd calls it when every split that takes part in a
// backward has been reached, at once (its sequence number is the highest there is).
//
// Outlives every graph that was made through it.
class FlatGradient : public std::enable_shared_from_this<FlatGradient> {
 public:
  // tracked: by parameter, does its gradient count? `done` is called, in the backward's thread, when the
  // gradients of a backward are complete. An exception it throws ends the backward.
  FlatGradient(std::vector<bool> tracked, std::function<void()> done);
  ~FlatGradient();
  FlatGradient(const FlatGradient&) = delete;
  FlatGradient& operator=(const FlatGradient&) = delete;

  // Gives those of `views` (one per parameter, detached) that are tracked the history of a fresh split.
  void Track(std::vector<at::Tensor>& views);

  // The sum of what has arrived for a parameter since Clear; undefined when nothing has.
  const at::Tensor& gradient(std::size_t parameter) const { return gradients_[parameter]; }
  void Clear();

 private:
  class Split;
  class Sink;
  void Add(std::size_t parameter, at::Tensor gradient);

  std::vector<bool> tracked_;
  std::vector<at::Tensor> gradients_;
  std::function<void()> done_;
  std::shared_ptr<Sink> sink_;
};

}  // namespace shardplan::python

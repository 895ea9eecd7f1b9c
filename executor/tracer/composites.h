// SPDX-License-Identifier: Apache-2.0
// Composite operators that ask the device which kernels they are made of: on the meta device they have no
// answer.
#pragma once

#include <memory>

#include "shardplan/executor/trace_recorder.h"

namespace shardplan::executor {

// While it lives, attention (and dropout, of a GPU) on meta tensors takes the kernels that it takes there. In
// the whole process: torch registers kernels so.
class MetaComposites {
 public:
  // always_trains: attention makes what a backward needs though no gradient is recorded.
  MetaComposites(RecordedKernels kernels, bool always_trains);
  ~MetaComposites();
  MetaComposites(const MetaComposites&) = delete;
  MetaComposites& operator=(const MetaComposites&) = delete;

 private:
  struct Registration;
  std::unique_ptr<Registration> registration_;
};

}  // namespace shardplan::executor

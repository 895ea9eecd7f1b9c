// SPDX-License-Identifier: Apache-2.0
#include "training/cpp/host_groups.h"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "replay/first_line.h"
#include "shardplan/executor/training_error.h"

namespace shardplan::executor {
namespace {

at::Tensor OnHost(const at::Tensor& values) {
  at::Tensor host = values.to(at::kCPU);
  return host.is_alias_of(values) ? host.clone() : host;
}

}  // namespace

at::Tensor HostGroups::Reduced(const at::Tensor& values, c10d::ProcessGroup* group,
                               Operation operation) const {
  at::Tensor host = OnHost(values);
  if (group == nullptr) return host;
  c10d::AllreduceOptions options;
  options.reduceOp = operation == Operation::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
  std::vector<at::Tensor> tensors = {host};
  try {
    group->allreduce(tensors, options)->wait();
  } catch (const std::exception& exception) {
    if (peers_) peers_->Fail();
    const std::string culprit = AwaitCulprit(peers_.get(), kEndPatience);
    throw TrainingError(ErrorCode::kEnvironment,
                        fmt::format("a sum over the ranks beside the plan failed: {}{}",
                                    culprit.empty() ? "" : culprit + ": ", FirstLine(exception)));
  }
  return host;
}

at::Tensor HostGroups::Reduce(const at::Tensor& values, CommunicatorId communicator,
                              Operation operation) const {
  return Reduced(values, communicator < 0 ? nullptr : groups_[communicator].get(), operation);
}

at::Tensor HostGroups::ReduceAll(const at::Tensor& values, Operation operation) const {
  return Reduced(values, world_.get(), operation);
}

}  // namespace shardplan::executor

// SPDX-License-Identifier: Apache-2.0
#include "training/libtorch/host_groups.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace shardplan::executor {
namespace {

at::Tensor OnHost(const at::Tensor& values) {
  at::Tensor host = values.to(at::kCPU);
  return host.is_alias_of(values) ? host.clone() : host;
}

at::Tensor Reduced(const at::Tensor& values, c10d::ProcessGroup* group, HostGroups::Operation operation) {
  at::Tensor host = OnHost(values);
  if (group == nullptr) return host;
  c10d::AllreduceOptions options;
  options.reduceOp = operation == HostGroups::Operation::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
  std::vector<at::Tensor> tensors = {host};
  group->allreduce(tensors, options)->wait();
  return host;
}

}  // namespace

at::Tensor HostGroups::Reduce(const at::Tensor& values, CommunicatorId communicator,
                              Operation operation) const {
  return Reduced(values, communicator < 0 ? nullptr : groups_[communicator].get(), operation);
}

at::Tensor HostGroups::ReduceAll(const at::Tensor& values, Operation operation) const {
  return Reduced(values, world_.get(), operation);
}

}  // namespace shardplan::executor

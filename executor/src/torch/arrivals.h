// Arrivals: after a failure, who came how far. Each rank that fails writes how many collectives it issued on
// each communicator; who reads can tell which members of a group did not arrive at the one that failed.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shardplan/executor/collectives.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// How long to wait for other ranks to report, after a failure.
inline constexpr std::chrono::milliseconds kPatience{3000};

// "all_gather 3 on communicator shard, into layers.0.all_gather_output"
std::string DescribeCollective(const Plan& plan, const CollectiveSpec& spec, std::int64_t sequence);

class Arrivals {
 public:
  // `store` may be null: then nothing is known.
  explicit Arrivals(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  // This rank has failed after issuing `issued` collectives, by communicator. The first call counts.
  void Report(std::int64_t rank, const std::vector<std::int64_t>& issued);
  // A sentence on which of the group's ranks did not arrive at its collective number `sequence`, after
  // waiting up to `patience` for the others to report. "" when nothing is known or all arrived.
  std::string Missing(const std::vector<std::int64_t>& group, std::int64_t rank, CommunicatorId communicator,
                      std::int64_t sequence, std::chrono::milliseconds patience);

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  bool reported_ = false;
};

}  // namespace shardplan::executor

// SPDX-License-Identifier: Apache-2.0
// Common parts of the ranks of any run: where they meet, what they run on, and how the first one speaks for
// all.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "options.h"
#include "shardplan/executor/collectives.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "torch/agreement.h"
#include "torch/launch.h"

namespace shardplan::run {

using executor::RankEnvironment;

// Our launcher says itself who dies.
std::shared_ptr<executor::Peers> WatchPeers(const c10::intrusive_ptr<c10d::Store>& store,
                                            const RankEnvironment& environment);

// Before anything is communicated: do all ranks have the same document, and the same shardplan? `failure`:
// why this rank cannot take part, which the others are told.
Status AgreeOnDocument(const executor::Fact& document, const std::optional<Error>& failure,
                       const RunOptions& options, const RankEnvironment& environment,
                       const c10::intrusive_ptr<c10d::Store>& store,
                       const std::shared_ptr<executor::Peers>& peers);

// A rank's part in a run: meets the others, agrees with them on `document` (asked for once), then `run`. An
// exception of torch is kEnvironment.
Status TakePart(const RunOptions& options, const RankEnvironment& environment,
                const std::optional<Error>& failure, const std::function<executor::Fact()>& document,
                const std::function<Status(const c10::intrusive_ptr<c10d::Store>& store,
                                           const std::shared_ptr<executor::Peers>& peers)>& run);

struct Backend {
  std::unique_ptr<executor::TorchDevice> device;
  std::unique_ptr<executor::Collectives> collectives;  // ends before the device
};
// cpu or cuda, for the communicators of the plan. `store` answers in time.
Result<Backend> MakeBackend(const Plan& plan, const RunOptions& options, const RankEnvironment& environment,
                            const c10::intrusive_ptr<c10d::Store>& store,
                            const std::shared_ptr<executor::Peers>& peers);

// The end of a run.
struct Ending {
  c10d::Store& store;
  const executor::Peers* peers;
  const RankEnvironment& environment;
  std::chrono::milliseconds timeout;
};
// Rank 0 prints what `report` makes of what all ranks say, in their order; no rank leaves before.
Status PrintForAll(
    const Ending& ending, const std::string& said,
    const std::function<Result<std::string>(const std::vector<std::string>& of_ranks)>& report);

}  // namespace shardplan::run

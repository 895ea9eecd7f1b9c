// SPDX-License-Identifier: Apache-2.0
// The parts of a StepWork.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "bound/recomputed_stretches.h"
#include "shardplan/simulator/lower_bound.h"

namespace shardplan {

struct StepWork::Parts {
  struct LineOnLink {
    std::int64_t fixed_ns = 0;
    std::int64_t per_byte = 0;
  };
  // The cost of a collective on each link that LinkLoads tells of.
  using Line = std::array<LineOnLink, 2>;
  struct SubMesh {
    std::int64_t ranks = 1;
    Line gather;
  };
  // Reductions in two levels: over so many ranks, and then of what that leaves over the others.
  struct TwoLevels {
    std::int64_t inner_ranks = 1;
    Line inner, outer;  // of bytes that go into each
  };
  // The ranks that parameters are cut over.
  struct Mesh {
    std::int64_t shards = 1;
    Line gather, reduce, all_reduce;
    std::vector<SubMesh> sub_meshes;
    std::vector<TwoLevels> two_levels;
  };
  struct Parameter {
    std::size_t mesh = 0;
    std::int64_t numel = 0;
    std::int64_t padded_numel = 0;    // of all pieces, where rows are cut
    std::int64_t stored = 0;          // bytes of an element of the shard
    std::int64_t gathered = 0;        // ... of the parameter that is computed with
    std::int64_t reduced = 0;         // ... of the gradient while it is reduced
    std::vector<std::int64_t> reads;  // operators, ascending
    std::vector<std::int64_t> grads;  // operators that end a gradient, ascending

    // Bytes of the step's gradient between its first part and the optimizer's step. A lower bound: every rank
    // holds at least this much, before and after the reduction.
    std::int64_t WaitingBytes(std::int64_t shards) const {
      return std::min(numel / shards * std::min(stored, reduced), numel * std::min(gathered, reduced));
    }
  };
  // A kernel of collectives of the model.
  struct ModelCollective {
    std::int64_t op = 0;      // it is behind the operator before this one
    std::int64_t until = -1;  // ... and before this one starts; -1: the compute stream waits for it at once
    std::int64_t duration_ns = 0;
    LinkLoads loads;
  };
  struct Storage {
    std::int64_t size_bytes = 0;
    std::int64_t first = -1, last = -1;  // operators that use it
  };
  const Mesh& MeshOf(const Parameter& parameter) const { return meshes[parameter.mesh]; }
  // A rank's part of all gradients when the optimizer steps.
  std::int64_t GradientShards() const {
    std::int64_t bytes = 0;
    for (const Parameter& p : parameters) {
      if (!p.grads.empty()) bytes += p.numel / MeshOf(p).shards * std::min(p.stored, p.reduced);
    }
    return bytes;
  }
  // StepWork::PassBehind.
  std::int64_t PassBehind(std::int64_t op) const {
    const auto behind = std::ranges::upper_bound(pass_begins, op);
    return behind == pass_begins.end() ? std::ssize(durations_ns) : *behind;
  }

  Cluster cluster;
  std::vector<std::int64_t> durations_ns;
  std::vector<std::int64_t> pass_begins;
  std::vector<Parameter> parameters;
  std::vector<Storage> storages;
  // While plans may recompute:
  std::vector<internal::RecomputedStretch> stretches;
  std::vector<std::int64_t>
      used_later_bytes;  // by operator: what it uses of earlier passes, and no stretch says
  std::vector<std::int64_t> peak_operators;  // StepWork::PeakOperators
  std::vector<Mesh> meshes;
  bool pools_apart = true;  // gathers and reductions have pools of their own in the layout per_parameter
  std::vector<ModelCollective> model_collectives;
  std::int64_t copy_slope = 0;
  Bytes static_bytes;
  Bytes least_memory;
  Nanoseconds optimizer_ns;
  Nanoseconds host_ns;
};

}  // namespace shardplan

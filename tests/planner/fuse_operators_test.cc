// SPDX-License-Identifier: Apache-2.0
// torch.compile's fusion of elementwise operators, as a transformation of a trace.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using testing::TraceOf;
using testing::TreeModule;

// A model of one layer; its forward is replaced by what a test wants to see fused.
Trace OneLayer() { return TraceOf({.children = {{.name = "layer", .parameters = {{4, 4}}}}}); }

Trace Compiled(const Trace& trace) {
  const Strategy strategy{.compile = true};
  const Result<PassOutput> made = RunPassesUntil("fuse_operators", trace, strategy, ClusterOf(1));
  EXPECT_TRUE(made) << ToString(made.error());
  Result<Trace> read = ParseTrace(made->text);
  EXPECT_TRUE(read) << ToString(read.error());
  return *read;
}

std::vector<OperatorEvent> OperatorsOf(const Pass& pass) {
  std::vector<OperatorEvent> operators;
  for (const TraceEvent& event : pass.events) {
    if (const auto* op = std::get_if<OperatorEvent>(&event)) operators.push_back(*op);
  }
  return operators;
}

// mm -> a; b = a * a; c = b + a; b dies; d = mm(c). b is never in memory: the kernel reads a once and writes
// c.
TEST(FuseOperators, WhatOnlyTheRunUsesIsNotMoved) {
  Trace trace = OneLayer();
  Pass& pass = trace.forwards[0];
  std::vector<TraceEvent> events;
  StorageId last = -1;
  ModuleId module = -1;
  for (const TraceEvent& event : pass.events) {
    events.push_back(event);
    const auto* op = std::get_if<OperatorEvent>(&event);
    if (op == nullptr) continue;
    last = op->writes[0];
    module = op->module;
    const StorageId b = 1000, c = 1001;
    events.push_back(AllocateEvent{b, Bytes{4096}, StorageRole::kForwardTemp, module, -1});
    events.push_back(OperatorEvent{.name = "aten.mul",
                                   .module = module,
                                   .flops = 10,
                                   .bytes_read = Bytes{8192},
                                   .bytes_written = Bytes{4096},
                                   .reads = {last},
                                   .writes = {b}});
    events.push_back(AllocateEvent{c, Bytes{4096}, StorageRole::kForwardTemp, module, -1});
    events.push_back(OperatorEvent{.name = "aten.add.Tensor",
                                   .module = module,
                                   .flops = 20,
                                   .bytes_read = Bytes{8192},
                                   .bytes_written = Bytes{4096},
                                   .reads = {b, last},
                                   .writes = {c}});
    events.push_back(FreeEvent{b});
    events.push_back(OperatorEvent{.name = "aten.exp",
                                   .module = module,
                                   .bytes_read = Bytes{4096},
                                   .bytes_written = Bytes{4096},
                                   .reads = {c},
                                   .writes = {c}});
    events.push_back(FreeEvent{c});
  }
  pass.events = events;
  const Trace made = Compiled(trace);
  const std::vector<OperatorEvent> operators = OperatorsOf(made.forwards[0]);
  ASSERT_EQ(operators.size(), 2U);
  EXPECT_EQ(operators[0].name, "aten.mm");
  const OperatorEvent& fused = operators[1];
  EXPECT_EQ(fused.name, "compiled.elementwise");
  EXPECT_EQ(fused.flops, 30);
  EXPECT_EQ(fused.reads, std::vector<StorageId>{last});
  EXPECT_EQ(fused.writes, std::vector<StorageId>{1001});
  EXPECT_EQ(fused.bytes_read.value, 8192);     // of a by the first operator; again, and b and c: not
  EXPECT_EQ(fused.bytes_written.value, 4096);  // c once
  for (const TraceEvent& event : made.forwards[0].events) {
    const auto* born = std::get_if<AllocateEvent>(&event);
    if (born != nullptr) {
      EXPECT_NE(born->storage, 1000);
    }
  }
}

TEST(FuseOperators, OneOperatorOrAProductStaysAsItIs) {
  const Trace trace = OneLayer();
  EXPECT_EQ(Compiled(trace), trace);
}

// Random operators in layers with and without parameters: memory stays in order, FLOPs stay, bytes do not
// grow, nothing crosses a module with parameters, and plans of both policies verify.
TEST(FuseOperators, AnyTraceStaysInOrder) {
  std::uint32_t state = 31'000'000;
  const auto below = [&state](std::uint32_t n) {
    state = state * 1'664'525 + 1'013'904'223;
    return (state >> 10) % n;
  };
  int fused = 0;
  for (int round = 0; round < 150; ++round) {
    SCOPED_TRACE("round " + std::to_string(round) + " of seed 31000000");
    TreeModule list{.name = "layers", .class_name = "ModuleList"};
    for (std::uint32_t l = 0; l < 1 + below(3); ++l) {
      TreeModule layer{.name = std::to_string(l), .parameters = {{4, 4}}};
      for (std::uint32_t c = 0; c < below(4); ++c) {
        TreeModule child{.name = "c" + std::to_string(c)};
        if (below(3) == 0) child.parameters = {{4, 4}};
        layer.children.push_back(child);
      }
      list.children.push_back(layer);
    }
    Trace trace = TraceOf({.children = {list}});
    const char* names[] = {"aten.mm", "aten.mul", "aten.silu", "aten.add"};
    for (std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
      for (TraceEvent& event : (*passes)[0].events) {
        auto* op = std::get_if<OperatorEvent>(&event);
        if (op == nullptr) continue;
        op->name = names[below(4)];
        op->bytes_read = op->bytes_written = Bytes{4096};
      }
    }
    const Trace made = Compiled(trace);
    for (const auto& [before, after] : {std::pair(&trace.forwards[0], &made.forwards[0]),
                                        std::pair(&trace.backwards[0], &made.backwards[0])}) {
      std::int64_t flops = 0, bytes = 0;
      for (const OperatorEvent& op : OperatorsOf(*before)) {
        flops += op.flops;
        bytes += (op.bytes_read + op.bytes_written).value;
      }
      for (const OperatorEvent& op : OperatorsOf(*after)) {
        flops -= op.flops;
        bytes -= (op.bytes_read + op.bytes_written).value;
        fused += op.name == "compiled.elementwise" ? 1 : 0;
      }
      EXPECT_EQ(flops, 0);
      EXPECT_GE(bytes, 0);
    }
    std::map<StorageId, bool> alive;
    for (const TraceInput& input : made.inputs) alive[input.storage] = true;
    for (const Pass* pass : {&made.forwards[0], &made.backwards[0]}) {
      for (const TraceEvent& event : pass->events) {
        if (const auto* born = std::get_if<AllocateEvent>(&event)) alive[born->storage] = true;
        if (const auto* free = std::get_if<FreeEvent>(&event)) {
          EXPECT_TRUE(alive[free->storage]) << free->storage;
          alive[free->storage] = false;
        }
        if (const auto* op = std::get_if<OperatorEvent>(&event)) {
          for (const StorageId storage : op->reads) EXPECT_TRUE(alive[storage]) << storage;
          for (const StorageId storage : op->writes) EXPECT_TRUE(alive[storage]) << storage;
        }
      }
    }
    for (const char* policy : {"fsdp1", "fsdp2"}) {
      const Strategy strategy{.policy = policy, .compile = true};
      const Result<PlannerOutput> planned = MakePlan(trace, strategy, ClusterOf(2));
      EXPECT_TRUE(planned) << ToString(planned.error());
    }
  }
  EXPECT_GT(fused, 50);
}

}  // namespace
}  // namespace shardplan

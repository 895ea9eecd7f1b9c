// SPDX-License-Identifier: Apache-2.0
// A policy with a mistake that is chosen by a knob.
#include <stdexcept>

#include "shardplan/planner/policy.h"

namespace {

class Careless : public shardplan::Policy {
 public:
  Careless(const shardplan::PolicyInput& input, shardplan::ProgramBuilder& builder)
      : units_(input, builder), builder_(builder), mistake_(input.Knob<std::string>("mistake")) {}

  shardplan::Status SetUp() override { return units_.SetUp(); }
  shardplan::Status Procedures() override { return units_.Procedures(); }
  std::unique_ptr<shardplan::PolicyState> State() const override {
    return std::make_unique<shardplan::PolicyStateOf<int>>(mistake_ == "counts" ? counted_++ : 0);
  }
  shardplan::Status On(const shardplan::HookPoint& point) override {
    if (mistake_ == "throws") throw std::runtime_error("no schedule today");
    if (mistake_ == "counts") builder_.BeginTrigger(shardplan::TriggerKind::kUserCall, -1, counted_);
    if (mistake_ == "has no stream") builder_.Emit(shardplan::InstructionKind::kWait, 9);
    return units_.Begin(point);  // gathers nothing
  }

 private:
  shardplan::UnitOperations units_;
  shardplan::ProgramBuilder& builder_;
  const std::string mistake_;
  mutable int counted_ = 0;
};

shardplan::PolicyDescription Describe() {
  return {.name = "careless",
          .knobs = {{"mistake", std::string("gathers nothing"), "", "Which mistake it makes."},
                    {"share", 0.5, "", "A number."},
                    {"quick", false, "", "A choice."}},
          .make = [](const shardplan::PolicyInput& input, shardplan::ProgramBuilder& builder)
              -> std::unique_ptr<shardplan::Policy> { return std::make_unique<Careless>(input, builder); },
          .library = {}};
}

}  // namespace

SHARDPLAN_POLICY(Describe)

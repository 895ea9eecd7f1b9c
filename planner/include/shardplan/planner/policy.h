// SPDX-License-Identifier: Apache-2.0
// A policy is a state machine over the points that the host passes (hook_points.h). At each it writes
// instructions through a ProgramBuilder (program_builder.h), or through UnitOperations, which gather, free
// and reduce whole units as fully_shard does. docs/guide/write-a-policy.md has an example.
//
// A library has a policy for `shardplan plan --policy-library` if one of its files says
//
//   SHARDPLAN_POLICY(Describe)   // PolicyDescription Describe();
//
// and is built with shardplan_add_policy of the package (find_package(shardplan)).
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "shardplan/planner/hook_points.h"
#include "shardplan/planner/program_builder.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

struct ModelIndex;  // the planner's own

// A value that policies of one kind compare: see Policy::State.
class PolicyState {
 public:
  virtual ~PolicyState() = default;
  virtual bool Equals(const PolicyState& other) const = 0;
};

// T's `==` is a defaulted one, as are those of its members: no field can be forgotten in the comparison.
template <std::equality_comparable T>
class PolicyStateOf final : public PolicyState {
 public:
  explicit PolicyStateOf(T value) : value_(std::move(value)) {}
  bool Equals(const PolicyState& other) const override {
    const auto* same_kind = dynamic_cast<const PolicyStateOf*>(&other);
    return same_kind != nullptr && same_kind->value_ == value_;
  }

 private:
  T value_;
};

// Errors, and exceptions, of a policy end planning; the message names the policy and its library.
class Policy {
 public:
  virtual ~Policy() = default;
  // Before the first step: setup calls. kBadInput for a call that the policy does not know, or a knob's value
  // that it does not take.
  virtual Status SetUp() = 0;
  // Before the points of a step: all that come.
  virtual void BeginStep(const RecordedStep& /*step*/) {}
  // Emits the triggers and instructions of one hook point.
  virtual Status On(const HookPoint& event) = 0;
  // Everything that decides what later steps do: two steps that begin in equal states and have equal hook
  // points are equal. State that only counts or names past steps stays out of it: a training loop repeats,
  // and so do the states in which its steps begin.
  virtual std::unique_ptr<PolicyState> State() const = 0;
  // After the last step: emits what is done on demand, of every unit. All of it on the compute stream.
  virtual Status Procedures() = 0;
  // Faults that the verifier may rightly find in the plan because PyTorch itself has them. Policies that are
  // built in have some.
  virtual std::vector<PyTorchFault> Faults() const { return {}; }
};

// The input that a policy is made for. All of it outlives the policy.
struct PolicyInput {
  const Trace& trace;
  const ModelIndex& index;
  const Partition& partition;
  const Strategy& strategy;  // with the value of every knob of the description
  const std::vector<RecordedStep>& steps;

  // The value of a knob that the description has with a default of type T. std::invalid_argument: it has not.
  template <typename T>
  T Knob(const std::string& name) const {
    const auto found = strategy.policy_knobs.find(name);
    if (found != strategy.policy_knobs.end()) {
      if (const T* value = std::get_if<T>(&found->second)) return *value;
      if constexpr (std::same_as<T, double>) {
        if (const auto* whole = std::get_if<std::int64_t>(&found->second)) return static_cast<T>(*whole);
      }
    }
    throw std::invalid_argument("no knob of this type is described: " + name);
  }
};

// A knob of Strategy::policy_knobs.
struct PolicyKnob {
  std::string name;         // "prefetch_bucket_size"
  KnobValue default_value;  // its type is the knob's
  std::string unit;         // "elements"; empty: none
  std::string help;         // one sentence
};

// Units of a policy are laid out parameter by parameter, as fully_shard's (Strategy::units, ::mesh,
// ::mixed_precision and the like say which), and put an autograd function around their inputs.
struct PolicyDescription {
  std::string name;  // Strategy::policy; not that of a policy that is built in
  std::vector<PolicyKnob> knobs;
  std::unique_ptr<Policy> (*make)(const PolicyInput&, ProgramBuilder&) = nullptr;
  std::string library;  // the file that it is of, for messages; set when it is loaded
};

// A policy that is not built in, from a shared library.

// Loaded as long as it lives. It outlives the policies that its description makes.
class PolicyLibrary {
 public:
  // Compares the stamps (SHARDPLAN_POLICY_STAMP) before it calls anything of the library. kBadInput, with the
  // file: it is missing or no library, has no policy, was built for another shardplan, throws, or describes a
  // policy that cannot be used (a name that is taken, two knobs of one name, nothing that makes it).
  static Result<PolicyLibrary> Load(const std::string& path);

  const PolicyDescription& description() const { return description_; }

 private:
  using Handle = std::unique_ptr<void, void (*)(void*)>;
  PolicyLibrary(Handle handle, PolicyDescription description)
      : handle_(std::move(handle)), description_(std::move(description)) {}

  Handle handle_;
  PolicyDescription description_;  // of code in the library: ends first
};

// Operations on whole units: gathered, waited for, freed, their gradients reduced. The policy says when; this
// writes how, with fully_shard's own code: copies in and out, all-gathers and reduce-scatters on streams of
// their own, mixed precision, replicas (HSDP), accumulation, offloading, the optimizer, procedures.
//
//   pre_forward A     Gather(A)  Gather(B)  Await(A)      all_gather A | all_gather B
//   segment                                               .............| compute A  |
//   post_forward A    Free(A)                                                       | freed
//
// An operation on a unit without parameters does nothing. One on a unit that there is not is refused
// (ProgramBuilder::Refuse).

class UnitOperations {
 public:
  // Everything that decides what later steps do: a part of the policy's own state (Policy::State).
  class State {
   public:
    bool operator==(const State& other) const;

   private:
    friend class UnitOperations;
    struct Value;
    std::shared_ptr<const Value> value_;
  };

  // Both outlive it.
  UnitOperations(const PolicyInput& input, ProgramBuilder& builder);
  UnitOperations(const UnitOperations&) = delete;
  UnitOperations& operator=(const UnitOperations&) = delete;
  ~UnitOperations();

  // In Policy::SetUp. kBadInput: what torch.optim refuses, a setup call on a module that there is not.
  Status SetUp();
  // First at each point. Begins the point's trigger, and writes what no policy decides: what the model
  // computes, the optimizer's step, zero_grad, set_requires_gradient_sync and set_requires_all_reduce.
  // Instructions at a point without a trigger of its own belong to the trigger before. kBadInput: a call on a
  // module that there is not.
  Status Begin(const HookPoint& point);

  // Elements of the unit's parameters, whole.
  std::int64_t Numel(UnitId unit) const;
  // From the Gather to the Await.
  bool IsGathering(UnitId unit) const;
  // From the Await to the Free.
  bool IsUnsharded(UnitId unit) const;
  // There are gradients that nothing has reduced yet.
  bool HasGradients(UnitId unit) const;

  // Starts to gather the parameters, which waits for the last optimizer step. Nothing if they are gathering
  // or unsharded. A unit that is gathering when an optimizer steps is awaited first. A unit that is unsharded
  // then stays as it was before the step (the verifier's remark stale_parameters): free it, and gather again.
  void Gather(UnitId unit);
  // The compute stream waits for the gather and copies out: the model may read the parameters. Nothing if
  // they are not gathering.
  void Await(UnitId unit);
  // Frees the whole parameters; the shards stay.
  void Free(UnitId unit);
  // Starts to reduce the gradients that the backward has made. Without gradient sync they are kept, in the
  // dtype that they are reduced in.
  void Reduce(UnitId unit);
  // At kBackwardEnd: reduces what is left, the last unit first; the compute stream waits for all reductions.
  // A gather that nothing awaited is dropped.
  void EndBackward();
  // In Policy::Procedures. kBadInput where fully_shard fails.
  Status Procedures();

  State state() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardplan

// Facts that have to be equal in a library and in the program that loads it: the release and the public
// headers (SHARDPLAN_POLICY_HEADERS, which the package defines), the standard library and its layout.
#define SHARDPLAN_POLICY_TEXT_OF(x) #x
#define SHARDPLAN_POLICY_TEXT(x) SHARDPLAN_POLICY_TEXT_OF(x)
#define SHARDPLAN_POLICY_STAMP                                   \
  SHARDPLAN_POLICY_HEADERS ", libstdc++ " SHARDPLAN_POLICY_TEXT( \
      _GLIBCXX_RELEASE) " with _GLIBCXX_USE_CXX11_ABI=" SHARDPLAN_POLICY_TEXT(_GLIBCXX_USE_CXX11_ABI)

// NOLINTNEXTLINE(bugprone-macro-parentheses): the name of a function.
#define SHARDPLAN_POLICY(describe)                                                       \
  extern "C" __attribute__((visibility("default"))) const char shardplan_policy_stamp[]; \
  const char shardplan_policy_stamp[] = SHARDPLAN_POLICY_STAMP;                          \
  extern "C" __attribute__((visibility("default"))) void shardplan_policy(               \
      ::shardplan::PolicyDescription& out);                                              \
  void shardplan_policy(::shardplan::PolicyDescription& out) { out = describe(); }

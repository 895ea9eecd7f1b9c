// SPDX-License-Identifier: Apache-2.0
// Differences between the planned releases of PyTorch: one rule for each, asked for where the policy decides
// it. docs/reference/pytorch-versions.md has this table.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// True: as the release that brought it.
struct PyTorchRules {
  bool idle_units_wait = false;
  bool backward_ends_in_two_phases = false;
  bool one_wait_a_stream = false;
  bool gradients_keep_their_dtype = false;
  bool shared_parameters_are_refused = false;
  bool units_that_never_ran_are_skipped = false;
  bool hook_input_is_held = false;
  bool one_cap_for_all_units = false;
  bool groups_are_listed_once = false;
  bool members_enter_one_by_one = false;
  bool integers_are_not_cast = false;
  bool gradient_dtypes_may_differ = false;
  bool partial_sums_are_awaited = false;
  bool partial_sums_get_zeros = false;
  bool grad_dtypes_are_kept = false;
  bool gradients_stay_as_made = false;
  bool gathers_are_freed_before_copy_out = false;
  bool gradients_are_freed_together = false;
  bool workspaces_are_given_back = false;
  bool embeddings_sort_few_digits = false;
  bool cub_tiles_of_cuda_13_2 = false;
  bool older_segments_first = false;

  bool operator==(const PyTorchRules&) const = default;
};

struct PyTorchRule {
  std::string_view name;
  bool PyTorchRules::*rule = nullptr;
  PyTorchVersion since = kOldestPyTorch;
  std::string_view policy;    // "": every policy's
  std::string_view before;    // what releases before it do
  std::string_view now;       // what it and those after it do
  std::string_view where;     // PyTorch's function
  std::string_view shown_by;  // a recording in tests/conformance
};

inline constexpr auto kPyTorchRules = std::to_array<PyTorchRule>({
    {.name = "idle_units_wait",
     .rule = &PyTorchRules::idle_units_wait,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "a unit without gradients returns before it waits for earlier reduce-scatters",
     .now = "a unit waits for earlier reduce-scatters, then looks whether it has gradients",
     .where = "FSDPParamGroup.post_backward",
     .shown_by = "fsdp2_215/frozen_default_w2"},
    {.name = "backward_ends_in_two_phases",
     .rule = &PyTorchRules::backward_ends_in_two_phases,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "at the end of a backward each unit is finalized right after its own post-backward",
     .now = "the post-backwards of all units run before any is finalized",
     .where = "FSDPState._root_post_backward_final_callback",
     .shown_by = "fsdp2_215/frozen_prefix_w2"},
    {.name = "one_wait_a_stream",
     .rule = &PyTorchRules::one_wait_a_stream,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "at the end of a backward the compute stream waits for each unit's reduction, and for its "
               "all-reduce",
     .now = "it waits for the last reduction of each stream; units drop their buffers without a wait",
     .where = "FSDPState._end_backward_iteration",
     .shown_by = "fsdp2_215/gptish_hsdp_2x2"},
    {.name = "gradients_keep_their_dtype",
     .rule = &PyTorchRules::gradients_keep_their_dtype,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "without a reduce dtype gradients are reduced in the param dtype",
     .now = "without a reduce dtype gradients are reduced in the parameters' own dtype",
     .where = "FSDPParamGroup._get_reduce_dtype",
     .shown_by = "fsdp2_215/gptish_bf16_reducebf16_w2"},
    {.name = "shared_parameters_are_refused",
     .rule = &PyTorchRules::shared_parameters_are_refused,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before =
         "a parameter that modules of two units share is sharded in both, and is two parameters from then on",
     .now = "it is an error",
     .where = "FSDPState._validate_no_duplicate_params",
     .shown_by = ""},
    {.name = "units_that_never_ran_are_skipped",
     .rule = &PyTorchRules::units_that_never_ran_are_skipped,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before =
         "a backward without gradient synchronisation and with a reduce dtype fails at a unit that never ran",
     .now = "it skips that unit",
     .where = "FSDPParamGroup.post_backward",
     .shown_by = ""},
    {.name = "hook_input_is_held",
     .rule = &PyTorchRules::hook_input_is_held,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "what an all-reduce hook works on is freed while the hook's stream may still use it",
     .now = "it is held until the unit reduces again or the backward ends, as HSDP's all-reduce input is",
     .where = "foreach_reduce",
     .shown_by = ""},
    {.name = "one_cap_for_all_units",
     .rule = &PyTorchRules::one_cap_for_all_units,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "there is one reduce-scatter input; more is a knob of shardplan's own, of each unit",
     .now = "the largest cap of all units, as set before the first forward, holds for all",
     .where = "FSDPState._init_shared_state",
     .shown_by = "fsdp2_215/gptish_rsbuf2_w2"},
    {.name = "groups_are_listed_once",
     .rule = &PyTorchRules::groups_are_listed_once,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "a unit of two modules is twice among the states whose backward ends",
     .now = "it is there once",
     .where = "FSDPState._lazy_init",
     .shown_by = "fsdp2_215/gptish_grouphead_w2"},
    {.name = "members_enter_one_by_one",
     .rule = &PyTorchRules::members_enter_one_by_one,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before =
         "a unit of several modules is entered by the first of them, and left when all have run, be it in a "
         "later forward",
     .now = "each of its modules enters it; the root's post-forward completes one of which a module has not "
            "run; "
            "the compute stream waits for a reduction in between",
     .where = "_register_group_forward_hooks, FSDPState._force_complete_incomplete_states",
     .shown_by = "fsdp2_215/gptish_headchunks_w2"},
    {.name = "integers_are_not_cast",
     .rule = &PyTorchRules::integers_are_not_cast,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "a frozen integer parameter is cast to the param dtype",
     .now = "it keeps its dtype",
     .where = "FSDPParam.init_dtype_attrs",
     .shown_by = ""},
    {.name = "gradient_dtypes_may_differ",
     .rule = &PyTorchRules::gradient_dtypes_may_differ,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "gradients of a unit that wait in the reduce dtype beside new ones in another are an error",
     .now = "each is cast on its way into the reduce-scatter",
     .where = "foreach_reduce",
     .shown_by = "fsdp2_215/gptish_bf16_keepnorm_w2"},
    {.name = "partial_sums_are_awaited",
     .rule = &PyTorchRules::partial_sums_are_awaited,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "the reduce-scatter stream waits for the gradients alone where a partial sum waits for its "
               "all-reduce",
     .now = "it waits for the compute stream before the copy-in, too: the partial sum may be cast or "
            "repacked on it",
     .where = "FSDPParamGroup.post_backward",
     .shown_by = "fsdp2_215/gptish_hsdp_accum_noallreduce_2x2"},
    {.name = "partial_sums_get_zeros",
     .rule = &PyTorchRules::partial_sums_get_zeros,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "a parameter that a later micro-batch does not use keeps its partial sum, which the next "
               "step's all-reduce adds; one that comes in later is added to another's",
     .now = "zeros are reduced for it, so that its partial sum is all-reduced in this step; a partial sum is "
            "repacked where a parameter comes in later",
     .where = "FSDPParamGroup._get_unsharded_grad_to_reduce, FSDPParamGroup._prepare_partial_reduce_output",
     .shown_by = "fsdp2_215/branchy_hsdp_noallreduce_unused_2x2"},
    {.name = "grad_dtypes_are_kept",
     .rule = &PyTorchRules::grad_dtypes_are_kept,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "the grad_dtype of a parameter is lost when it is sharded",
     .now = "its sharded gradient has that dtype; without a reduce dtype gradients are reduced in it",
     .where = "FSDPParam._capture_grad_dtype_policy",
     .shown_by = "fsdp2_215/gptish_bf16params_gradfp32_w2"},
    {.name = "gradients_stay_as_made",
     .rule = &PyTorchRules::gradients_stay_as_made,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "autograd converts the gradient of an unsharded parameter to the parameter's dtype",
     .now = "a gradient that autograd makes in a wider dtype, up to that of the reduction (of a norm's "
            "weight in "
            "bfloat16 that multiplies float32, say), stays in it; one that may be a partial sum over tensor "
            "parallel ranks is converted to the dtype of the reduction",
     .where = "FSDPParamGroup._set_unsharded_grad_dtypes",
     .shown_by = ""},
    {.name = "gathers_are_freed_before_copy_out",
     .rule = &PyTorchRules::gathers_are_freed_before_copy_out,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "the gather of the unit before is freed behind a unit's copy-out: a local variable names it",
     .now = "it is freed before the copy-out",
     .where = "FSDPCommContext.release_all_gather_state_for_comm_reuse",
     .shown_by = ""},
    {.name = "gradients_are_freed_together",
     .rule = &PyTorchRules::gradients_are_freed_together,
     .since = PyTorchVersion::k2_15,
     .policy = "fsdp2",
     .before = "the last gradient of a unit is freed when its reduction has been issued: a variable of a "
               "loop names it",
     .now = "it is freed behind the copy-in, with the others; one that is put in another order, before the "
            "copy-in",
     .where = "_default_reduce_scatter_input_fn",
     .shown_by = ""},
    {.name = "workspaces_are_given_back",
     .rule = &PyTorchRules::workspaces_are_given_back,
     .since = PyTorchVersion::k2_15,
     .policy = "",
     .before = "cuBLAS keeps a workspace for each thread that multiplies",
     .now =
         "each product takes a workspace and gives it back: cuBLAS's, or 1 MiB where cuBLASLt adds the bias",
     .where = "getCurrentCUDABlasHandleWithWorkspace",
     .shown_by = ""},
    {.name = "embeddings_sort_few_digits",
     .rule = &PyTorchRules::embeddings_sort_few_digits,
     .since = PyTorchVersion::k2_15,
     .policy = "",
     .before = "the backward of an embedding sorts its indices by all of their 64 bits",
     .now = "it sorts them by the bits of the number of rows",
     .where = "embedding_dense_backward_cuda",
     .shown_by = ""},
    {.name = "cub_tiles_of_cuda_13_2",
     .rule = &PyTorchRules::cub_tiles_of_cuda_13_2,
     .since = PyTorchVersion::k2_15,
     .policy = "",
     .before = "CUB counts distinct indices in tiles of 4480 (CUDA 13.0)",
     .now = "in tiles of 4928 (CUDA 13.2)",
     .where = "embedding_backward_cuda_kernel",
     .shown_by = ""},
    {.name = "older_segments_first",
     .rule = &PyTorchRules::older_segments_first,
     .since = PyTorchVersion::k2_15,
     .policy = "",
     .before = "of free blocks of one size the caching allocator takes the one at the lowest address",
     .now = "it takes one of the oldest segment, there the one at the lowest address",
     .where = "BlockComparatorSize",
     .shown_by = ""},
});

// The rules of a plan with this strategy: of its policy, and of the release that it follows (PyTorchOfPlan).
PyTorchRules RulesOf(const Strategy& strategy);

// The releases of PyTorch whose FSDP is planned. A strategy names one (Strategy::pytorch), and a plan says in
// its strategy which one it follows.

// Ascending.
std::string_view Name(PyTorchVersion version);  // "2.15"
std::vector<std::string> PyTorchVersions();     // all names
// Nothing: no release that is planned.
std::optional<PyTorchVersion> PyTorchFromName(std::string_view name);

// The planned release for a trace that torch recorded (Trace::recorded_with, "torch 2.11.0; ..."): the newest
// that is not newer than that torch, the oldest where all are newer. Nothing: not said.
std::optional<PyTorchVersion> RecordedPyTorch(std::string_view recorded_with);

// The release that a plan of this strategy for this trace follows: the strategy's, else that of the torch
// that recorded the trace, which is the one installed there, else the newest.
PyTorchVersion PlannedPyTorch(const Strategy& strategy, const Trace& trace);

// The release that a plan with this strategy follows: the oldest where it was made before strategies named
// one.
PyTorchVersion PyTorchOfPlan(const Strategy& strategy);

}  // namespace shardplan

# SPDX-License-Identifier: Apache-2.0
"""Every setting of the fsdp2 policy, on small models."""

from __future__ import annotations

import torch
from equivalence import FEW_STEPS, Case
from equivalence_models import BLOCKS
from shardplan_conformance.installed_fsdp import FINALIZES_ON_CALL, PLACES_ON_MESHES
from torch.distributed.fsdp import _common_utils
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

HSDP = [{"name": "replicate", "size": 2}, {"name": "shard", "size": 2}]
TWO = [{"name": "outer", "size": 2}, {"name": "inner", "size": 2}]
BOTH = {"shard": ["outer", "inner"]}
FORWARD, BACKWARD = {"call": "forward"}, {"call": "backward"}
END = [{"call": "optimizer_step"}, {"call": "zero_grad"}]


def setter(method: str, value: bool, module: str = "", **more) -> dict:
    return {"call": "module", "method": method, "module": module, "value": value, **more}


def micro(number: int) -> list[dict]:
    """Forward and backward of one micro-batch."""
    return [{"call": "forward", "microbatch": number}, {"call": "backward", "microbatches": [number]}]


def case(name: str, model: str = "mlp", units=None, ranks: int = 2, arguments: dict | None = None, **fields) -> Case:
    """Fields of Case, and every other as a field of the strategy."""
    own = {
        key: fields.pop(key)
        for key in ("groups", "checkpoint", "optimizer", "clip", "steps", "tolerance")
        if key in fields
    }
    if model == "mlp":
        own.setdefault("steps", FEW_STEPS)
    if own.get("optimizer") == "sgd":
        fields["optimizer"] = {"kind": "sgd", "momentum": True}
    if "strategy_checkpoint" in fields:
        fields["checkpoint"] = fields.pop("strategy_checkpoint")
    units = [{"modules": [BLOCKS[model]]}, {"modules": [""]}] if units is None else units
    return Case(name, model, arguments or {}, {"units": units, **fields}, ranks, **own)


def accumulation(method: str = "set_requires_gradient_sync", count: int = 3, **more) -> list[list[dict]]:
    """`count` micro-batches of which only the last communicates."""
    step = [setter(method, False, **more)]
    for number in range(count - 1):
        step += micro(number)
    return [[*step, setter(method, True, **more), *micro(count - 1), *END]]


def checkpointed(name: str, entry: str, **fields) -> Case:
    """A region that the user wraps and the planner is told of."""
    return case(name, checkpoint=(entry,), strategy_checkpoint={"modules": [entry]}, **fields)


GROUP = [{"modules": ["layers.0", "layers.1"], "group": True}, {"modules": ["layers.2"]}, {"modules": [""]}]
GROUPED_HEAD = [
    {"modules": ["layers.0"]},
    {"modules": ["layers.1"]},
    {"modules": ["layers.2", "head"], "group": True},
    {"modules": [""]},
]
CHUNKS = {"outputs": "chunks"}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}

# FSDP2 refuses ties across units since 2.15.
TIES_ARE_REFUSED = hasattr(FSDPState, "_validate_no_duplicate_params")
LOOKS_INTO_DATACLASSES = hasattr(_common_utils, "collect_grad_tensors")  # FSDP2's hooks, since 2.15
TIED_ACROSS_UNITS = [
    case("tied_across_units", arguments={"tied": True}),
    case(
        "tied_across_units_bf16", arguments={"tied": True}, mixed_precision=BF16, program=[[*micro(0), *micro(1), *END]]
    ),
    case(
        "tied_gpt_across_units",
        model="gpt",
        units=[{"modules": ["tokens"]}, {"modules": ["blocks.*"]}, {"modules": [""]}],
    ),
]

# The loss runs a part of a group: FSDP2 trains it since 2.15.
COMPLETES_GROUPS = hasattr(FSDPState, "_force_complete_incomplete_states")
GROUPED_HEAD_IN_CHUNKS = [
    case("grouped_head_in_chunks", arguments=CHUNKS, units=GROUPED_HEAD),
    case("grouped_head_in_chunks_accumulates", arguments=CHUNKS, units=GROUPED_HEAD, program=accumulation()),
    case("grouped_head_in_chunks_hsdp", arguments=CHUNKS, units=GROUPED_HEAD, ranks=4, mesh=HSDP),
]

# Each mesh of a unit's parameters makes a group of its own, since 2.15.
DOWN_ON_INNER = {"parameter_meshes": [{"parameters": ["layers.*.down.*"], "data_parallel": {"shard": ["inner"]}}]}
ON_TWO_MESHES = [
    case(
        name, ranks=4, mesh=TWO, data_parallel=BOTH,
        units=[{"modules": ["layers.*"], **DOWN_ON_INNER}, {"modules": [""]}], **fields,
    )
    for name, fields in {
        "on_two_meshes": {},
        "on_two_meshes_bf16_accumulates": {"mixed_precision": BF16, "program": accumulation()},
        "on_two_meshes_prefetched": {
            "fsdp2": {"forward_prefetch": 1, "backward_prefetch": 1},
            "reshard_after_forward": 2,
        },
    }.items()
]

def finalized(*calls: dict) -> dict:
    return {
        "setup": [{"method": "set_manual_backward_finalization", "module": "", "value": True}],
        "program": [[*micro(0), *micro(1), *calls, *END]],
    }


FINALIZE = {"call": "module", "method": "finalize_backward", "module": ""}
WAIT = {"call": "module", "method": "wait_for_gradient_reduction", "module": ""}
FINALIZED_BY_CALL = [
    case("finalized_by_call", **finalized(FINALIZE)),
    case("finalized_by_call_bf16", mixed_precision=BF16, **finalized({**FINALIZE, "value": True}, WAIT)),
]
KEEPS_STORAGE = [
    case("keeps_unsharded_storage", setup=[{"method": "set_keep_unsharded_storage", "module": "", "value": True}]),
]

# Gradients that autograd makes wider than their parameters: of RMSNorm's weights on a CPU, of weights that multiply
# float32 anywhere.
PRECISIONS = {
    "": {"param_dtype": "bfloat16"}, "_in_float32": BF16,
    "_in_bfloat16": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
}
WIDER_GRADIENTS = [
    case(f"{norm}_norms{name}{suffix}", arguments={"norm": norm, "used_twice": 1}, mixed_precision=precision, **fields)
    for norm in ("rms", "scaled", "layer")
    for name, precision in PRECISIONS.items()
    for suffix, fields in {"": {}, "_accumulate": {"program": accumulation()}}.items()
    if norm == "scaled" or suffix or name != "_in_bfloat16"
] + [
    case(
        "reduced_in_less",
        arguments={"used_twice": 1},
        mixed_precision={"reduce_dtype": "bfloat16"},
        program=accumulation(),
        optimizer="sgd",
    )
]
# Tensor.grad_dtype, since 2.15; AdamW takes no gradients of another dtype than their parameters'.
GRAD_DTYPES = [
    case(
        f"grad_dtypes_{name}{suffix}",
        arguments={"norm": "scaled", "dtype": "bfloat16", "grad_dtypes": dtypes, "used_twice": 1},
        optimizer="sgd",
        **fields,
    )
    for name, dtypes in {
        "of_all": {"": "float32"},
        "of_norms": {"norm": "float32"},
        "of_three_kinds": {"norm": "float32", "up": "float16"},
        "any": {"norm": None},
        "any_of_all": {"": None},
    }.items()
    for suffix, fields in {
        "": {}, "_accumulate": {"program": accumulation()},
        "_in_float32": {"mixed_precision": {"reduce_dtype": "float32"}},
    }.items()
]
CHECKPOINTED_CHUNKS = [
    case(
        f"head_in_checkpointed_chunks{suffix}",
        arguments={"outputs": "checkpointed_chunks"},
        units=[{"modules": ["layers.*"]}, {"modules": ["head"]}, {"modules": [""]}],
        **fields,
    )
    for suffix, fields in {
        "": {}, "_bf16": {"mixed_precision": BF16}, "_accumulate": {"program": accumulation()},
        "_kept": {"reshard_after_forward": False},
    }.items()
]

CASES = [
    *WIDER_GRADIENTS,
    *(GRAD_DTYPES if hasattr(torch.nn.Parameter(torch.zeros(1)), "_has_grad_dtype_override") else []),
    *CHECKPOINTED_CHUNKS,
    *(FINALIZED_BY_CALL + KEEPS_STORAGE if FINALIZES_ON_CALL else []),
    *(ON_TWO_MESHES if PLACES_ON_MESHES else []),
    *([] if TIES_ARE_REFUSED else TIED_ACROSS_UNITS),
    case("default"),
    case("default_3", ranks=3),
    case("hsdp", ranks=4, mesh=HSDP),
    case("hsdp_bf16", ranks=4, mesh=HSDP, mixed_precision=BF16),
    case("flattened", ranks=4, mesh=TWO, data_parallel=BOTH, clip=0.05),
    case("flattened_to_two", ranks=4, mesh=TWO, data_parallel=BOTH, reshard_after_forward=2),
    case(
        "flattened_with_one",
        ranks=4,
        mesh=[HSDP[0], {"name": "one", "size": 1}, HSDP[1]],
        data_parallel={"replicate": ["replicate"], "shard": ["one", "shard"]},
    ),
    case(
        "flattened_but_for_one_unit",
        ranks=4,
        mesh=TWO,
        data_parallel=BOTH,
        units=[
            {"modules": ["layers.1"], "data_parallel": {"shard": ["outer"]}},
            {"modules": ["layers.0", "layers.2"]},
            {"modules": [""]},
        ],
    ),
    case(
        "flattened_replicas",
        ranks=4,
        mesh=[*TWO, {"name": "shard", "size": 1}],
        data_parallel={"replicate": ["outer", "inner"], "shard": ["shard"]},
    ),
    case("replicated", ranks=4, mesh=TWO, data_parallel={"replicate": ["outer", "inner"]}),
    case("hsdp_accumulate_nothing", ranks=4, mesh=HSDP, program=accumulation()),
    case("hsdp_accumulate_partial", ranks=4, mesh=HSDP, program=accumulation("set_requires_all_reduce")),
    case(
        "hsdp_accumulate_partial_bf16",
        ranks=4,
        mesh=HSDP,
        mixed_precision=BF16,
        program=accumulation("set_requires_all_reduce"),
    ),
    # Over two ranks first, then over the two pairs: another order of the sum.
    case("two_levels", ranks=4, fsdp2={"inner_reduce_ranks": 2}, tolerance=1e-4),
    case("two_levels_bf16", ranks=4, fsdp2={"inner_reduce_ranks": 2}, mixed_precision=BF16, clip=0.05, tolerance=1e-2),
    case(
        "two_levels_each",
        ranks=4,
        fsdp2={"inner_reduce_ranks": 2},
        program=[[*micro(0), *micro(1), *END]],
        tolerance=1e-4,
    ),
    case("accumulate_without_communication", program=accumulation()),
    case("accumulate_without_communication_bf16", mixed_precision=BF16, program=accumulation()),
    case("accumulate_with_communication", program=[[*micro(0), *micro(1), *END]]),
    case("accumulate_with_communication_bf16", mixed_precision=BF16, program=[[*micro(0), *micro(1), *END]]),
    case(
        "accumulate_one_unit_only",
        program=[
            [
                setter("set_requires_gradient_sync", False, "layers.1"),
                *micro(0),
                setter("set_requires_gradient_sync", True, "layers.1"),
                *micro(1),
                *END,
            ]
        ],
    ),
    case(
        "accumulate_keep_unsharded",
        program=[
            [
                setter("set_is_last_backward", False),
                setter("set_requires_gradient_sync", False),
                setter("set_reshard_after_backward", False),
                *micro(0),
                setter("set_is_last_backward", True),
                setter("set_requires_gradient_sync", True),
                setter("set_reshard_after_backward", True),
                *micro(1),
                *END,
            ]
        ],
    ),
    case("keep_after_forward", reshard_after_forward=False),
    case("reshard_root_too", reshard_after_forward=True),
    case("reshard_to_two", ranks=4, reshard_after_forward=2),
    case("reshard_to_two_bf16", ranks=4, reshard_after_forward=2, mixed_precision=BF16),
    case("bf16", mixed_precision=BF16),
    case("bf16_reduce", mixed_precision={"param_dtype": "bfloat16"}),
    case("fp16", mixed_precision={"param_dtype": "float16", "reduce_dtype": "float16"}),
    case("reduce_fp64", mixed_precision={"reduce_dtype": "float64"}),
    case("reduce_bf16_only", mixed_precision={"reduce_dtype": "bfloat16"}),
    case(
        "output_fp32",
        units=[
            {"modules": ["layers.*"], "mixed_precision": BF16},
            {"modules": [""], "mixed_precision": {**BF16, "output_dtype": "float32"}},
        ],
    ),
    case(
        "no_input_cast",
        units=[
            {"modules": ["layers.0"], "mixed_precision": {**BF16, "output_dtype": "float32"}},
            {"modules": ["layers.1"], "mixed_precision": {"cast_forward_inputs": False, "param_dtype": "float32"}},
            {"modules": [""]},
        ],
    ),
    case(
        "precision_by_unit",
        units=[
            {"modules": ["layers.1"], "mixed_precision": {"param_dtype": "bfloat16", "output_dtype": "float32"}},
            {"modules": [""]},
        ],
    ),
    case("group", units=GROUP),
    case(
        "group_last", units=[{"modules": ["layers.*"]}, {"modules": ["head", "stem"], "group": True}, {"modules": [""]}]
    ),
    case("grouped_head", units=GROUPED_HEAD),
    case("grouped_head_bf16", units=GROUPED_HEAD, mixed_precision=BF16),
    *[case(f"grouped_head_of_{release}", units=GROUPED_HEAD, pytorch=release) for release in ("2.11", "2.15")],
    *(GROUPED_HEAD_IN_CHUNKS if COMPLETES_GROUPS else []),
    case("group_one_does_not_run", arguments={"unused": [1]}, units=GROUP),
    case("group_first_does_not_run", arguments={"unused": [0]}, units=GROUP),
    case("group_one_runs_in_a_row", arguments={"in_a_row": 0}, units=GROUP),
    case("group_last_runs_in_a_row", arguments={"in_a_row": 1}, units=GROUP),
    case("group_one_runs_again_at_the_end", arguments={"used_twice": 0}, units=GROUP),
    case(
        "group_incomplete_accumulates", arguments={"unused": [1]}, units=GROUP, program=[[*micro(0), *micro(1), *END]]
    ),
    case("group_incomplete_without_communication", arguments={"unused": [1]}, units=GROUP, program=accumulation()),
    case("group_twice_a_step", arguments={"in_a_row": 1}, units=GROUP, program=[[*micro(0), *micro(1), *END]]),
    case("group_kept", arguments={"used_twice": 0}, units=GROUP, reshard_after_forward=False),
    checkpointed("group_checkpointed", "layers.*", units=GROUP),
    checkpointed("group_checkpointed_in_a_row", "layers.*", arguments={"in_a_row": 0}, units=GROUP),
    checkpointed("checkpoint_unit_used_twice", "layers.*", arguments={"used_twice": 0}),
    case("checkpoint_call_outside_used_twice", arguments={"recomputed": [0, 1, 2], "used_twice": 0}),
    *(
        [
            case("dataclasses", arguments={"boxed": True}),
            case("dataclasses_bf16", arguments={"boxed": True}, mixed_precision=BF16),
        ]
        if LOOKS_INTO_DATACLASSES
        else []
    ),
    case("nested", units=[{"modules": ["layers.*.up"]}, {"modules": ["layers.*"]}, {"modules": [""]}]),
    case(
        "root_without_parameters",
        arguments={"bare_root": True},
        units=[{"modules": ["stem"]}, {"modules": ["layers.*"]}, {"modules": ["head"]}, {"modules": [""]}],
    ),
    case("root_alone", units=[{"modules": [""]}]),
    case("frozen_units", arguments={"frozen": ["stem", "layers.0", "layers.2"]}),
    case("partly_frozen", arguments={"frozen": ["layers.1.up", "layers.0.norm", "head.bias"]}),
    case(
        "partly_frozen_bf16", mixed_precision=BF16, arguments={"frozen": ["layers.1.up", "layers.0.norm", "head.bias"]}
    ),
    case(
        "tied_in_a_group",
        arguments={"tied": True},
        units=[{"modules": ["layers.0", "layers.2"], "group": True}, {"modules": [""]}],
    ),
    case("tied_gpt", model="gpt"),
    case("untied_gpt", model="gpt", arguments={"tied": False, "layers": 2, "width": 36}),
    case("used_twice", arguments={"used_twice": 1}),
    case("forward_method", arguments={"by_method": [0, 2]}),
    case("forward_method_bf16", arguments={"by_method": [1]}, mixed_precision=BF16),
    case("used_twice_last", arguments={"used_twice": 2}),
    case("used_twice_keep", arguments={"used_twice": 1}, reshard_after_forward=False),
    case("unused_unit", arguments={"unused": [1]}),
    case("unused_last", arguments={"unused": [2]}),
    case("tuple_output", arguments={"outputs": "tuple"}),
    case("dict_output", arguments={"outputs": "dict"}),
    case("divide_by_ranks", fsdp2={"gradient_divide_factor": 2.0}),
    case("divide_with_sum", fsdp2={"gradient_divide_factor": 3.0, "force_sum_reduction": True}),
    case("force_sum", fsdp2={"force_sum_reduction": True}, ranks=3),
    case("force_sum_hsdp", fsdp2={"force_sum_reduction": True}, ranks=4, mesh=HSDP),
    case("forward_prefetch", fsdp2={"forward_prefetch": 2}),
    case("backward_prefetch", fsdp2={"backward_prefetch": 2}),
    case("both_prefetch", fsdp2={"forward_prefetch": 1, "backward_prefetch": 1}),
    case(
        "prefetch_lists",
        fsdp2={
            "forward_prefetch_lists": [{"unit": "layers.0", "prefetch": ["layers.2", "layers.1"]}],
            "backward_prefetch_lists": [{"unit": "layers.2", "prefetch": ["layers.0"]}],
        },
    ),
    case("async_unshard", fsdp2={"unshard_async_op": True, "forward_prefetch": 1}),
    case("cpu_offload", cpu_offload=True, pin_memory=False),
    case("cpu_offload_bf16", cpu_offload=True, pin_memory=False, mixed_precision=BF16),
    case("cpu_offload_accumulate", cpu_offload=True, pin_memory=False, program=[[*micro(0), *micro(1), *END]]),
    case(
        "cpu_offload_one_unit",
        units=[{"modules": ["layers.1"], "cpu_offload": True}, {"modules": [""]}],
        pin_memory=False,
    ),
    case("ignored", ignored_parameters=["layers.1.up.weight", "head.bias"]),
    case("clip", clip=0.05),
    case("clip_hsdp", clip=0.05, ranks=4, mesh=HSDP),
    case(
        "two_forwards",
        program=[
            [
                {"call": "forward", "microbatch": 0},
                {"call": "forward", "microbatch": 1},
                {"call": "backward", "microbatches": [1]},
                {"call": "backward", "microbatches": [0]},
                *END,
            ]
        ],
    ),
    case(
        "two_forwards_one_backward",
        groups=((True, True),),
        program=[
            [
                FORWARD,
                {"call": "forward", "microbatch": 1, "trace": 1},
                {"call": "backward", "microbatches": [0, 1]},
                *END,
            ]
        ],
    ),
    case(
        "forward_without_gradients",
        groups=((False,), (True,)),
        program=[
            [FORWARD, {"call": "forward", "microbatch": 1, "trace": 1}, {"call": "backward", "microbatches": [1]}, *END]
        ],
    ),
    case(
        "forward_without_gradients_between",
        groups=((True,), (False,)),
        program=[[FORWARD, {"call": "forward", "microbatch": 1, "trace": 1}, BACKWARD, *END]],
    ),
    case("forward_lost", program=[[{"call": "forward", "microbatch": 0}, *micro(1), *END]]),
    case("offload_activations", activation_offload={"modules": ["layers.*"], "min_bytes": 0}),
    case(
        "offload_activations_accumulate_bf16",
        mixed_precision=BF16,
        program=accumulation(),
        activation_offload={"modules": ["layers.*"], "min_bytes": 0},
    ),
    case(
        "offload_activations_every_2", "gpt", activation_offload={"modules": ["blocks.*"], "every": 2, "min_bytes": 0}
    ),
    case(
        "offload_activations_of_modules", "gpt", activation_offload={"modules": ["blocks.*.attention"], "min_bytes": 64}
    ),
    case(
        "offload_activations_hsdp",
        ranks=4,
        mesh=HSDP,
        activation_offload={"modules": ["layers.0", "layers.1"], "min_bytes": 0},
    ),
    case(
        "offload_activations_beside_checkpoint",
        checkpoint=("layers.1",),
        strategy_checkpoint={"modules": ["layers.1"]},
        activation_offload={"modules": ["layers.0", "layers.2"], "min_bytes": 0},
    ),
    checkpointed("checkpoint_inside", "layers.*.up"),
    checkpointed("checkpoint_unit", "layers.*"),
    checkpointed("checkpoint_unit_bf16", "layers.*", mixed_precision=BF16),
    checkpointed("checkpoint_outside", "layers.*", units=[{"modules": ["layers.*.up"]}, {"modules": [""]}]),
    case("checkpoint_call_outside", arguments={"recomputed": [0, 1, 2]}),
    case("user_unshard", program=[[setter("unshard", False, "layers.0"), FORWARD, BACKWARD, *END]]),
    case("user_unshard_async", program=[[setter("unshard", True, "layers.0"), FORWARD, BACKWARD, *END]]),
    case(
        "user_reshard",
        reshard_after_forward=False,
        program=[[FORWARD, setter("reshard", False, "layers.0"), BACKWARD, *END]],
    ),
    case(
        "no_unshard_in_backward",
        model="gpt",
        arguments={"tied": False},
        units=[{"modules": ["tokens"]}, {"modules": ["blocks.*"]}, {"modules": [""]}],
        setup=[{"method": "set_unshard_in_backward", "module": "tokens", "value": False}],
    ),
]

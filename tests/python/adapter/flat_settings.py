# SPDX-License-Identifier: Apache-2.0
"""Every setting of the fsdp1 policy that the adapter replays, on small models and families of transformers."""

from __future__ import annotations

from equivalence import FEW_STEPS, Case
from equivalence_models import BLOCKS

HSDP = [{"name": "replicate", "size": 2}, {"name": "shard", "size": 2}]
ONE_REPLICA = [{"name": "replicate", "size": 1}, {"name": "shard", "size": 2}]
FORWARD, BACKWARD = {"call": "forward"}, {"call": "backward"}
END = [{"call": "optimizer_step"}, {"call": "zero_grad"}]
IN_BACKWARD = {"kind": "sgd", "in_backward": True}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def micro(number: int) -> list[dict]:
    """Forward and backward of one micro-batch."""
    return [{"call": "forward", "microbatch": number}, {"call": "backward", "microbatches": [number]}]


def no_sync(count: int = 3) -> list[list[dict]]:
    """`count` micro-batches of which only the last communicates."""

    def call(value: bool) -> dict:
        return {"call": "module", "method": "no_sync", "module": "", "value": value}

    step = [call(True)]
    for number in range(count - 1):
        step += micro(number)
    return [[*step, call(False), *micro(count - 1), *END]]


def evaluating(before: bool = True, training: bool | None = None) -> dict:
    """Steps with a forward without gradients, before the micro-batch or behind it. training: of the modules in it."""
    call = {"call": "forward", "microbatch": 1, "trace": 1, **({} if training is None else {"training": training})}
    program = [call, FORWARD, BACKWARD, *END] if before else [FORWARD, BACKWARD, call, *END]
    return {"groups": ((True,), (False,)), "program": [program]}


def case(name: str, model: str = "mlp", units=None, ranks: int = 2, arguments: dict | None = None, **fields) -> Case:
    """Fields of Case and of the strategy; what is left are knobs of fsdp1."""
    own_names = ("groups", "checkpoint", "optimizer", "clip", "steps", "tolerance")
    own = {key: fields.pop(key) for key in own_names if key in fields}
    if model == "mlp":
        own.setdefault("steps", FEW_STEPS)
    strategy = {
        "policy": "fsdp1",
        "units": [{"modules": [BLOCKS[model]]}, {"modules": [""]}] if units is None else units,
    }
    for key in (
        "mesh", "mixed_precision", "cpu_offload", "ignored_parameters", "program", "strategy_checkpoint",
        "strategy_optimizer",
    ):
        if key in fields:
            strategy[key.removeprefix("strategy_")] = fields.pop(key)
    return Case(name, model, arguments or {}, {**strategy, "fsdp1": fields}, ranks, **own)


def checkpointed(name: str, entry: str, **fields) -> Case:
    """A region that the user wraps and the planner is told of."""
    return case(name, checkpoint=(entry,), strategy_checkpoint={"modules": [entry]}, **fields)


FROZEN = {"frozen": ["layers.0", "layers.2"]}
PARTLY = {"frozen": ["layers.1.up", "layers.0.norm"]}
ACCUMULATE = [[*micro(0), *micro(1), *END]]

_BOTH = [
    # every one with use_orig_params off and on
    ("default", {}),
    ("default_3", {"ranks": 3}),
    ("shard_grad_op", {"sharding": "shard_grad_op"}),
    ("no_shard", {"sharding": "no_shard"}),
    ("no_shard_3", {"sharding": "no_shard", "ranks": 3}),
    ("hybrid", {"sharding": "hybrid_shard", "ranks": 4, "mesh": HSDP}),
    ("hybrid_zero2", {"sharding": "hybrid_shard_zero2", "ranks": 4, "mesh": HSDP}),
    ("one_rank", {"ranks": 1}),
    ("one_rank_bf16", {"ranks": 1, "mixed_precision": BF16}),
    ("one_replica", {"sharding": "hybrid_shard", "ranks": 2, "mesh": ONE_REPLICA}),
    ("post", {"backward_prefetch": "backward_post"}),
    ("none", {"backward_prefetch": "none", "limit_all_gathers": False}),
    ("forward_prefetch", {"forward_prefetch": True}),
    ("bf16", {"mixed_precision": BF16}),
    ("bf16_3", {"mixed_precision": BF16, "ranks": 3}),
    ("bf16_reduce", {"mixed_precision": {"param_dtype": "bfloat16"}}),
    ("reduce_bf16_only", {"mixed_precision": {"reduce_dtype": "bfloat16"}}),
    (
        "keep_low",
        {"mixed_precision": {"param_dtype": "bfloat16", "keep_low_precision_grads": True}, "optimizer": "sgd"},
    ),
    ("no_shard_bf16", {"mixed_precision": BF16, "sharding": "no_shard"}),
    ("zero2_bf16", {"mixed_precision": BF16, "sharding": "shard_grad_op"}),
    ("no_sync", {"program": no_sync()}),
    ("no_sync_zero2", {"program": no_sync(2), "sharding": "shard_grad_op"}),
    ("no_sync_bf16", {"program": no_sync(), "mixed_precision": BF16}),
    ("accumulate", {"program": ACCUMULATE}),
    ("accumulate_bf16", {"program": ACCUMULATE, "mixed_precision": BF16}),
    ("accumulate_hybrid", {"program": ACCUMULATE, "sharding": "hybrid_shard", "ranks": 4, "mesh": HSDP}),
    ("frozen", {"arguments": FROZEN}),
    ("frozen_zero2", {"arguments": FROZEN, "sharding": "shard_grad_op"}),
    ("used_twice", {"arguments": {"used_twice": 1}}),
    ("used_twice_bf16", {"arguments": {"used_twice": 1}, "mixed_precision": BF16}),
    ("tuple_output", {"arguments": {"outputs": "tuple"}}),
    ("nested", {"units": [{"modules": ["layers.*.up"]}, {"modules": ["layers.*"]}, {"modules": [""]}]}),
    ("root_alone", {"units": [{"modules": [""]}]}),
    ("ignored", {"ignored_parameters": ["layers.1.up.weight", "head.bias"]}),
    ("clip", {"clip": 0.05}),
    ("offload", {"cpu_offload": True}),
    ("offload_3_bf16", {"cpu_offload": True, "ranks": 3, "mixed_precision": BF16}),
    ("offload_no_sync", {"cpu_offload": True, "program": no_sync()}),
    ("offload_hybrid", {"cpu_offload": True, "sharding": "hybrid_shard", "ranks": 4, "mesh": HSDP}),
    ("offload_clip", {"cpu_offload": True, "clip": 0.05}),
    ("evaluate", evaluating()),
    ("evaluate_between", evaluating(before=False)),
    ("evaluate_bf16", {**evaluating(), "mixed_precision": BF16}),
    ("evaluate_full", {**evaluating(), "mixed_precision": BF16, "full_precision_in_eval": True}),
    ("evaluate_full_between", {**evaluating(before=False), "mixed_precision": BF16, "full_precision_in_eval": True}),
    ("evaluate_full_training", {**evaluating(training=True), "mixed_precision": BF16, "full_precision_in_eval": True}),
    (
        "evaluate_full_zero2",
        {**evaluating(), "mixed_precision": BF16, "full_precision_in_eval": True, "sharding": "shard_grad_op"},
    ),
    (
        "evaluate_full_no_shard",
        {**evaluating(), "mixed_precision": BF16, "full_precision_in_eval": True, "sharding": "no_shard"},
    ),
    ("clip_3", {"clip": 0.05, "ranks": 3, "arguments": {"layers": 1}}),
    ("gpt", {"model": "gpt"}),
]
CASES = [
    case(name + suffix, **fields, use_orig_params=original)
    for name, fields in _BOTH
    for suffix, original in (("", False), ("_orig", True))
]
CASES += [
    case("optimizer_in_backward", strategy_optimizer=IN_BACKWARD, use_orig_params=True),
    case(
        "optimizer_in_backward_3", strategy_optimizer=IN_BACKWARD, use_orig_params=True, ranks=3, mixed_precision=BF16
    ),
    case("optimizer_in_backward_offload", strategy_optimizer=IN_BACKWARD, use_orig_params=True, cpu_offload=True),
    case("frozen_stem", arguments={"frozen": ["stem", "layers.0"]}, use_orig_params=True),
    case("partly_frozen", arguments=PARTLY, use_orig_params=True),
    case("partly_frozen_bf16", arguments=PARTLY, use_orig_params=True, mixed_precision=BF16),
    case(
        "root_without_parameters",
        arguments={"bare_root": True},
        units=[{"modules": ["stem"]}, {"modules": ["layers.*"]}, {"modules": ["head"]}, {"modules": [""]}],
    ),
    checkpointed("checkpoint_inside", "layers.*.up"),
    checkpointed("checkpoint_inside_orig", "layers.*.up", use_orig_params=True),
    case("tied_across_units", arguments={"tied": True}),
    case("tied_across_units_bf16", arguments={"tied": True}, mixed_precision=BF16, program=no_sync()),
    case("sgd", optimizer="sgd"),
    *(
        case(model + suffix, model=model, use_orig_params=original)
        for model in ("llama", "moe", "t5", "vit")
        for suffix, original in (("", False), ("_orig", True))
    ),
]

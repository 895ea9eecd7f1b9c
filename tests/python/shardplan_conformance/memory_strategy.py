# SPDX-License-Identifier: Apache-2.0
"""The strategy documents that say what the knobs of recordings of memory say."""

from __future__ import annotations


def strategy_of(case: dict) -> dict:
    knobs = case["knobs"]
    blocks = "model.layers" if knobs["impl"] == "hf" else "layers"
    mesh = [{"name": "shard", "size": knobs["world"] // knobs["replicate"]}]
    if knobs["replicate"] > 1:
        mesh.insert(0, {"name": "replicate", "size": knobs["replicate"]})
    of_policy = _fsdp1(knobs, blocks) if knobs.get("policy") == "fsdp1" else _fsdp2(case, blocks)
    strategy = {"schema": "shardplan.strategy/1", "mesh": mesh, "optimizer": _optimizer(knobs), **of_policy}
    if "torch" in case:  # the release that was recorded, whichever one is installed
        strategy["pytorch"] = ".".join(case["torch"].split(".")[:2])
    reduce_dtype = {"bf16_fp32": "float32", "bf16_bf16": "bfloat16"}.get(knobs["mp"])
    if reduce_dtype is not None:
        strategy["mixed_precision"] = {"param_dtype": "bfloat16", "reduce_dtype": reduce_dtype}
    if knobs["offload"]:
        strategy["cpu_offload"] = True
    if knobs["ac"] == "block":
        strategy["checkpoint"] = {"modules": [f"{blocks}.*"]}
    return strategy


def _optimizer(knobs: dict) -> dict:
    kind = knobs.get("optimizer", "adamw")
    momentum = {"momentum": True} if kind == "sgdm" else {}
    return {"kind": "sgd" if momentum else kind, "implementation": knobs["opt"], **momentum}


def _program(knobs: dict, setters) -> list[list[dict]]:
    """setters(last): the calls on the root before a micro-batch, values by method."""
    calls = []
    for index in range(knobs["accum"]):
        before = setters(index == knobs["accum"] - 1) if knobs["accum"] > 1 else {}
        calls += [
            {"call": "module", "method": method, "module": "", "value": value} for method, value in before.items()
        ]
        calls.append({"call": "forward", "microbatch": index})
        calls.append({"call": "backward", "microbatches": [index]})
    return [[*calls, {"call": "optimizer_step"}, {"call": "zero_grad"}]]


# ---- fsdp2 ----


def _units(knobs: dict, blocks: str) -> list[dict]:
    """The calls of fully_shard: blocks, then (as units of their own) embedding and head, then the root."""
    reshard = {} if knobs["reshard"] is None else {"reshard_after_forward": knobs["reshard"]}
    units = [{"modules": [f"{blocks}.*"], **reshard}]
    if knobs["units"] == "embed_block_head":
        units.append({"modules": ["tok_embeddings"], **reshard})
        units.append({"modules": ["head"], "reshard_after_forward": False})
    units.append({"modules": [""], **(reshard if isinstance(knobs["reshard"], bool) else {})})
    return units


def _prefetch_lists(depth: int, blocks: list[str]) -> dict:
    forward = [{"unit": b, "prefetch": blocks[i + 1 : i + 1 + depth]} for i, b in enumerate(blocks)]
    backward = [{"unit": b, "prefetch": blocks[max(0, i - depth) : i][::-1]} for i, b in enumerate(blocks)]
    return {
        "forward_prefetch_lists": [entry for entry in forward if entry["prefetch"]],
        "backward_prefetch_lists": [entry for entry in backward if entry["prefetch"]],
    }


def _fsdp2(case: dict, blocks: str) -> dict:
    knobs = case["knobs"]

    def setters(last: bool) -> dict:
        return {
            "set_requires_gradient_sync": knobs["accum_sync"] or last,
            "set_is_last_backward": last,
            "set_reshard_after_backward": knobs["accum_reshard"] or last,
        }

    strategy: dict = {"policy": "fsdp2", "units": _units(knobs, blocks), "program": _program(knobs, setters)}
    if knobs["prefetch"]:
        names = [f"{blocks}.{i}" for i in range(case["model"]["layers"])]
        strategy["fsdp2"] = _prefetch_lists(knobs["prefetch"], names)
    return strategy


# ---- fsdp1 ----


def _fsdp1(knobs: dict, blocks: str) -> dict:
    units = [f"{blocks}.*", *(["tok_embeddings", "head"] if knobs["units"] == "embed_block_head" else []), ""]
    prefetch = {"pre": "backward_pre", "post": "backward_post", "none": "none"}[knobs["backward_prefetch"]]

    def setters(last: bool) -> dict:
        return {} if knobs["accum_sync"] else {"set_requires_gradient_sync": last}

    return {
        "policy": "fsdp1",
        "units": [{"modules": [unit]} for unit in units],
        "fsdp1": {
            "sharding": knobs["sharding"],
            "backward_prefetch": prefetch,
            **{name: knobs[name] for name in ("forward_prefetch", "limit_all_gathers", "use_orig_params")},
        },
        "program": _program(knobs, setters),
    }

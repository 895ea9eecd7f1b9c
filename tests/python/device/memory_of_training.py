# SPDX-License-Identifier: Apache-2.0
"""Trains by real FSDP2 or FSDP1 on a device on which nothing computes, as rank 0 of a world of any size. Prints the
caching allocator's figures, over all steps and at points of the last one. `memory_of_training.py CASE.json`: the case
has the knobs and the model's sizes of a recording of memory."""

import contextlib
import gc
import importlib.util
import json
import os
import sys
import warnings

os.environ.update(TORCH_NCCL_ENABLE_MONITORING="0", TORCH_NCCL_DUMP_ON_TIMEOUT="0", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)


def model_of(case: dict, path: str) -> torch.nn.Module:
    spec = importlib.util.spec_from_file_location("model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.device("meta"):
        return module.Llama({**case["knobs"], **case["model"]})


def _dtypes(knobs: dict) -> tuple:
    return {"bf16_fp32": (torch.bfloat16, torch.float32), "bf16_bf16": (torch.bfloat16, torch.bfloat16)}.get(
        knobs["mp"], (None, None)
    )


def _checkpointed(module: torch.nn.Module, knobs: dict) -> torch.nn.Module:
    if knobs["ac"] != "block":
        return module
    return checkpoint_wrapper(module, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False)


def _mesh(knobs: dict):
    world, replicas = knobs["world"], knobs["replicate"]
    if replicas == 1:
        return init_device_mesh("cuda", (world,))
    return init_device_mesh("cuda", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def shard2(model: torch.nn.Module, knobs: dict) -> torch.nn.Module:
    options = {"mesh": _mesh(knobs), "mp_policy": MixedPrecisionPolicy(*_dtypes(knobs))}
    for index, block in enumerate(model.layers):
        model.layers[index] = fully_shard(
            _checkpointed(block, knobs), reshard_after_forward=knobs["reshard"], **options
        )
    if knobs["units"] == "embed_block_head":
        fully_shard(model.tok_embeddings, reshard_after_forward=knobs["reshard"], **options)
        fully_shard(model.head, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=knobs["reshard"], **options)
    model.to_empty(device="cuda")
    return model


def shard1(model: torch.nn.Module, knobs: dict) -> torch.nn.Module:
    """Units are made one by one on the host; then the shards are moved to memory of their own, without what they were
    cut from."""
    shardings = {
        "full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "hybrid_shard": "HYBRID_SHARD",
        "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2",
    }
    options = {
        "sharding_strategy": ShardingStrategy[shardings[knobs["sharding"]]],
        "backward_prefetch": {
            "pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None,
        }[knobs["backward_prefetch"]],
        "device_id": torch.device("cuda", 0),
        **{name: knobs[name] for name in ("forward_prefetch", "limit_all_gathers", "use_orig_params")},
    }
    if knobs["replicate"] > 1:
        options["device_mesh"] = _mesh(knobs)
    if knobs["mp"] != "fp32":
        param_dtype, reduce_dtype = _dtypes(knobs)
        options["mixed_precision"] = MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for index, block in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(_checkpointed(block.to_empty(device="cpu"), knobs), **options)
    for name in ("tok_embeddings", "head"):
        part = getattr(model, name).to_empty(device="cpu")
        setattr(
            model, name, FullyShardedDataParallel(part, **options) if knobs["units"] == "embed_block_head" else part
        )
    for name in ("cos", "sin"):
        model.register_buffer(name, torch.empty_like(getattr(model, name), device="cpu"), persistent=False)
    model = FullyShardedDataParallel(model, **options)
    units = [module for module in FullyShardedDataParallel.fsdp_modules(model) if module._handle]
    if units[0] is model:  # wrapped last
        units.append(units.pop(0))
    flat = [unit._handle.flat_param for unit in units]
    shards = [getattr(parameter, "_local_shard", parameter) for parameter in flat]
    storages = [tensor.untyped_storage() for tensor in (*shards, *model.buffers())]
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for storage, size in zip(storages, sizes):
        storage.resize_(size)
    return model


def make_optimizer(model: torch.nn.Module, knobs: dict) -> torch.optim.Optimizer:
    how = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for_loop": {"foreach": False}}[knobs["opt"]]
    if knobs["optimizer"] == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, **how)
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9 if knobs["optimizer"] == "sgdm" else 0.0, **how)


def _before_microbatch(model: torch.nn.Module, knobs: dict, last: bool):
    if knobs["policy"] == "fsdp2":
        model.set_requires_gradient_sync(knobs["accum_sync"] or last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(knobs["accum_reshard"] or last)
    elif not (knobs["accum_sync"] or last):
        return model.no_sync()
    return contextlib.nullcontext()


STATISTICS = ("requested", "allocated", "active", "reserved")


class Rows:
    """The allocator's figures at points of the last step: before FSDP1's and behind FSDP2's hook ahead of a unit's
    forward, behind the one after it."""

    def __init__(self, model: torch.nn.Module, knobs: dict):
        self.rows: list[list] = []
        before = "pre_forward.before" if knobs["policy"] == "fsdp1" else "pre_forward.after"
        units = {"(root)": model, **{f"layers.{index}": block for index, block in enumerate(model.layers)}}
        if knobs["units"] == "embed_block_head":
            units |= {name: getattr(model, name) for name in ("tok_embeddings", "head")}
        for name, module in units.items():
            module.register_forward_pre_hook(lambda *_, name=name: self.add(before, name))
            module.register_forward_hook(lambda *_, name=name: self.add("post_forward.after", name))

    def add(self, event: str, unit: str = "") -> None:
        stats = torch.cuda.memory_stats()
        values = [stats[f"{name}_bytes.all.current"] for name in STATISTICS]
        self.rows.append([event, unit, *values, stats["segment.all.current"]])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, knobs: dict) -> list[list]:
    rows = Rows(model, knobs)
    size = (knobs["batch"], knobs["seq"])
    for _ in range(knobs["steps"]):
        rows.rows.clear()
        batches = [[torch.empty(size, dtype=torch.long, device="cuda") for _ in "xy"] for _ in range(knobs["accum"])]
        rows.add("step_begin")
        for index, (x, y) in enumerate(batches):
            with _before_microbatch(model, knobs, index == knobs["accum"] - 1):
                logits = model(x)
                flat = logits.flatten(0, 1)
                loss = F.cross_entropy(flat.float() if knobs["loss"] == "fp32" else flat, y.flatten())
                del flat
                if knobs["del_logits"]:
                    del logits
                rows.add("loss_end")
                loss.backward()
                del loss
                if not knobs["del_logits"]:
                    del logits
                rows.add("backward_returned")
        optimizer.step()
        rows.add("optimizer_step_end")
        optimizer.zero_grad(set_to_none=True)
        rows.add("zero_grad_end")
        del x, y, batches
        torch.cuda.synchronize()
    return rows.rows


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        case = json.load(file)
    knobs = case["knobs"]
    torch.cuda.set_device(0)
    if "SHARDPLAN_REHEARSE" in os.environ:
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("nccl", rank=0, world_size=knobs["world"], store=dist.HashStore())
        # A mesh would split the communicator of a group that is bound to a device, as 2.15 makes it; alone on a null
        # device it keeps its parent's size.
        dist.group.WORLD.bound_device_id = None
    shard = shard1 if knobs["policy"] == "fsdp1" else shard2
    model = shard(model_of(case, sys.argv[2]), knobs)
    optimizer = make_optimizer(model, knobs)
    gc.collect()
    gc.disable()  # as in the recordings: frees follow from references alone
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    rows = train(model, optimizer, knobs)
    stats = torch.cuda.memory_stats()
    found = {name: stats[f"{name}_bytes.all.peak"] for name in ("allocated", "active", "reserved")}
    calls = {"device_allocs": stats["num_device_alloc"], "retries": stats["num_alloc_retries"]}
    print("FOUND", json.dumps({"peaks": {**found, **calls}, "rows": rows}), flush=True)
    if "SHARDPLAN_REHEARSE" not in os.environ:
        os._exit(0)  # the communicators have no peers to say goodbye to


if __name__ == "__main__":
    main()

"""Trains by real FSDP2 on a device on which nothing computes, as rank 0 of a world of any size, and prints what the caching allocator says:
`memory_of_training.py CASE.json`, where the case has the knobs and the model's sizes of a recording of memory."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def model_of(case: dict, path: str) -> torch.nn.Module:
    spec = importlib.util.spec_from_file_location("model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.device("meta"):
        return module.Llama({**case["knobs"], **case["model"]})


def shard(model: torch.nn.Module, knobs: dict) -> None:
    mesh = init_device_mesh("cuda", (knobs["world"],))
    dtypes = {"bf16_fp32": (torch.bfloat16, torch.float32), "bf16_bf16": (torch.bfloat16, torch.bfloat16)}.get(knobs["mp"], (None, None))
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(*dtypes))
    model.to_empty(device="cuda")


def train(model: torch.nn.Module, knobs: dict) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **{"foreach": {"foreach": True}, "fused": {"fused": True}}[knobs["opt"]])
    size = (knobs["batch"], knobs["seq"])
    for _ in range(knobs["steps"]):
        batches = [[torch.empty(size, dtype=torch.long, device="cuda") for _ in "xy"] for _ in range(knobs["accum"])]
        for index, (x, y) in enumerate(batches):
            last = index == knobs["accum"] - 1
            model.set_requires_gradient_sync(knobs["accum_sync"] or last)
            model.set_is_last_backward(last)
            logits = model(x)
            flat = logits.flatten(0, 1)
            loss = F.cross_entropy(flat.float(), y.flatten())
            del flat, logits
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del x, y, batches
        torch.cuda.synchronize()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        case = json.load(file)
    knobs = case["knobs"]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=knobs["world"], store=dist.HashStore())
    model = model_of(case, sys.argv[2])
    shard(model, knobs)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    train(model, knobs)
    stats = torch.cuda.memory_stats()
    found = {name: stats[f"{name}_bytes.all.peak"] for name in ("allocated", "active", "reserved")}
    print("FOUND", json.dumps({**found, "device_allocs": stats["num_device_alloc"], "retries": stats["num_alloc_retries"]}), flush=True)
    os._exit(0)  # the communicators have no peers to say goodbye to


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""torch's errors about dtypes on two Gloo ranks: `dtype_errors.py CASE ...` prints a line of JSON for each: {"case",
"error"}; "" where the step works. A case is "KIND:ARGUMENT:...", a function of KINDS. `dtype_errors.py --traces FOLDER
MODEL ...` writes traces of MODELS."""

import json
import os
import sys
import warnings

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard,
)

CPU = torch.device("cpu")


class Net(nn.Module):
    """Three units: two layers and the root. `held` is a frozen parameter of the first layer, which it has beside its
    own or alone."""

    def __init__(self, held=None, alone=False):
        super().__init__()
        self.layers = nn.ModuleList([nn.Module() if alone else nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 4)
        if alone:
            self.layers[0].forward = lambda x: x
        if held is not None:
            self.layers[0].held = nn.Parameter(torch.ones(8, 4).to(held), requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def dtype(name):
    return getattr(torch, name) if name else None


def step(model, policy, optimizer="sgd", sharding="full_shard", output=None, **mixed):
    if policy == "fsdp2":
        for layer in model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(**mixed))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**mixed, output_dtype=output))
    else:
        options = {
            "device_id": CPU, "mixed_precision": MixedPrecision(**mixed),
            "sharding_strategy": ShardingStrategy[sharding.upper()],
        }
        for number, layer in enumerate(model.layers):
            model.layers[number] = FullyShardedDataParallel(layer, **options)
        model = FullyShardedDataParallel(model, **options)
    output = model(torch.ones(2, 4))
    (output.abs() if output.is_complex() else output.float()).mean().backward()
    made(optimizer, model.parameters()).step()


def made(name, parameters):
    kind, _, how = name.partition("-")
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "forloop": {"foreach": False}}.get(how, {})
    kinds = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD,
        "adafactor": torch.optim.Adafactor,
    }
    return kinds[kind]([p for p in parameters if p.requires_grad], lr=1e-3, **options)


KINDS = {
    "reduce": lambda policy, name: step(Net(), policy, param_dtype=torch.bfloat16, reduce_dtype=dtype(name)),
    "param": lambda policy, name: step(Net(), policy, param_dtype=dtype(name)),
    "output": lambda name: step(Net(), "fsdp2", output=dtype(name)),
    "held": lambda policy, name: step(Net(dtype(name)), policy),
    "alone": lambda policy, name: step(Net(dtype(name), alone=True), policy),
    "keep": lambda optimizer, sharding, param, reduce: step(
        Net(), "fsdp1", optimizer, sharding, param_dtype=dtype(param), reduce_dtype=dtype(reduce),
        keep_low_precision_grads=True,
    ),
}


def rank(number, port, cases):
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(number), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in cases:
        kind, *arguments = case.split(":")
        try:
            KINDS[kind](*arguments)
            error = ""
        except Exception as raised:  # on both ranks alike
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
        if number == 0:
            print(json.dumps({"case": case, "error": error}), flush=True)
        dist.barrier()
    os._exit(0)  # a backward that failed leaves hooks behind


def write_traces(folder, *names):
    from shardplan.tracer import cli

    for name in names:
        code = cli.main([f"dtype_errors:{name}", "-o", f"{folder}/{name}.json", "-q", "--loss", "sum"])
        if code != 0:
            sys.exit(code)


def _traced(*arguments):
    return lambda batch=1, seq=8: (Net(*arguments), (torch.ones(2, 4),))


plain = _traced()
HELD = (
    "float64", "bfloat16", "float8_e4m3fn", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "uint16",
)
for _name in HELD:
    globals()[f"held_{_name}"] = _traced(dtype(_name))
    globals()[f"alone_{_name}"] = _traced(dtype(_name), True)

if __name__ == "__main__":
    if sys.argv[1] == "--traces":
        write_traces(*sys.argv[2:])
    else:
        torch.multiprocessing.start_processes(rank, (sys.argv[1], sys.argv[2:]), 2, start_method="fork")

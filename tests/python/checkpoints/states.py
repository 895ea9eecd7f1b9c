# SPDX-License-Identifier: Apache-2.0
"""Random training states, files of them in every format, and their comparison: with torch, torch.distributed.checkpoint
and safetensors alone."""

import collections
import pathlib
import random
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex64,
)


def tensor(r: random.Random, shape: list[int] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    dims = r.choice((0, 1, 1, 2, 2, 3))
    shape = [r.choice((0, 1, 2, 3, 5, 8, 13)) for _ in range(dims)] if shape is None else shape
    dtype = dtype or r.choice(DTYPES)
    count = 1
    for extent in shape:
        count *= extent
    numbers = torch.tensor(
        [r.randrange(2) if dtype == torch.bool else r.randrange(100) for _ in range(count)], dtype=torch.float32
    ).reshape(shape)
    return numbers.to(dtype)


def value(r: random.Random, depth: int = 0) -> object:
    kinds = ["int", "float", "string", "none", "bool", "tuple", "big", "size", "dtype", "bytes", "set", "list"]
    kind = r.choice(kinds)
    return {
        "int": lambda: r.randrange(-(1 << 40), 1 << 40),
        "float": lambda: r.random() * 10 ** r.randrange(-9, 9),
        "string": lambda: r.choice(("", "a.b", "ключ", "x" * 300)),
        "none": lambda: None,
        "bool": lambda: r.random() < 0.5,
        "tuple": lambda: (0.9, 0.999, ("nested", 1)),
        "big": lambda: -(1 << r.randrange(64, 200)),
        "size": lambda: torch.Size([1, r.randrange(9)]),
        "dtype": lambda: r.choice(DTYPES),
        "bytes": lambda: bytes(range(256)),
        "set": lambda: {1, 2, r.randrange(9)},
        "list": lambda: [1, "two", [3.0]],
    }[kind]()


def state(seed: int) -> dict:
    """A model's parameters (a tie, a view, a buffer among them), Adam's state of them by name, options and other
    values."""
    r = random.Random(seed)
    names = [
        f"{module}.{leaf}"
        for module in ("embed", "layers.0.attn", "layers.0.mlp", "layers.1.attn", "head")
        for leaf in ("weight", "bias")
        if r.random() < 0.7
    ]
    model = collections.OrderedDict((name, tensor(r)) for name in names)
    model["view"] = torch.arange(24).reshape(4, 6)[1:3].t()
    model["tied"] = model["view"]
    optimizer = {
        name: {
            "step": torch.tensor(float(seed)), "exp_avg": tensor(r, list(model[name].shape), torch.float32),
            "exp_avg_sq": tensor(r, list(model[name].shape), torch.float32),
        }
        for name in names
        if r.random() < 0.8
    }
    groups = [{"params": names, "lr": 0.1, "betas": (0.9, 0.99), "capturable": False}]
    return {
        "model": model,
        "optimizer": {"state": optimizer, "param_groups": groups},
        "epoch": seed,
        "lists": [tensor(r), {"in": tensor(r)}, 3],
        "values": {f"v{i}": value(r) for i in range(4)},
    }


def tensors_of(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """By the keys joined with dots."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {
        found: tensor
        for key, of in pairs
        for found, tensor in tensors_of(of, f"{name}.{key}" if name else str(key)).items()
    }


def equal(a: object, b: object) -> bool:
    """Values, dtypes and shapes; a dict's kind does not count."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(map(str, a)) == list(map(str, b))
            and all(equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))
        )
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def save_distributed(state: dict, folder: pathlib.Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def load_distributed(folder: pathlib.Path, scratch: pathlib.Path) -> dict:
    """Everything, by torch's own converter."""
    dcp_to_torch_save(folder, scratch)
    return torch.load(scratch, weights_only=False)

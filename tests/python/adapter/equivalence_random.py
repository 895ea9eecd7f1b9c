# SPDX-License-Identifier: Apache-2.0
"""Random small models and settings: `python tests/python/adapter/equivalence_random.py --cases 300 [--seed N]` runs
many and says how many agree; the test suite runs some. A case is made of its number alone.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import tempfile

from equivalence import Case, compare, compare_on_ranks, verdict
from equivalence_models import ROOT
from equivalence_settings import BOTH, END, HSDP, TIES_ARE_REFUSED, TWO, micro, setter

DTYPES = [
    None,
    None,
    {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    {"param_dtype": "bfloat16"},
    {"reduce_dtype": "float64"},
]


def random_arguments(draw: random.Random, ties: bool, freezable) -> dict:
    """Arguments of the model. ties: there may be tied parameters. `freezable(layers)`: names of what may be frozen."""
    layers = draw.randint(1, 4)
    arguments: dict = {"layers": layers, "width": draw.randint(3, 12), "hidden": draw.randint(2, 15)}
    arguments["bias"] = draw.random() < 0.7
    arguments["outputs"] = draw.choice(["tensor", "tuple", "dict"])
    arguments["bare_root"] = draw.random() < 0.3
    if draw.random() < 0.25:
        arguments[draw.choice(["used_twice", "in_a_row"])] = draw.randrange(layers)
    if layers > 1 and draw.random() < 0.2:
        arguments["unused"] = [draw.choice([i for i in range(layers) if i != arguments.get("used_twice")])]
    if ties and layers > 1 and draw.random() < 0.2:
        arguments["tied"] = True
    if draw.random() < 0.3:
        frozen = freezable(layers)
        # The head trains: something has to.
        arguments["frozen"] = draw.sample(frozen, min(len(frozen), draw.randint(1, 3)))
    return arguments


def layer_parts(layers: int) -> list[str]:
    return [f"layers.{i}.{part}" for i in range(layers) for part in ("norm", "up", "down.weight")]


def _freezable(layers: int) -> list[str]:
    return ["stem", "head.bias", "scale", *(f"layers.{i}" for i in range(layers)), *layer_parts(layers)]


def _units(draw: random.Random, shape: str, layers: int) -> list[dict]:
    """Calls of fully_shard, inner ones first."""
    units: list[dict] = []
    if shape == "nested":
        units.append({"modules": [draw.choice(["layers.*.up", "layers.*.norm"])]})
    if shape in ("layers", "nested"):
        units.append({"modules": ["layers.*"]})
    elif shape == "group":
        split = draw.randint(1, layers)
        for first, last in ((0, split), (split, layers)):
            if names := [f"layers.{i}" for i in range(first, last)]:
                units.append({"modules": names, "group": len(names) > 1})
    elif shape == "some":
        units += [{"modules": [f"layers.{i}"]} for i in range(layers) if draw.random() < 0.6]
    if draw.random() < 0.3:
        units.append({"modules": ["head"]})
    if draw.random() < 0.2:
        units.append({"modules": ["stem"]})
    for unit in units:
        if draw.random() < 0.2:
            unit["reshard_after_forward"] = draw.random() < 0.5
    units.append({"modules": [""]})
    return units


def _flattened(draw: random.Random, units: list[dict]) -> dict:
    """Fields of a strategy for four ranks about a mesh of two dimensions that FSDP's are flattened from."""
    if draw.random() < 0.3:
        for unit in units:
            unit.pop("reshard_after_forward", None)  # replicate() does not take it
        return {"mesh": TWO, "data_parallel": {"replicate": ["outer", "inner"]}}
    for unit in units[:-1]:
        if draw.random() < 0.3:
            unit["data_parallel"] = {"shard": [draw.choice(["outer", "inner"])]}
    return {"mesh": TWO, "data_parallel": BOTH}


def _program(draw: random.Random, hsdp: bool) -> list | None:
    """Accumulation over some micro-batches, with or without communication."""
    if draw.random() < 0.55:
        return None
    count = draw.randint(2, 3)
    methods = ["", "set_requires_gradient_sync"] + (["set_requires_all_reduce"] if hsdp else [])
    method = draw.choice(methods)
    calls: list[dict] = [setter(method, False)] if method else []
    if method and draw.random() < 0.3:
        calls.append(setter("set_reshard_after_backward", False))
    for number in range(count - 1):
        calls += micro(number)
    if method:
        calls += [setter(method, True), setter("set_reshard_after_backward", True)]
    return [[*calls, *micro(count - 1), *END]]


def make_case(seed: int) -> Case:
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 3, 4])
    shape = draw.choice(["layers", "layers", "nested", "group", "some", "root"])
    arguments = random_arguments(draw, True, _freezable)
    if TIES_ARE_REFUSED and shape != "root":
        arguments.pop("tied", None)
    strategy: dict = {"units": _units(draw, shape, arguments["layers"])}
    hsdp = ranks == 4 and draw.random() < 0.6
    if hsdp:
        strategy["mesh"] = HSDP
    elif ranks == 4:
        strategy |= _flattened(draw, strategy["units"]) if draw.random() < 0.6 else {}
    reshard = draw.choice([None, None, True, False, 2 if ranks == 4 and not hsdp else None])
    if reshard is not None and "shard" in strategy.get("data_parallel", BOTH):
        strategy["reshard_after_forward"] = reshard
    if (dtypes := draw.choice(DTYPES)) is not None:
        strategy["mixed_precision"] = dict(dtypes)
        if len(strategy["units"]) == 1 and draw.random() < 0.5:  # inner units would hand float32 to bfloat16 ones
            strategy["mixed_precision"]["output_dtype"] = "float32"
    knobs: dict = {}
    if draw.random() < 0.3:
        knobs["forward_prefetch"] = draw.randint(1, 2)
    if draw.random() < 0.3:
        knobs["backward_prefetch"] = draw.randint(1, 2)
    if draw.random() < 0.15:
        knobs["unshard_async_op"] = True
    if draw.random() < 0.2:
        knobs["force_sum_reduction"] = True
        if draw.random() < 0.5:
            knobs["gradient_divide_factor"] = draw.choice([1.0, 3.0, 7.5])
    if knobs:
        strategy["fsdp2"] = knobs
    if draw.random() < 0.1:
        strategy |= {"cpu_offload": True, "pin_memory": False}
    if (program := _program(draw, hsdp)) is not None:
        strategy["program"] = program
    if "unused" in arguments and "set_requires_gradient_sync" in str(program):
        # PyTorch fails: a unit that has never run has no gradients to keep in another dtype.
        strategy.get("mixed_precision", {}).pop("reduce_dtype", None)
    checkpoint = ()
    if draw.random() < 0.2:
        checkpoint = ("layers.*",)
        strategy["checkpoint"] = {"modules": ["layers.*"]}
    one_mesh = not any("data_parallel" in unit for unit in strategy["units"])  # else PyTorch has no norm of all
    clip = 0.05 if draw.random() < 0.2 and not strategy.get("cpu_offload") and one_mesh else None
    optimizer = draw.choice(["adamw", "sgd"])
    return Case(
        f"random{seed}", "mlp", arguments, strategy, ranks, checkpoint=checkpoint, optimizer=optimizer, clip=clip,
        steps=3,
    )


def run(cases: list[Case], folder: pathlib.Path, build_folder: pathlib.Path, compare=compare) -> dict[str, str]:
    """Case name -> what is wrong with it; "" when ours equals theirs on every rank."""
    from equivalence_plans import make_plans

    plans = make_plans(cases, folder / "plans", build_folder)
    verdicts = {}
    for ranks in sorted({case.ranks for case in cases}):
        group = [case for case in cases if case.ranks == ranks]
        results = compare_on_ranks(group, folder / f"ranks{ranks}", plans, compare)
        verdicts |= {case.name: verdict(case, results) for case in group}
    return verdicts


def main_of(make_case, compare, description: str) -> int:
    """The command line of random cases: exit code 1 when some differ."""
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    from conftest import build_folder

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--batch", type=int, default=50, help="cases per set of processes")
    arguments = parser.parse_args()
    agreeing, differing = 0, []
    for first in range(arguments.seed, arguments.seed + arguments.cases, arguments.batch):
        last = min(first + arguments.batch, arguments.seed + arguments.cases)
        with tempfile.TemporaryDirectory() as folder:
            verdicts = run(
                [make_case(seed) for seed in range(first, last)], pathlib.Path(folder), build_folder(), compare
            )
        for name, verdict in verdicts.items():
            agreeing += verdict == ""
            if verdict:
                differing.append(name)
                print(f"{name}: {verdict}", flush=True)
        print(f"{agreeing} of {last - arguments.seed} cases agree bit for bit", flush=True)
    print(f"cases {arguments.cases}, failures {len(differing)}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main_of(make_case, compare, __doc__))

# SPDX-License-Identifier: Apache-2.0
"""sp.Muon on ranks: cases next to torch.optim.Muon in one process, bit for bit. `muon_ranks.py --seed S --cases N`
draws cases; with --without-waits their plans have none, and they differ."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import sys
import tempfile

import torch
from muon_models import difference, in_one_process, make_mesh, set_gradients, sharded
from muon_plans import Shapes, document, written

STEPS = 3

LAYER = {"wide": (64, 192), "tall": (192, 64), "square": (64, 64)}
UNEVEN = {"uneven": (37, 64), "five": (5, 128), "two": (2, 64), "one": (1, 192)}  # some ranks have no rows
EXPERTS = {"few": (3, 24, 64), "many": (10, 64, 64), "gate": (10, 64)}


def units(*layers: dict[str, tuple[int, ...]]) -> Shapes:
    """Layers named layer0 and so on."""
    return {
        f"layer{number}": {f"layer{number}.{name}": shape for name, shape in layer.items()}
        for number, layer in enumerate(layers)
    }


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    units: Shapes = dataclasses.field(default_factory=lambda: units(LAYER, UNEVEN, LAYER))
    replicas: int = 1
    dtype: torch.dtype = torch.float32
    written: dict = dataclasses.field(default_factory=dict)  # of muon_plans.document
    arguments: dict = dataclasses.field(default_factory=dict)
    missing: dict[int, frozenset[str]] = dataclasses.field(default_factory=dict)  # by step: no gradients
    waits: bool = True


CASES = (
    Case("default"),
    Case("bfloat16", dtype=torch.bfloat16),
    Case("exchanged_as_float32", (3,), written={"dtype": "float32"}),
    Case("two_units_each", (2, 4), written={"units_each": 2}),
    Case("one_exchange", (3,), written={"units_each": 3}),
    Case("experts", units=units(EXPERTS, {**LAYER, **EXPERTS})),
    Case("experts_bfloat16", (4,), units=units(EXPERTS), dtype=torch.bfloat16, written={"units_each": 2}),
    Case("replicas_as_owners", (4,), replicas=2),
    Case("replicas_apart", (4,), replicas=2, written={"over_replicas": False}),
    Case("replicas_alone", (2, 3), replicas=0),
    Case("replicas_of_experts", (4,), units=units(EXPERTS, UNEVEN), replicas=2, written={"units_each": 2}),
    Case("on_all", units=units(LAYER, UNEVEN, EXPERTS), written={"owned": False}),
    Case("on_all_bfloat16", (3,), dtype=torch.bfloat16, written={"owned": False, "units_each": 2}),
    Case("on_all_of_replicas", (4,), replicas=2, written={"owned": False}),
    Case("on_all_but_missing", (2,), written={"owned": False}, missing={1: frozenset(["layer0.wide", "layer1.two"])}),
    Case("no_decay_no_nesterov", (2,), arguments={"weight_decay": 0.0, "nesterov": False}),
    Case("strong_decay", (3,), arguments={"weight_decay": 0.5, "lr": 0.1, "momentum": 0.5}),
    Case("no_momentum", (2,), arguments={"momentum": 0.0}),
    Case("like_adamw", (2,), units=units(LAYER, EXPERTS), arguments={"adjust_lr_fn": "match_rms_adamw"}),
    Case("unclamped", (3,), units=units(LAYER, EXPERTS), arguments={"adjust_lr_fn": "spectral_unclamped"}),
    Case("other_iterations", (2,), arguments={"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3}),
    Case("rate_is_a_tensor", (2,), arguments={"lr": torch.tensor(0.02)}),
    Case("missing", (3, 4), missing={0: frozenset(["layer0.wide", "layer1.two"]), 2: frozenset(["layer1.uneven"])}),
    Case("never_there", (2,), missing={step: frozenset(["layer0.tall"]) for step in range(STEPS)}),
)


def compare(case: Case, ranks: int) -> str:
    """On a rank; "": equal bit for bit."""
    import shardplan.torch as sp

    replicas = case.replicas or ranks  # 0: all ranks are replicas
    shards = ranks // replicas
    mesh = make_mesh(replicas, shards)
    model = sharded(case.units, case.dtype, mesh)
    planned = document(case.units, shards, replicas, **case.written)
    if not case.waits:
        for trigger in planned["steps"][0]["triggers"]:
            trigger["instructions"] = [i for i in trigger.get("instructions", []) if i["kind"] != "wait"]
    optimizer = sp.Muon(model, plan=written(planned, ranks), **case.arguments)
    for step in range(STEPS):
        set_gradients(model, step, case.missing.get(step, frozenset()))
        optimizer.step()
    expected = in_one_process(case.units, case.dtype, STEPS, case.arguments, case.missing)
    return difference(optimizer, model, *expected)


def compare_all(cases: list[Case], ranks: int) -> dict[str, str]:
    return {case.name: compare(case, ranks) for case in cases}


def drawn(draw: random.Random, number: int) -> Case:
    ranks, replicas = draw.choice(((1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (2, 2)))
    layers = []
    for _ in range(draw.randint(1, 4)):
        layer: dict[str, tuple[int, ...]] = {}
        for index in range(draw.randint(1, 4)):
            # A multiple of 64: torch rounds the last elements of a tensor otherwise than those in a vector.
            rows, columns = draw.randint(1, 150), 64 * draw.randint(1, 3)
            layer[f"p{index}"] = (draw.randint(1, 9), rows, columns) if draw.random() < 0.3 else (rows, columns)
        layers.append(layer)
    names = [fqn for of_unit in units(*layers).values() for fqn in of_unit]
    arguments = {
        "lr": draw.choice((1e-3, 0.05)), "weight_decay": draw.choice((0.0, 0.1)), "momentum": draw.choice((0.0, 0.95)),
        "nesterov": draw.random() < 0.5, "ns_steps": draw.randint(1, 6),
        "adjust_lr_fn": draw.choice((None, "original", "match_rms_adamw", "spectral_unclamped")),
    }
    planned = {
        "over_replicas": draw.random() < 0.5, "units_each": draw.randint(1, 4), "owned": draw.random() < 0.7,
        "dtype": draw.choice(("bfloat16", "float32")),
    }
    missing = {step: frozenset(name for name in names if draw.random() < 0.1) for step in range(STEPS)}
    dtype = draw.choice((torch.float32, torch.bfloat16))
    return Case(f"drawn{number}", (ranks,), units(*layers), replicas, dtype, planned, arguments, missing)


def run_drawn(seed: int, count: int, waits: bool = True) -> list[str]:
    """Sentences on cases that differ."""
    from adapter_workers import run_on_ranks

    cases = [drawn(random.Random(f"{seed}.{number}"), number) for number in range(count)]
    cases = [dataclasses.replace(case, waits=waits) for case in cases]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.ranks[0] for case in cases}):
            own = [case for case in cases if case.ranks[0] == ranks]
            outcomes = run_on_ranks(ranks, pathlib.Path(folder, str(ranks)), compare_all, own, ranks)
            for rank, outcome in enumerate(outcomes):
                if outcome is None or outcome[0] != "returned":
                    wrong.append(f"seed {seed}, {ranks} ranks, rank {rank}: {outcome}")
                    continue
                wrong += [f"seed {seed}, {name}, rank {rank}: {said}" for name, said in outcome[1].items() if said]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--without-waits", action="store_true")
    arguments = parser.parse_args()
    wrong = run_drawn(arguments.seed, arguments.cases, not arguments.without_waits)
    print("\n".join(wrong) or f"seed {arguments.seed}: {arguments.cases} cases agree bit for bit")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Wall time of an optimizer step of Muon: sp.Muon by a plan's exchanges next to torch.optim.Muon, on the same FSDP2
parameters of a GPT of about 100 million parameters. On CPU ranks (Gloo), or with SHARDPLAN_TEST_DEVICE=cuda on GPUs.

    .venv/bin/python tests/benchmarks/bench_muon_step.py [--ranks 4] [--steps 5]

Both step in the same processes, in turn, with the same gradients; reported: medians over the steps of the slowest rank,
and their ratio (below 1: the plan is faster). Matrices of the blocks alone: the rest is AdamW's.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [
    str(HERE), str(ROOT / "tests" / "python" / "muon"), str(ROOT / "tests" / "python" / "adapter"),
    str(ROOT / "tools" / "python"), str(ROOT / "examples" / "train_gpt"),
]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402
from adapter_workers import DEVICE, run_on_ranks  # noqa: E402
from bench_adapter_gpt_step import big_gpt, finish, with_fsdp2  # noqa: E402
from muon_plans import document, written  # noqa: E402


def matrices(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """The matrices of each block, by FQN."""
    return {
        f"blocks.{number}": {
            f"blocks.{number}.{name}": parameter for name, parameter in block.named_parameters() if parameter.ndim == 2
        }
        for number, block in enumerate(model.blocks)
    }


def measure(steps: int) -> dict[str, list[float]]:
    import shardplan.torch as sp

    torch.manual_seed(7)
    model = with_fsdp2(big_gpt().to(DEVICE))
    units = matrices(model)
    own = [parameter for of_unit in units.values() for parameter in of_unit.values()]
    shapes = {unit: {fqn: tuple(p.shape) for fqn, p in of_unit.items()} for unit, of_unit in units.items()}
    ranks = dist.get_world_size()
    optimizers = {
        "plan": sp.Muon(model, plan=written(document(shapes, ranks), ranks), lr=1e-3),
        "torch": torch.optim.Muon(own, lr=1e-3),
    }
    for parameter in own:
        parameter.grad = torch.randn_like(parameter)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for step in range(steps + 1):
        for name in list(optimizers) if step % 2 else list(optimizers)[::-1]:
            finish()
            dist.barrier()
            start = time.perf_counter()
            optimizers[name].step()
            finish()
            if step > 0:  # the first one makes the states
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_on_ranks(arguments.ranks, pathlib.Path(folder), measure, arguments.steps, timeout_s=1200)
    for rank, outcome in enumerate(outcomes):
        if outcome is None or outcome[0] != "returned":
            sys.exit(f"rank {rank}: {outcome}")
    slowest = {
        name: [max(outcome[1][name][step] for outcome in outcomes) for step in range(arguments.steps)]
        for name in ("plan", "torch")
    }
    medians = {name: statistics.median(seconds) for name, seconds in slowest.items()}
    own = sum(p.numel() for of_unit in matrices(big_gpt()).values() for p in of_unit.values())
    print(f"Muon's step of {own / 1e6:.0f} million parameters, {arguments.ranks} ranks, {DEVICE}: seconds")
    for name, seconds in slowest.items():
        print(f"  {name:6} median {medians[name]:.2f}  fastest {min(seconds):.2f}")
    print(
        f"  ratio  median {medians['plan'] / medians['torch']:.3f}  fastest "
        f"{min(slowest['plan']) / min(slowest['torch']):.3f}"
    )


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Wall time of an optimizer step of Muon: sp.Muon by a plan's exchanges next to torch.optim.Muon, on the same FSDP2
parameters of a GPT of about 100 million parameters. On CPU ranks (Gloo), or with SHARDPLAN_TEST_DEVICE=cuda on GPUs.

    .venv/bin/python tests/benchmarks/bench_muon_step.py [--ranks 4] [--steps 5] [--blocks-each 12]

Both step in the same processes, in turn, with the same gradients. Reported are medians over the steps of the slowest
rank, seconds of CPU of all ranks, and their ratios (below 1: the plan is faster). Seconds of CPU say more on a machine
that others use. Muon steps the matrices of the blocks, `--blocks-each` of them in an exchange: the rest is AdamW's.
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
    """Matrices of each block, by FQN."""
    return {
        f"blocks.{number}": {
            f"blocks.{number}.{name}": parameter for name, parameter in block.named_parameters() if parameter.ndim == 2
        }
        for number, block in enumerate(model.blocks)
    }


def measure(steps: int, blocks_each: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each step."""
    import shardplan.torch as sp

    torch.manual_seed(7)
    model = with_fsdp2(big_gpt().to(DEVICE))
    units = matrices(model)
    own = [parameter for of_unit in units.values() for parameter in of_unit.values()]
    shapes = {unit: {fqn: tuple(p.shape) for fqn, p in of_unit.items()} for unit, of_unit in units.items()}
    ranks = dist.get_world_size()
    plan = written(document(shapes, ranks, units_each=blocks_each), ranks)
    optimizers = {"plan": sp.Muon(model, plan=plan, lr=1e-3), "torch": torch.optim.Muon(own, lr=1e-3)}
    for parameter in own:
        parameter.grad = torch.randn_like(parameter)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in optimizers}
    for step in range(steps + 1):
        for name in list(optimizers) if step % 2 else list(optimizers)[::-1]:
            finish()
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            optimizers[name].step()
            finish()
            if step > 0:  # the first one makes the states
                times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks-each", type=int, default=12)
    arguments = parser.parse_args()
    settings = (arguments.steps, arguments.blocks_each)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_on_ranks(arguments.ranks, pathlib.Path(folder), measure, *settings, timeout_s=1200)
    for rank, outcome in enumerate(outcomes):
        if outcome is None or outcome[0] != "returned":
            sys.exit(f"rank {rank}: {outcome}")
    seconds = {
        name: {
            "wall": [max(outcome[1][name][step][0] for outcome in outcomes) for step in range(arguments.steps)],
            "CPU": [sum(outcome[1][name][step][1] for outcome in outcomes) for step in range(arguments.steps)],
        }
        for name in ("plan", "torch")
    }
    own = sum(p.numel() for of_unit in matrices(big_gpt()).values() for p in of_unit.values())
    print(f"Muon's step of {own / 1e6:.0f} million parameters, {arguments.ranks} ranks, {DEVICE}: seconds")
    for kind in ("wall", "CPU"):
        ours, theirs = ([f(seconds[name][kind]) for f in (statistics.median, min)] for name in ("plan", "torch"))
        for what, one, other in zip(("median", "fastest"), ours, theirs):
            print(f"  {kind:4} {what:7} plan {one:7.2f}  torch {other:7.2f}  ratio {one / other:.3f}")


if __name__ == "__main__":
    main()

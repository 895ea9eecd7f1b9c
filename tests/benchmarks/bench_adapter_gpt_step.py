# SPDX-License-Identifier: Apache-2.0
"""Wall time of a training step of a GPT of about 100 million parameters: by a plan, next to real FSDP2. On CPU ranks
(Gloo), or with SHARDPLAN_TEST_DEVICE=cuda on GPUs (NCCL).

    .venv/bin/python tests/benchmarks/bench_adapter_gpt_step.py
        [--ranks 2] [--steps 8] [--memory arena] [--compile inductor]

Both train in the same processes, their steps taking turns; reported: medians over the steps of the slowest rank, and
their ratio (below 1: the plan is faster). Losses of both must be equal bit for bit. --compile: each block is compiled
by itself, with fullgraph.
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
    str(HERE), str(ROOT / "tests" / "python" / "adapter"), str(ROOT / "tools" / "python"),
    str(ROOT / "examples" / "train_gpt"),
]

import make_plan  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402
from adapter_workers import DEVICE, run_on_ranks  # noqa: E402
from model import Gpt, GptConfig, loss_fn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

CONFIG = GptConfig(vocabulary=16_384, context=64, layers=12, heads=12, width=768)
BATCH, SEQUENCE = 1, 64


def big_gpt() -> nn.Module:
    """For `shardplan trace bench_adapter_gpt_step:big_gpt`."""
    return Gpt(CONFIG)


def with_fsdp2(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> tuple[float, float]:
    """(seconds, loss), from a barrier on."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocabulary, (BATCH, SEQUENCE + 1), generator=generator).to(DEVICE)
    finish()
    dist.barrier()
    start = time.perf_counter()
    loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    finish()
    return time.perf_counter() - start, loss.item()


def measure(plan: str, steps: int, memory: str, backend: str | None) -> dict[str, list[float]]:
    import shardplan.torch as sp

    models = {}
    for name, wrap in (("plan", lambda model: sp.apply(model, plan, memory=memory)), ("FSDP2", with_fsdp2)):
        torch.manual_seed(7)
        model = big_gpt().to(DEVICE)
        for block in model.blocks if backend else ():
            block.compile(backend=backend, fullgraph=True)
        models[name] = wrap(model)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for step in range(steps + 2):
        order = list(models) if step % 2 else list(models)[::-1]
        losses = {}
        for name in order:
            seconds, losses[name] = one_step(models[name], optimizers[name], 10 * step + dist.get_rank())
            if step >= 2:  # the first ones allocate and compile
                times[name].append(seconds)
        assert losses["plan"] == losses["FSDP2"], losses
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--memory", default="allocator", choices=("allocator", "arena"))
    parser.add_argument("--compile", metavar="BACKEND", help="of torch.compile")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        trace = make_plan.make_trace(folder, "bench_adapter_gpt_step:big_gpt", HERE, BATCH, SEQUENCE)
        plan = make_plan.make_plan(folder, trace, arguments.ranks, "plan", "--unit", "blocks.*", "--optimizer", "sgd")
        settings = (str(plan), arguments.steps, arguments.memory, arguments.compile)
        outcomes = run_on_ranks(arguments.ranks, folder / "ranks", measure, *settings, timeout_s=600)
    for rank, outcome in enumerate(outcomes):
        if outcome is None or outcome[0] != "returned":
            sys.exit(f"rank {rank}: {outcome}")
    slowest = {
        name: [max(outcome[1][name][step] for outcome in outcomes) for step in range(arguments.steps)]
        for name in ("plan", "FSDP2")
    }
    medians = {name: statistics.median(seconds) for name, seconds in slowest.items()}
    compiled = f", blocks compiled by {arguments.compile}" if arguments.compile else ""
    parameters = sum(p.numel() for p in big_gpt().parameters())
    print(
        f"GPT of {parameters / 1e6:.0f} million parameters, {arguments.ranks} ranks, {DEVICE}{compiled}: seconds per "
        "step"
    )
    for name, seconds in slowest.items():
        print(f"  {name:6} median {medians[name]:.2f}  fastest {min(seconds):.2f}")
    print(
        f"  ratio  median {medians['plan'] / medians['FSDP2']:.3f}  fastest "
        f"{min(slowest['plan']) / min(slowest['FSDP2']):.3f}"
    )


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The cost of `shardplan.torch.profile` in a training step of a GPT of about 100 million parameters on CPU ranks
(Gloo), or with SHARDPLAN_TEST_DEVICE=cuda on GPUs.

    .venv/bin/python tests/benchmarks/bench_profile_cost.py [--ranks 2] [--steps 15] [--small]

Steps that are recorded alternate with steps that are not, as in every profile; reported: the difference of their
medians, by rank. Two plain steps in turn differ as much as is said beside it. --small: the GPT of examples/train_gpt,
whose steps are short.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [
    str(HERE), str(ROOT / "tests" / "python" / "adapter"), str(ROOT / "tools" / "python"),
    str(ROOT / "examples" / "train_gpt"),
]

import make_plan  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from adapter_workers import DEVICE, run_on_ranks  # noqa: E402
from bench_adapter_gpt_step import BATCH, SEQUENCE, big_gpt, one_step  # noqa: E402
from model import Gpt, GptConfig  # noqa: E402


def small_gpt() -> torch.nn.Module:
    """For `shardplan trace bench_profile_cost:small_gpt`."""
    return Gpt(GptConfig(vocabulary=16_384, context=64, layers=4, heads=4, width=128))


def measure(plan: str, steps: int, small: bool) -> tuple[list[int], list[int], int]:
    import shardplan.torch as sp

    torch.manual_seed(7)
    model = sp.apply((small_gpt if small else big_gpt)().to(DEVICE), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sp.profile(model, steps=steps, warmup=2, quiet=True) as profile:
        number = 0
        while not profile.done:
            one_step(model, optimizer, 10 * number + dist.get_rank())
            number += 1
    report = profile.report()
    return report["measured"]["steps_ns"], report["measured"]["unrecorded_steps_ns"], len(report["instructions"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        source = "bench_profile_cost:small_gpt" if arguments.small else "bench_adapter_gpt_step:big_gpt"
        trace = make_plan.make_trace(folder, source, HERE, BATCH, SEQUENCE)
        plan = make_plan.make_plan(folder, trace, arguments.ranks, "plan", "--unit", "blocks.*", "--optimizer", "sgd")
        outcomes = run_on_ranks(
            arguments.ranks, folder / "ranks", measure, str(plan), arguments.steps, arguments.small, timeout_s=600
        )
    for rank, outcome in enumerate(outcomes):
        if outcome is None or outcome[0] != "returned":
            sys.exit(f"rank {rank}: {outcome}")
        recorded, plain, instructions = outcome[1]
        between, cost = statistics.median(plain), statistics.median(recorded) - statistics.median(plain)
        noise = statistics.median(abs(a - b) for a, b in zip(plain, plain[1:]))
        print(
            f"rank {rank}: step {between / 1e6:.2f} ms, recording {cost / 1e6:+.3f} ms ({100 * cost / between:+.2f} "
            f"%), {instructions} instructions; "
            f"plain steps in turn differ by {noise / 1e6:.3f} ms"
        )


if __name__ == "__main__":
    main()

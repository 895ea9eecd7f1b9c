# SPDX-License-Identifier: Apache-2.0
"""Size of plans, and CPU time and peak memory of the commands that make and read them, as a table.

    PYTHONPATH=tools/python .venv/bin/python tests/benchmarks/plan_sizes.py [BUILD]

Llama-3.1-8B with 1, 4 and 64 micro-batches (fsdp2, fsdp1), and a model of 10,000 units. Traces are kept in
out/plan_sizes.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "out" / "plan_sizes"
LLAMA = [str(ROOT / "examples/models/llama-3.1-8b.json"), "--batch", "1", "--seq", "8192", "--dtype", "bfloat16"]


def deep():
    import torch  # here alone: the peak of a child is at least that of its parent
    from torch import nn

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(10_000))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return x

    return Deep(), torch.zeros(4, 64)


def measured(arguments: list) -> tuple[int, float]:
    """Peak MiB and CPU seconds of a process that has to succeed."""
    child = subprocess.Popen([str(a) for a in arguments], stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(child.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(map(str, arguments))}: exit code {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss // 1024, usage.ru_utime + usage.ru_stime


def trace(program: pathlib.Path, name: str, source: list[str]) -> pathlib.Path:
    file = FOLDER / f"{name}.trace.json"
    if not file.exists():
        path = f"{pathlib.Path(__file__).parent}:{ROOT / 'tools/python'}"
        subprocess.run(
            [program, "trace", *source, "-q", "-o", file], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}
        )
    return file


def row(program: pathlib.Path, name: str, file: pathlib.Path, flags: list[str]) -> str:
    plan = FOLDER / "plan.json"
    mixed = ["--param-dtype", "bfloat16", "--reduce-dtype", "float32"]
    cells = [measured([program, "plan", file, "--cluster", "h100_sxm_8", *mixed, *flags, "-q", "-o", plan])]
    cells += [measured([program, command, plan]) for command in ("validate", "simulate", "memory")]
    size = f"{plan.stat().st_size / 1e6:.1f}"
    return f"| {name} | {size} | " + " | ".join(f"{mib} MiB, {seconds:.2f} s" for mib, seconds in cells) + " |"


def main() -> None:
    program = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "build/dev") / "bin/shardplan"
    FOLDER.mkdir(parents=True, exist_ok=True)
    llama = trace(program, "llama-3.1-8b", LLAMA)
    units = ["--unit", "model.layers.*", "--checkpoint", "model.layers.*"]
    print("| plan | file MB | `plan` | `validate` | `simulate` | `memory` |\n|---|---|---|---|---|---|")
    for policy in ("fsdp2", "fsdp1"):
        for count in (1, 4, 64):
            flags = ["--policy", policy, *units, "--accumulate", str(count)]
            print(row(program, f"8B, {policy}, {count} micro-batches", llama, flags), flush=True)
    wide = trace(program, "deep", ["plan_sizes:deep"])
    print(row(program, "10,000 units, fsdp2", wide, ["--policy", "fsdp2", "--unit", "layers.*"]), flush=True)


if __name__ == "__main__":
    main()

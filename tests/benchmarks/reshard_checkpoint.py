# SPDX-License-Identifier: Apache-2.0
"""How long `shardplan reshard-checkpoint` takes over `cp` of the same bytes, and its largest memory.

    .venv/bin/python tests/benchmarks/reshard_checkpoint.py
        [--gibibytes 10] [--from 8] [--to 6] [--rounds 1] [--folder out]

Makes a checkpoint of torch.distributed.checkpoint on so many ranks, copies it with `cp -r`, and rewrites it for the
other number of ranks. Each is flushed (`sync -f`) within its time and reads the source from the disk, not from the page
cache. Prints seconds, their ratio and the peak of the resident set. All that is made is removed. The task's bounds are
1.3 and the budget. SHARDPLAN_BUILD names the build."""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUDGET_MIB = 256


def timed(command: list[str], folder: pathlib.Path) -> tuple[float, int]:
    """Seconds until the bytes are on the disk, and the largest resident set in MiB. The source is read from the
    disk."""
    subprocess.run(["sync", "-f", folder], check=True)
    for path in (folder / "source").iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    subprocess.run(["sync", "-f", folder], check=True)
    if status != 0:
        raise SystemExit(f"{command[0]} failed")
    return time.monotonic() - begin, usage.ru_maxrss // 1024


def make_source(program: str, folder: pathlib.Path, gibibytes: float, ranks: int) -> None:
    """A model with Adam's state, all float32, of random bytes; FSDP2's rows."""
    layers, columns = 16, 4096
    rows = int(gibibytes * (1 << 30) / 4 / 3 / layers / columns)
    size = rows * columns * 4
    kinds = ("model.layers.{}.w", "optimizer.state.layers.{}.w.exp_avg", "optimizer.state.layers.{}.w.exp_avg_sq")
    names = [kind.format(layer) for kind in kinds for layer in range(layers)]
    header = {
        name: {"dtype": "F32", "shape": [rows, columns], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    with open(folder / "whole.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        block = os.urandom(1 << 24)
        for _ in range(0, size * len(names), len(block)):
            file.write(block)
        file.truncate(8 + len(text) + size * len(names))
    command = [
        program, "reshard-checkpoint", folder / "whole.safetensors", folder / "source", "--format", "distributed",
        "--world-size", ranks, "-q",
    ]
    subprocess.run([*map(str, command)], check=True)
    (folder / "whole.safetensors").unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gibibytes", type=float, default=10)
    parser.add_argument("--from", dest="source", type=int, default=8)
    parser.add_argument("--to", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "out")
    options = parser.parse_args()
    program = str(pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build" / "release")) / "bin" / "shardplan")
    options.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = pathlib.Path(made)
        make_source(program, folder, options.gibibytes, options.source)
        for _ in range(options.rounds):
            copied, _ = timed(["cp", "-r", str(folder / "source"), str(folder / "copy")], folder)
            shutil.rmtree(folder / "copy")
            command = [
                program, "reshard-checkpoint", str(folder / "source"), str(folder / "target"), "--world-size",
                str(options.to),
            ]
            rewritten, peak = timed([*command, "--budget", f"{BUDGET_MIB}MiB", "-q"], folder)
            shutil.rmtree(folder / "target")
            print(
                f"{options.gibibytes} GiB, {options.source} -> {options.to} ranks: cp {copied:.1f} s, "
                f"reshard-checkpoint {rewritten:.1f} s, "
                f"ratio {rewritten / copied:.2f}; peak {peak} MiB (budget {BUDGET_MIB})",
                flush=True,
            )


if __name__ == "__main__":
    main()

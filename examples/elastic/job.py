# SPDX-License-Identifier: Apache-2.0
"""One job that a dead rank and a SIGTERM interrupt, next to the same job undisturbed: are its losses the same?

    job.py OUTPUT_FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
STEPS, DIES_AT, WAITS_AT = 12, 5, 8
LIMIT_S = 200


def start(folder: pathlib.Path, *more: str) -> subprocess.Popen:
    """Two ranks under torchrun, which starts them again once."""
    folder.mkdir(parents=True, exist_ok=True)
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
        "--monitor-interval", "0.1",
    ]
    job = [
        "elastic.py", "--steps", str(STEPS), "--folder", str(folder), "--losses", str(folder / "losses.jsonl"), *more,
    ]
    # A store of each start's own: PyTorch 2.15's agent keeps one, whose old addresses Gloo finds when the ranks start
    # again.
    environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen([*torchrun, *job], cwd=HERE, env={**os.environ, **environment})


def steps_of(folder: pathlib.Path) -> list[dict]:
    losses = folder / "losses.jsonl"
    return [json.loads(line) for line in losses.read_text().splitlines()] if losses.exists() else []


def main() -> int:
    undisturbed, disturbed = (pathlib.Path(sys.argv[1]) / name for name in ("undisturbed", "disturbed"))
    codes = [start(undisturbed).wait(LIMIT_S)]
    first = start(disturbed, "--die-at", str(DIES_AT), "--wait-at", str(WAITS_AT))
    until = time.monotonic() + LIMIT_S
    while (
        first.poll() is None
        and time.monotonic() < until
        and not any(step["step"] == WAITS_AT - 1 for step in steps_of(disturbed))
    ):
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    first.wait(LIMIT_S)
    ended = steps_of(disturbed)[-1]["step"] + 1
    codes.append(start(disturbed).wait(LIMIT_S))
    expected = {step["step"]: step["loss"] for step in steps_of(undisturbed)}
    found = steps_of(disturbed)
    begins = list(dict.fromkeys(step["began_with"] for step in found))
    print(
        f"rank 1 died before step {DIES_AT}: torchrun started the ranks again, which began with step {begins[1]}'s "
        "checkpoint"
    )
    print(f"SIGTERM in step {WAITS_AT}: the job saved behind step {ended} and ended; it went on from step {begins[2]}")
    same = sorted({step["step"] for step in found}) == list(range(STEPS)) and all(
        step["loss"] == expected[step["step"]] for step in found
    )
    print(
        f"losses of {STEPS} steps: {'those' if same else 'NOT those'} of the job that nothing disturbed, digit for "
        "digit"
    )
    return 0 if same and codes == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())

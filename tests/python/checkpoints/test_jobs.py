"""Real FSDP1 and FSDP2 ranks on both sides."""

import pathlib
import subprocess
import sys

import pytest
import torch
from states import equal, tensors_of

JOB = pathlib.Path(__file__).with_name("jobs.py")


def job(ranks: int, *arguments) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), JOB, *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("source", "target", "layout"), [("fsdp2", "fsdp1", ("--layout", "flat", "--unit", "*")), ("fsdp1", "fsdp2", ())])
def test_a_job_loads_what_another_saved(source, target, layout, tmp_path, shardplan):
    job(2, "save", source, tmp_path / "saved", tmp_path / "before.pt")
    done = shardplan("reshard-checkpoint", tmp_path / "saved", tmp_path / "new", "--world-size", 3, *layout)
    assert done.returncode == 0, done.stderr
    job(3, "load", target, tmp_path / "new", tmp_path / "after.pt")
    before, after = (tensors_of(torch.load(tmp_path / name, weights_only=False)) for name in ("before.pt", "after.pt"))
    assert before.keys() == after.keys() and len(before) > 20
    assert all(equal(before[name], after[name]) for name in before)

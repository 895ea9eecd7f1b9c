# SPDX-License-Identifier: Apache-2.0
"""Real FSDP1 and FSDP2 ranks on both sides."""

import pathlib

import warm
from states import equal, load_distributed, tensors_of

JOB = pathlib.Path(__file__).with_name("jobs.py")


def jobs(ranks: int, action: str, folder: pathlib.Path, *of_jobs: str) -> None:
    where = [str(folder / f"store_of_{action}"), action, str(folder), *of_jobs]
    processes = [warm.Program([JOB, rank, ranks, *where]) for rank in range(ranks)]
    said = [process.communicate(timeout=180)[1] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(said)[-3000:]


def test_jobs_load_what_jobs_of_the_other_kind_saved(tmp_path, shardplan):
    jobs(2, "save", tmp_path, "fsdp2=of_fsdp2", "fsdp1=of_fsdp1")
    for name, layout in (("of_fsdp2", ("--layout", "flat", "--unit", "*")), ("of_fsdp1", ())):
        done = shardplan("reshard-checkpoint", tmp_path / name, tmp_path / f"{name}_new", "--world-size", 3, *layout)
        assert done.returncode == 0, done.stderr
    jobs(3, "load", tmp_path, "fsdp1=of_fsdp2_new", "fsdp2=of_fsdp1_new")
    for name in ("of_fsdp2", "of_fsdp1"):
        before, after = (
            tensors_of(load_distributed(tmp_path / saved, tmp_path / "whole.pt"))
            for saved in (name, f"{name}_new_again")
        )
        assert before.keys() == after.keys() and len(before) > 20
        assert all(equal(before[tensor], after[tensor]) for tensor in before)

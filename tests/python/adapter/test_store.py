# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun starts again find the store of those before them: they have a part of it to themselves."""

import datetime
import multiprocessing
import os
import time

import pytest
import torch.distributed as dist

from shardplan.torch._job.store import job_store


def _rank(port: int, rank: int, ranks: int, delay_s: float, results) -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    time.sleep(delay_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    own = job_store(60.0)
    there = own.check([f"seen/{rank}"])
    own.set(f"seen/{rank}", "")
    # All of them are in one part, too.
    own.wait([f"seen/{other}" for other in range(ranks)], datetime.timedelta(seconds=60))
    results.put((rank, there))
    own.add("done", 1)
    while rank == 0 and own.add("done", 0) < ranks:
        time.sleep(0.02)  # rank 0 answers as long as it lives


@pytest.mark.parametrize("first", ["rank 0 first", "rank 0 last"])
def test_ranks_that_are_started_again_share_a_part_that_is_new(first):
    context = multiprocessing.get_context("fork")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _attempt in range(3):
        results = context.Queue()
        late = [rank == 0 if first == "rank 0 last" else rank != 0 for rank in range(3)]
        ranks = [
            context.Process(target=_rank, args=(server.port, rank, 3, 0.5 * late[rank], results)) for rank in range(3)
        ]
        for process in ranks:
            process.start()
        found = sorted(results.get(timeout=120) for _ in ranks)
        for process in ranks:
            process.join()
        assert found == [(0, False), (1, False), (2, False)]

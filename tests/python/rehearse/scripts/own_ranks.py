# SPDX-License-Identifier: Apache-2.0
"""Starts its ranks as processes of its own."""

import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def rank_main(rank: int) -> None:
    dist.init_process_group("nccl", rank=rank, world_size=2, init_method="tcp://127.0.0.1:29511")


if __name__ == "__main__":
    ranks = [multiprocessing.get_context("spawn").Process(target=rank_main, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()

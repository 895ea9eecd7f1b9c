# SPDX-License-Identifier: Apache-2.0
"""safetensors that torch.distributed.checkpoint writes in shards: real ranks save, `reshard-checkpoint` assembles."""

import json
import os
import shutil
import struct
import sys

import pytest
import torch
from conftest import free_port


def states():
    torch.manual_seed(3)
    return {
        "rows": torch.randn(7, 5), "columns": torch.randn(4, 6).bfloat16(), "whole": torch.randn(3),
        "flat": torch.randn(11),
    }


def _save(rank, ranks, folder, port):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    dims = {"rows": 0, "columns": 1, "flat": 0}
    state = {
        name: distribute_tensor(t, mesh, [Shard(dims[name])]) if name in dims else t for name, t in states().items()
    }
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    dist.destroy_process_group()


def save(ranks, folder):
    torch.multiprocessing.spawn(_save, (ranks, str(folder), free_port()), nprocs=ranks)


def test_shards_are_assembled_and_one_alone_is_refused(tmp_path, shardplan):
    save(3, tmp_path / "a")
    done = shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / "whole.pt")
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "whole.pt")
    assert set(found) == set(states()) and all(torch.equal(found[name], tensor) for name, tensor in states().items())
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    (tmp_path / "one").mkdir()
    shutil.copy(files[0], tmp_path / "one")
    for alone in (files[0], tmp_path / "one"):
        done = shardplan("reshard-checkpoint", alone, tmp_path / "b.pt")
        assert done.returncode == 3 and "DCP_SHARDING_INFO" in done.stderr, done.stderr
    files[1].unlink()  # the one in the middle
    done = shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / "b.pt")
    assert done.returncode == 3 and "not the whole tensor" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "info", ["{", "[]", '{"rows": 1}', '{"rows": {"saved_offsets": [0]}}', '{"rows": {"saved_offsets": [-1, 0]}}', "{}"]
)
def test_places_that_are_none_are_refused(info, tmp_path, shardplan):
    (tmp_path / "a").mkdir()
    for number, low in ((1, 0), (2, 2)):
        header = {
            "__metadata__": {
                "DCP_SHARDING_INFO": json.dumps({"rows": {"saved_offsets": [low, 0]}}) if number == 1 else info
            }
        }
        header["rows"] = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
        text = json.dumps(header).encode()
        (tmp_path / "a" / f"shard-{number}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    done = shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / "b.pt")
    assert done.returncode == 3 and done.stderr, done.stderr


if __name__ == "__main__":
    save(int(sys.argv[1]), sys.argv[2])

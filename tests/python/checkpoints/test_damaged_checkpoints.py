# SPDX-License-Identifier: Apache-2.0
"""Files that are damaged, or want to run code: errors with file and place, exit code 3."""

import os
import pathlib
import pickle
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import save_file
from states import save_distributed, state


class Runs:
    """Unpickled, it makes a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def refused(result, path: pathlib.Path, *said: str) -> None:
    assert result.returncode == 3, (result.returncode, result.stderr)
    assert str(path) in result.stderr and all(word in result.stderr for word in said), result.stderr


def test_nothing_of_a_pickle_is_run(tmp_path, shardplan):
    ran = tmp_path / "ran"
    torch.save({"w": torch.ones(2), "x": Runs(ran)}, tmp_path / "a.pt")
    refused(
        shardplan("reshard-checkpoint", tmp_path / "a.pt", tmp_path / "b"), tmp_path / "a.pt", "posix.system", "byte "
    )
    save_distributed({"w": torch.ones(2)}, tmp_path / "d")
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    metadata.planner_data = Runs(ran)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(
        shardplan("reshard-checkpoint", tmp_path / "d", tmp_path / "b"),
        tmp_path / "d" / ".metadata",
        "posix.system",
        "byte ",
    )
    assert not ran.exists() and not (tmp_path / "b").exists()


def test_files_outside_of_the_checkpoint_are_not_read(tmp_path, shardplan):
    save_distributed({"w": torch.ones(2)}, tmp_path / "d")
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    for path in ("../d/__0_0.distcp", str(tmp_path / "d" / "__0_0.distcp")):
        for info in metadata.storage_data.values():
            info.relative_path = path
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        refused(
            shardplan("reshard-checkpoint", tmp_path / "d", tmp_path / "b"), tmp_path / "d" / ".metadata", "outside"
        )


def test_metadata_that_says_other_things_than_the_files(tmp_path, shardplan):
    save_distributed({"w": torch.ones(6, 2)}, tmp_path / "d")
    whole = (tmp_path / "d" / ".metadata").read_bytes()

    def with_change(change, *said):
        metadata = pickle.loads(whole)
        change(metadata.state_dict_metadata["w"], metadata.storage_data)
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        refused(shardplan("reshard-checkpoint", tmp_path / "d", tmp_path / "b"), tmp_path / "d", *said)

    def other_size(entry, _):
        entry.size = torch.Size([7, 2])

    def other_chunk(entry, _):
        entry.chunks[0].sizes = torch.Size([5, 2])

    def outside(entry, _):
        entry.chunks[0].sizes = torch.Size([7, 2])

    def other_place(_, storage):
        next(iter(storage.values())).offset = 10_000_000

    def no_place(_, storage):
        storage.clear()

    def packed(_, storage):
        next(iter(storage.values())).transform_descriptors = ["zstd"]

    with_change(other_size, "not the whole tensor", "12", "14")
    with_change(other_chunk, "[6, 2]", "[5, 2]")
    with_change(outside, "outside of its tensor")
    with_change(other_place, "10000000")
    with_change(no_place, "storage_data")
    with_change(packed, "not supported")
    (tmp_path / "d" / "__0_0.distcp").unlink()
    (tmp_path / "d" / ".metadata").write_bytes(whole)
    refused(shardplan("reshard-checkpoint", tmp_path / "d", tmp_path / "b"), tmp_path / "d" / "__0_0.distcp")


def test_headers_of_safetensors(tmp_path, shardplan):
    path = tmp_path / "a.safetensors"

    def with_header(header: bytes, data: bytes, *said):
        path.write_bytes(struct.pack("<Q", len(header)) + header + data)
        refused(shardplan("reshard-checkpoint", path, tmp_path / "b.safetensors"), path, *said)

    one = b'"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    with_header(b"{" + one + b"}", b"1234567", "behind the end")
    with_header(b"{" + one + b"," + one + b"}", b"12345678", "one name")
    with_header(b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', b"12345678", "12 bytes")
    with_header(b'{"w":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}', b"12345678", "F33", "/w/dtype")
    with_header(b'{"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', b"12345678", "/w/shape")
    with_header(
        b'{"w":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}}',
        b"12345678",
        "/w/data_offsets",
    )
    with_header(b"{" + one + b',"v":{"dtype":"U8","shape":[2],"data_offsets":[7,9]}}', b"123456789", "overlap", "byte ")
    with_header(b"{" + one, b"", "line 1")
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    refused(shardplan("reshard-checkpoint", path, tmp_path / "b.safetensors"), path, "header", "byte 0")
    path.write_bytes(b"1234")
    refused(shardplan("reshard-checkpoint", path, tmp_path / "b.safetensors"), path, "too short")


def test_what_is_no_checkpoint(tmp_path, shardplan):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello, this is text")
    torch.save({"w": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save([1, 2], tmp_path / "list.pt")
    for name, said in (
        ("empty", "no checkpoint"),
        ("text", "no checkpoint"),
        ("old.pt", "1.6"),
        ("list.pt", "dict"),
        ("missing", "open"),
    ):
        refused(shardplan("reshard-checkpoint", tmp_path / name, tmp_path / "b"), tmp_path / name, said)


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("SHARDPLAN_SEED", "1").split()])
def test_cut_and_changed_files(seed, tmp_path, shardplan):
    """A file that was cut is an error. One with a changed byte is an error with a place, or another value: never a
    fault of the command."""
    r = random.Random(seed)
    before = state(seed)
    torch.save(before, tmp_path / "a.pt")
    save_distributed(before, tmp_path / "d")
    save_file({"w": torch.ones(9), "v": torch.ones(3, 3)}, tmp_path / "a.safetensors")
    for source, file in (
        ("a.pt", "a.pt"),
        ("d", "d/.metadata"),
        ("d", "d/__0_0.distcp"),
        ("a.safetensors", "a.safetensors"),
    ):
        whole = (tmp_path / file).read_bytes()
        for at in sorted(r.sample(range(len(whole)), 6)):
            cut = r.random() < 0.5
            changed = bytearray(whole[:at] if cut else whole)
            if not cut:
                changed[at] ^= 1 << r.randrange(8)
            (tmp_path / file).write_bytes(changed)
            result = shardplan("reshard-checkpoint", tmp_path / source, tmp_path / "b.x", "--layout", "whole")
            if cut or result.returncode != 0:
                # Changed metadata may name bytes that another file does not have.
                refused(result, tmp_path / (file if cut else source))
            target = tmp_path / "b.x"
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        (tmp_path / file).write_bytes(whole)

# SPDX-License-Identifier: Apache-2.0
"""`shardplan reshard-checkpoint` between all formats and layouts, judged by torch, torch.distributed.checkpoint and
safetensors."""

import hashlib
import json
import os
import pathlib
import pickle
import random
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from states import equal, load_distributed, save_distributed, state, tensors_of

LAYOUTS = (
    ("--world-size", 1),
    ("--world-size", 3),
    ("--world-size", 5, "--layout", "flat"),
    ("--layout", "flat", "--unit", "layers.*", "--mesh", "shard=4"),
    ("--mesh", "replicate=2", "shard=3"),
    ("--mesh", "replicate=2", "shard=2", "--layout", "flat"),
    ("--layout", "whole", "--world-size", 2),
)


def done(result) -> None:
    assert result.returncode == 0, result.stderr


def digest(folder: pathlib.Path) -> str:
    found = hashlib.sha256()
    for path in sorted([folder] if folder.is_file() else folder.rglob("*")):
        found.update(str(path.stat().st_mtime_ns).encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("SHARDPLAN_SEED", "1 2 3 4 5").split()])
def test_every_format_and_back_gives_the_same_state(seed, tmp_path, shardplan):
    r = random.Random(seed)
    before = state(seed)
    torch.save(before, tmp_path / "a.pt")
    save_distributed(before, tmp_path / "a")
    wanted = load_distributed(tmp_path / "a", tmp_path / "wanted.pt")
    sources = digest(tmp_path / "a"), digest(tmp_path / "a.pt")
    for source in ("a.pt", "a"):
        layout = r.choice(LAYOUTS)
        budget = r.choice((4096, 1 << 20))
        command = (
            "reshard-checkpoint", tmp_path / source, tmp_path / "b", "--format", "distributed", *layout, "--budget",
            budget, "--verify",
        )
        done(shardplan(*command))
        found = load_distributed(tmp_path / "b", tmp_path / "found.pt")
        assert set(found) == set(wanted) and all(equal(found[key], wanted[key]) for key in wanted), (
            seed, source, layout,
        )
        done(shardplan("reshard-checkpoint", tmp_path / "b", tmp_path / "c", "--mesh", "shard=2"))
        done(shardplan("reshard-checkpoint", tmp_path / "c", tmp_path / "c.pt", "--format", "torch_save"))
        again = (
            torch.load(tmp_path / "c.pt", weights_only=True)
            if seed % 2 == 0
            else torch.load(tmp_path / "c.pt", weights_only=False)
        )
        assert all(equal(again[key], wanted[key]) for key in wanted), (seed, source, layout)
        assert zipfile.ZipFile(tmp_path / "c.pt").testzip() is None
        for path in (tmp_path / "b", tmp_path / "c"):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        (tmp_path / "c.pt").unlink()
    assert sources == (digest(tmp_path / "a"), digest(tmp_path / "a.pt"))
    assert not list(tmp_path.glob(".shardplan-*"))


def test_the_format_is_what_the_targets_name_says(tmp_path, shardplan):
    state = {"w": torch.arange(6.0).reshape(2, 3)}
    torch.save(state, tmp_path / "a.pt")
    done(shardplan("reshard-checkpoint", tmp_path / "a.pt", tmp_path / "b.safetensors"))
    assert load_file(tmp_path / "b.safetensors")["w"].equal(state["w"])
    done(shardplan("reshard-checkpoint", tmp_path / "b.safetensors", tmp_path / "c.pth"))
    assert torch.load(tmp_path / "c.pth")["w"].equal(state["w"])
    done(shardplan("reshard-checkpoint", tmp_path / "a.pt", tmp_path / "d.safetensors", "--format", "torch_save"))
    with open(tmp_path / "d.safetensors", "rb") as file:  # torch 2.15 goes by the name, too
        assert torch.load(file)["w"].equal(state["w"])


def test_torch_save_keeps_numbers_as_keys_and_ties(tmp_path, shardplan):
    weight = torch.randn(100, 100)
    torch.save({"state": {0: {"m": weight}, 7: {"m": weight}}, "groups": [{"params": [0, 7]}]}, tmp_path / "a.pt")
    done(shardplan("reshard-checkpoint", tmp_path / "a.pt", tmp_path / "b.pt"))
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert list(found["state"]) == [0, 7] and found["state"][7]["m"].equal(weight)
    assert (tmp_path / "b.pt").stat().st_size < 1.5 * weight.numel() * 4
    assert found["state"][0]["m"].untyped_storage().data_ptr() == found["state"][7]["m"].untyped_storage().data_ptr()


def test_torch_save_keeps_tuples_with_tensors_in_them(tmp_path, shardplan):
    a, b, c = torch.randn(2, 3), torch.arange(4), torch.tensor(1.0)
    torch.save({"pair": (a, b), "nested": [(c, {"in": (b,)}), (0.9, 0.99)], "empty": ()}, tmp_path / "a.pt")
    done(shardplan("reshard-checkpoint", tmp_path / "a.pt", tmp_path / "b.pt"))
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert (
        type(found["pair"]) is tuple
        and found["pair"][0].equal(a)
        and found["pair"][1].equal(b)
        and found["empty"] == ()
    )
    (of_c, of_b), betas = found["nested"]
    assert (
        type(found["nested"][0]) is tuple
        and of_c.equal(c)
        and type(of_b["in"]) is tuple
        and of_b["in"][0].equal(b)
        and betas == (0.9, 0.99)
    )
    done(
        shardplan("reshard-checkpoint", tmp_path / "a.pt", tmp_path / "a", "--format", "distributed", "--world-size", 2)
    )
    listed = load_distributed(tmp_path / "a", tmp_path / "found.pt")
    assert (
        listed["pair"][0].equal(a)
        and listed["pair"][1].equal(b)
        and listed["nested"][0][1]["in"][0].equal(b)
        and listed["nested"][1] == (0.9, 0.99)
    )


def test_tensors_begin_where_torch_wants_them(tmp_path, shardplan):
    torch.save({f"t{i}": torch.full((i + 1,), float(i)) for i in range(9)}, tmp_path / "a.pt")
    done(shardplan("reshard-checkpoint", tmp_path / "a.pt", tmp_path / "b.pt"))
    found = torch.load(tmp_path / "b.pt", mmap=True, weights_only=True)
    assert all(found[f"t{i}"].equal(torch.full((i + 1,), float(i))) for i in range(9))
    with zipfile.ZipFile(tmp_path / "b.pt") as archive, open(tmp_path / "b.pt", "rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
            assert (info.header_offset + 30 + name + extra) % 64 == 0


def test_safetensors_with_and_without_an_index(tmp_path, shardplan):
    weights = {f"layers.{i}.w": torch.randn(8, i + 1).to(torch.bfloat16) for i in range(7)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    done(shardplan("reshard-checkpoint", tmp_path / "model.safetensors", tmp_path / "hf", "--world-size", 3))
    assert sorted(path.name for path in (tmp_path / "hf").iterdir() if not path.name.startswith(".")) == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    parts = [load_file(tmp_path / "hf" / f"model-0000{i}-of-00003.safetensors") for i in (1, 2, 3)]
    together = {name: value for part in parts for name, value in part.items()}
    assert together.keys() == weights.keys() and all(equal(together[name], weights[name]) for name in weights)
    done(
        shardplan(
            "reshard-checkpoint", tmp_path / "hf", tmp_path / "dist", "--format", "distributed", "--world-size", 4
        )
    )
    into = {name: torch.zeros_like(value) for name, value in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, checkpoint_id=tmp_path / "dist", no_dist=True)
    assert all(equal(into[name], weights[name]) for name in weights)
    done(shardplan("reshard-checkpoint", tmp_path / "dist", tmp_path / "one.safetensors", "--format", "safetensors"))
    assert all(equal(value, weights[name]) for name, value in load_file(tmp_path / "one.safetensors").items())


def test_names_are_selected_and_stripped(tmp_path, shardplan):
    before = state(11)
    save_distributed(before, tmp_path / "a")
    refused = shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / "hf", "--format", "safetensors")
    assert refused.returncode == 3 and "--tensors-only" in refused.stderr and not (tmp_path / "hf").exists()
    done(
        shardplan(
            "reshard-checkpoint", tmp_path / "a", tmp_path / "m.safetensors", "--format", "safetensors", "--select",
            "model.", "--strip", "model.",
        )
    )
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == before["model"].keys() and all(equal(found[name], before["model"][name]) for name in found)


def test_each_rank_has_the_bytes_of_its_part(tmp_path, shardplan):
    """Rows, as torch.chunk cuts them; a flat parameter, cut into equal pieces; replicas written once."""
    before = {"model": {"layers.0.w": torch.randn(7, 5), "layers.0.b": torch.randn(5)}}
    save_distributed(before, tmp_path / "a")

    def chunks(*layout):
        done(shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / "b", *layout))
        metadata = pickle.loads((tmp_path / "b" / ".metadata").read_bytes())
        found = {}
        for index, info in metadata.storage_data.items():
            sizes = next(
                list(c.sizes) for c in metadata.state_dict_metadata[index.fqn].chunks if c.offsets == index.offset
            )
            found.setdefault(int(info.relative_path.split("_")[2]), []).append(
                (index.fqn[-1], list(index.offset), sizes)
            )
        for path in (tmp_path / "b").iterdir():
            path.unlink()
        (tmp_path / "b").rmdir()
        return found

    rows = {
        0: [("w", [0, 0], [3, 5]), ("b", [0], [2])], 1: [("w", [3, 0], [3, 5]), ("b", [2], [2])],
        2: [("w", [6, 0], [1, 5]), ("b", [4], [1])],
    }
    assert chunks("--world-size", 3) == rows
    # 35 elements, aligned to 36; 41 in all, padded to 42: 14 a rank.
    flat = {
        0: [("w", [0, 0], [2, 5]), ("w", [2, 0], [1, 4])],
        1: [("w", [2, 4], [1, 1]), ("w", [3, 0], [2, 5]), ("w", [5, 0], [1, 3])],
        2: [("w", [5, 3], [1, 2]), ("w", [6, 0], [1, 5]), ("b", [0], [5])],
    }
    assert chunks("--world-size", 3, "--layout", "flat", "--unit", "layers.*") == flat
    replicas = chunks("--mesh", "replicate=2", "shard=2")
    assert sorted(piece for of in replicas.values() for piece in of) == sorted(
        [("w", [0, 0], [4, 5]), ("w", [4, 0], [3, 5]), ("b", [0], [3]), ("b", [3], [2])]
    )


def test_the_layout_of_a_plan_is_a_target(tmp_path, shardplan, root):
    trace = root / "tests" / "conformance" / "live" / "checkpointed_twice.trace.json"
    done(
        shardplan(
            "plan", trace, "--policy", "fsdp1", "--unit", "body.parts.*", "--ranks", 4, "-q", "-o",
            tmp_path / "plan.json",
        )
    )
    done(shardplan("layout", tmp_path / "plan.json", "-o", tmp_path / "layout.json"))
    tensors = json.loads((tmp_path / "layout.json").read_text())["tensors"]
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    before = {}
    for of in tensors:
        name = f"optimizer.{of['name']}" if of["name"].startswith("state.") else f"model.{of['name']}"
        before[name] = torch.randn(of.get("shape", [])).to(dtypes[of["dtype"]])
    torch.save(before, tmp_path / "a.pt")
    for target in ("plan.json", "layout.json"):
        done(
            shardplan(
                "reshard-checkpoint", tmp_path / "a.pt", tmp_path / target[:4], "--format", "distributed",
                "--target-layout", tmp_path / target,
            )
        )
        found = load_distributed(tmp_path / target[:4], tmp_path / "found.pt")
        assert all(equal(found[name], before[name]) for name in before)
        assert len(list((tmp_path / target[:4]).glob("*.distcp"))) == 4
    before["model.other"] = torch.ones(3)
    torch.save(before, tmp_path / "more.pt")
    command = (
        "reshard-checkpoint", tmp_path / "more.pt", tmp_path / "more", "--format", "distributed", "--target-layout",
        tmp_path / "plan.json",
    )
    refused = shardplan(*command)
    assert refused.returncode == 3 and "model.other" in refused.stderr
    done(shardplan(*command, "--lenient"))


def test_places_that_are_refused(tmp_path, shardplan):
    save_distributed({"w": torch.ones(3)}, tmp_path / "a")
    (tmp_path / "there").mkdir()
    for target, code, said in (
        ("there", 2, "there already"),
        ("a", 2, "within"),
        ("a/inside", 2, "within"),
        ("no/such", 4, "not there"),
    ):
        refused = shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / target)
        assert refused.returncode == code and said in refused.stderr, refused.stderr
    for flags in (
        ("--mesh", "tp=2"),
        ("--mesh", "shard=2", "--world-size", 3),
        ("--format", "torch_save", "--layout", "flat"),
        ("--budget", "1"),
    ):
        refused = shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / "b", *flags)
        assert refused.returncode == 2 and not (tmp_path / "b").exists(), refused.stderr
    done(shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / "b"))
    assert "there already" in shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / "b").stdout
    target = next((tmp_path / "b").glob("*.distcp"))
    damaged = bytearray(target.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    target.write_bytes(damaged)
    assert shardplan("reshard-checkpoint", tmp_path / "a", tmp_path / "b", "--verify").returncode == 1

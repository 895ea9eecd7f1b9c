# SPDX-License-Identifier: Apache-2.0
"""Edges of PyTorch's FSDP2 and FSDP1 (edges.py). The installed release has each, and trains without a race as it is.
The proof finds a race if one is taken out; mutations.py takes out all of them."""

import concurrent.futures
import importlib.util
import os
import pathlib

import pytest
import torch
from conftest import build_folder
from edges import EDGES, KNOWN
from mutated import without
from proofs import of_settings

# An edge that is taken out, settings that go through it, and what races.
TAKEN_OUT = {
    "input_held": ("default", "freed while reduce_scatter may still read it"),
    "flat_gradient_reduce": ("default", "and nothing orders them"),
}
UNCHANGED = ("default", "pinned_offload", "reduces_twice_hsdp_bf16")


@pytest.fixture(scope="module")
def proofs():
    """By the edge that is taken out; "": as PyTorch is. Two at a time."""
    library = pathlib.Path(os.environ.get("SHARDPLAN_DEVICE_LIBRARY_FOLDER", build_folder() / "device"))
    if not (library / "libshardplan_device.so").exists():
        pytest.skip(f"no libshardplan_device.so in {library}: torch has no CUDA, or the build has sanitizers")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        started = {"": pool.submit(of_settings, "fsdp2", 4, UNCHANGED)}
        for name, (case, _says) in TAKEN_OUT.items():
            started[name] = pool.submit(of_settings, EDGES[name].kind, 4, (case,), (name,))
        return {name: future.result() for name, future in started.items()}


def needs_the_release_of_the_edges():
    if not torch.__version__.startswith("2.15."):
        pytest.skip(f"the edges are of PyTorch 2.15, and this is {torch.__version__}")


@pytest.mark.parametrize("module", sorted({edge.module for edge in EDGES.values()}))
def test_the_installed_release_has_every_edge(module):
    needs_the_release_of_the_edges()
    path = importlib.util.find_spec(module).origin
    source = pathlib.Path(path).read_text()
    for edge in EDGES.values():
        if edge.module == module:
            without(source, [edge], path)


def test_edges_that_order_the_same_are_edges():
    named = [name for edge in EDGES.values() for name in edge.beside] + [edge for edge, *_more in KNOWN.values()]
    assert set(named) <= set(EDGES)


def test_nothing_races_as_pytorch_is(proofs):
    proof = proofs[""]
    assert proof.verdict == "none" and proof.trained == len(UNCHANGED), proof.text[-4000:]
    assert "not looked at" not in proof.text


@pytest.mark.parametrize("name", TAKEN_OUT)
def test_without_an_edge_there_is_a_race(proofs, name):
    needs_the_release_of_the_edges()
    proof, (_case, says) = proofs[name], TAKEN_OUT[name]
    assert proof.code == 1 and proof.trained == 1, proof.text[-4000:]
    assert any(says in race for race in proof.races), proof.races

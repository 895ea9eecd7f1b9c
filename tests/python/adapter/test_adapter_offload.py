# SPDX-License-Identifier: Apache-2.0
"""Activations in host memory between forward and backward: what leaves, what comes back, and what autograd sees of
it."""

import adapter_offload
import pytest
import torch
import torch.nn as nn
from adapter_workers import run_on_ranks
from conftest import build_folder
from equivalence_plans import make_plans
from shardplan.torch._parameters.offload import Offloader


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload")
    plans = make_plans([adapter_offload.OFFLOADING], folder / "plans", build_folder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        return run_on_ranks(2, folder / "ranks", adapter_offload.run, plans["offloading"])


@pytest.mark.parametrize("name", [feature.__name__ for feature in adapter_offload.FEATURES])
def test_on_ranks(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        assert outcome[1][name] == "", f"rank {rank}"


# ---- the hooks alone ----
class Block(nn.Module):
    """Saves a tensor twice, a view of one, its input, a small one and its output."""

    def __init__(self, spoils: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))
        self.spoils = spoils

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x @ self.weight
        squared = inner * inner + inner.t().contiguous().t() * inner
        small = squared.sum(dim=1).exp()
        output = torch.sigmoid(squared * small[:1])
        if self.spoils:
            inner.mul_(2)
        return output


class Moved:
    """A plan's instructions by hand: all that the block hands over goes, and comes back."""

    def __init__(self, block: Block, min_bytes: int = 64, parts: list[int] | None = None) -> None:
        self.offloader = Offloader(torch.device("cpu"), min_bytes, {0: []})
        self.forward = self.offloader.wrapped(0, block, block.forward)
        self.parts = parts

    def out(self) -> None:
        made = [reference() for of_module in self.offloader.made[0].values() for reference in of_module]
        sizes = self.parts or [found.nbytes for found in made]
        self.host = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for part, copy in zip(self.offloader.take(0, self.host), self.host, strict=True):
            copy.copy_(part)
        self.offloader.drop(0, self.host)

    def back(self) -> None:
        self.offloader.give(0, [part.clone() for part in self.host])


def gradients(block: Block, forward, away=lambda: None, back=lambda: None) -> list[torch.Tensor]:
    x = torch.linspace(-2, 2, 64).reshape(8, 8).requires_grad_()
    output = forward(x)
    away()
    back()
    output.sum().backward()
    found = [x.grad, block.weight.grad]
    block.weight.grad = None
    return found


def test_gradients_are_those_without():
    block = Block()
    expected = gradients(block, block.forward)
    moved = Moved(block)
    found = gradients(block, moved.forward, moved.out, moved.back)
    assert all(map(torch.equal, found, expected))
    # `inner`, its other layout and `squared`: not the input, the parameter, the output and what is smaller.
    assert [part.numel() for part in moved.host] == [256, 256, 256]


def test_a_step_that_leaves_its_plan_copies_back_what_it_needs():
    block = Block()
    expected = gradients(block, block.forward)
    moved = Moved(block)
    assert all(map(torch.equal, gradients(block, moved.forward, moved.out), expected))


def test_nothing_goes_without_gradients():
    block = Block()
    moved = Moved(block)
    with torch.no_grad():
        moved.forward(torch.ones(8, 8))
    assert moved.offloader.made == {0: {}}


def test_a_tensor_that_changed_in_place_is_seen_where_it_goes():
    block = Block(spoils=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(block, block.forward)
    moved = Moved(block)
    with pytest.raises(RuntimeError, match=r"changed in place after autograd saved it.*version 0, now at version 1"):
        gradients(block, moved.forward, moved.out)
    with pytest.raises(RuntimeError, match="changed in place"):
        gradients(block, Moved(block).forward)


def test_other_tensors_than_the_plan_has_stay_and_are_told_once():
    block = Block()
    expected = gradients(block, block.forward)
    moved = Moved(block, parts=[256, 100])
    with pytest.warns(
        UserWarning,
        match=(
            r"moves 2 tensors to the host; its forward has not saved 1 of them \(100 bytes\), and 2 others \(512 "
            r"bytes\)"
        ),
    ):
        found = gradients(block, moved.forward, moved.out, moved.back)
    assert all(map(torch.equal, found, expected))

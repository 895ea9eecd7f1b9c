# SPDX-License-Identifier: Apache-2.0
"""Models of matrices alone, their gradients, and torch.optim.Muon of them in one process."""

from __future__ import annotations

import contextlib
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim._muon
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "adapter"))

from adapter_workers import DEVICE  # noqa: E402
from muon_plans import Shapes, matrices_of  # noqa: E402


class Matrices(nn.Module):
    """Units with the parameters that `units` names, and a vector each."""

    def __init__(self, units: Shapes, dtype: torch.dtype) -> None:
        super().__init__()
        for number, (unit, parameters) in enumerate(units.items()):
            made = nn.Module()
            for index, (fqn, shape) in enumerate(parameters.items()):
                values = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * number + index))
                made.register_parameter(fqn.removeprefix(f"{unit}."), nn.Parameter(values.to(dtype)))
            made.register_parameter("scale", nn.Parameter(torch.ones(8, dtype=dtype)))
            self.register_module(unit, made)


def make_mesh(replicas: int, shards: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(DEVICE, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(DEVICE, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(units: Shapes, dtype: torch.dtype, mesh: DeviceMesh) -> nn.Module:
    model = Matrices(units, dtype).to(DEVICE)
    for unit in units:
        fully_shard(model.get_submodule(unit), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradient(fqn: str, shape: tuple[int, ...], dtype: torch.dtype, step: int) -> torch.Tensor:
    """The whole one, the same on all ranks."""
    seed = step * 7919 + sum(map(ord, fqn)) * 31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def set_gradients(model: nn.Module, step: int, without: frozenset[str] = frozenset()) -> None:
    """Each rank's rows of the whole gradients."""
    for fqn, parameter in model.named_parameters():
        if fqn in without:
            parameter.grad = None
            continue
        mesh = parameter.device_mesh
        whole = gradient(fqn, tuple(parameter.shape), parameter.dtype, step)
        chunks = torch.chunk(whole, mesh.size(mesh.ndim - 1))
        place = mesh.get_local_rank(mesh.ndim - 1)
        own = chunks[place] if place < len(chunks) else whole[:0]
        parameter.grad = DTensor(own.contiguous().to(DEVICE), parameter._spec, requires_grad=False)


@contextlib.contextmanager
def updates_in_order(dtype: torch.dtype):
    """The update of a tall matrix is a transposed view, and the CPU's `add_` rounds twice where it reads bfloat16 so.
    Inside, torch.optim.Muon has all updates in the order of their elements, as they are behind an exchange."""
    original = torch.optim._muon._zeropower_via_newtonschulz
    if dtype is torch.bfloat16:
        torch.optim._muon._zeropower_via_newtonschulz = lambda *arguments: original(*arguments).contiguous()
    try:
        yield
    finally:
        torch.optim._muon._zeropower_via_newtonschulz = original


def in_one_process(
    units: Shapes, dtype: torch.dtype, steps: int, arguments: dict, missing: dict[int, frozenset[str]]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """torch.optim.Muon on whole matrices, each expert one -> parameters and momenta by FQN."""
    model = Matrices(units, dtype).to(DEVICE)
    shapes = {fqn: shape for of_unit in units.values() for fqn, shape in of_unit.items()}
    held: dict[str, list[nn.Parameter]] = {}
    for fqn, shape in shapes.items():
        rows = model.get_parameter(fqn).detach().view(-1, shape[-1])
        held[fqn] = [nn.Parameter(part.clone()) for part in rows.chunk(len(matrices_of(shape)))]
    optimizer = torch.optim.Muon([part for parts in held.values() for part in parts], **arguments)
    for step in range(steps):
        for fqn, shape in shapes.items():
            whole = gradient(fqn, shape, dtype, step).to(DEVICE).view(-1, shape[-1])
            for part, own in zip(held[fqn], whole.chunk(len(held[fqn]))):
                part.grad = None if fqn in missing.get(step, ()) else own.clone()
        with updates_in_order(dtype):
            optimizer.step()
    parameters = {fqn: torch.cat(list(parts)).detach().view(shapes[fqn]) for fqn, parts in held.items()}
    momenta = {
        fqn: torch.cat([optimizer.state[part]["momentum_buffer"] for part in parts]).view(shapes[fqn])
        for fqn, parts in held.items()
        if all(part in optimizer.state for part in parts)
    }
    return parameters, momenta


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def difference(optimizer: torch.optim.Optimizer, model: nn.Module, parameters: dict, momenta: dict) -> str:
    """The first difference of parameters or momenta. "": they are equal bit for bit."""
    for fqn, expected in parameters.items():
        parameter = model.get_parameter(fqn)
        if not torch.equal(found := whole(parameter), expected):
            return f"{fqn}: {(found.float() - expected.float()).abs().max()}, largest {expected.abs().max()}"
        state = optimizer.state.get(parameter, {})
        if ("momentum_buffer" in state) != (fqn in momenta):
            return f"{fqn}: momentum {list(state)}"
        if fqn in momenta and not torch.equal(whole(state["momentum_buffer"]), momenta[fqn]):
            return f"{fqn}: its momentum"
    return ""



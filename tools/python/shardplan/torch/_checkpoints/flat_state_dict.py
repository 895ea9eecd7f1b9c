# SPDX-License-Identifier: Apache-2.0
"""state_dict and load_state_dict of a model with flat units: under the model's own names, whole or as DTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .._job.arguments import StateDictKind, check_choice
from .._model.fit import trace_fqn
from .._parameters.flat import FlatUnit
from .._parameters.flat_whole import summoned
from .._parameters.shard import as_dtensor

_ATTRIBUTE = "_shardplan_state_dicts"


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def chunk(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Cut along dim 0 over the last dimension of the mesh, as torch.chunk cuts."""
    ranks, own = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    pieces = torch.chunk(whole, ranks)
    piece = pieces[own] if own < len(pieces) else whole[:0]
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    return as_dtensor(
        piece.clone(), DTensorSpec(mesh, placements, TensorMeta(whole.shape, whole.stride(), whole.dtype))
    )


class _StateDicts:
    """Hooks that make the units whole while a state dict is taken or loaded. The module on which the call was made
    opens and closes; its children find the units whole."""

    def __init__(self, units: list[FlatUnit], mesh: DeviceMesh) -> None:
        self.units, self.mesh, self.kind = units, mesh, "full"
        self.handles: list = []  # of all hooks
        self._stack: contextlib.ExitStack | None = None
        self._opener: nn.Module | None = None
        self._inside: list[FlatUnit] = []  # units of the opener
        self._wholes: list[torch.Tensor] = []  # of each

    def hook(self, module: nn.Module) -> None:
        self.handles += [
            module.register_state_dict_pre_hook(lambda module, prefix, keep_vars: self._open(module, writeback=False)),
            module.register_state_dict_post_hook(lambda *arguments: self._taken(*arguments)),
            module.register_load_state_dict_pre_hook(lambda *arguments: self._before_load(*arguments)),
            module.register_load_state_dict_post_hook(lambda module, keys: self._close(module)),
        ]

    def _open(self, module: nn.Module, writeback: bool) -> bool:
        if self._opener is module:
            self._close(module)  # an error ended the last call
        if self._opener is not None:
            return False
        inside = set(module.modules())
        self._inside = [flat for flat in self.units if flat.parameters and flat.module in inside]
        self._stack, self._opener = contextlib.ExitStack(), module
        self._wholes = self._stack.enter_context(summoned(self._inside, writeback))
        return True

    def _close(self, module: nn.Module) -> None:
        if self._opener is module:
            stack, self._stack, self._opener, self._wholes = self._stack, None, None, []
            stack.close()

    def _taken(self, module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
        if self._opener is not module:
            return
        ranks = {_storage(whole): flat.ranks for flat, whole in zip(self._inside, self._wholes)}
        for name, value in state_dict.items():
            if not isinstance(value, torch.Tensor) or _storage(value) not in ranks:
                continue
            sharded = self.kind == "sharded" and ranks[_storage(value)] > 1 and value.dim() > 0
            state_dict[name] = chunk(value.detach(), self.mesh) if sharded else value.detach().clone()
        self._close(module)

    def _before_load(self, module: nn.Module, state_dict: dict, prefix: str, *_args) -> None:
        if not self._open(module, writeback=True):
            return
        parameters = module.named_parameters(remove_duplicate=False)
        plain = {trace_fqn(prefix + name) for name, p in parameters if not isinstance(p, DTensor)}
        for name, value in state_dict.items():
            if isinstance(value, DTensor) and trace_fqn(name) in plain:
                state_dict[name] = value.full_tensor()


def hook_state_dicts(model: nn.Module, units: list[FlatUnit], mesh: DeviceMesh) -> None:
    state_dicts = _StateDicts(units, mesh)
    for module in {model: None, **{flat.module: None for flat in units}}:
        state_dicts.hook(module)
    for flat in units:
        flat.mesh = mesh
    object.__setattr__(model, _ATTRIBUTE, state_dicts)


def unhook_state_dicts(model: nn.Module) -> None:
    """The reverse of hook_state_dicts."""
    for handle in vars(model).pop(_ATTRIBUTE).handles:
        handle.remove()


def state_dict_kind(model: nn.Module) -> StateDictKind:
    """The kind that state_dict_type chose."""
    state_dicts = getattr(model, _ATTRIBUTE, None)
    return "full" if state_dicts is None else state_dicts.kind


@contextlib.contextmanager
def state_dict_type(model: nn.Module, kind: StateDictKind) -> Iterator[None]:
    """Inside, model.state_dict() of a model with a flat layout gives this kind. "full" (the default outside, and
    FSDP1's): whole tensors on every rank. "sharded": DTensors cut along dim 0. torch.distributed.checkpoint saves and
    loads these without any rank having the whole; a per_parameter plan and FSDP2 load them, too. load_state_dict takes
    both.
    """
    check_choice("the kind of a state dict", kind, StateDictKind)
    state_dicts = getattr(model, _ATTRIBUTE, None)
    if state_dicts is None:
        raise ValueError("shardplan: state_dict_type is for models whose plan has a flat layout")
    before, state_dicts.kind = state_dicts.kind, kind
    try:
        yield
    finally:
        state_dicts.kind = before

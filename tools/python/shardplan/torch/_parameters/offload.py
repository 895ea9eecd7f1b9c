# SPDX-License-Identifier: Apache-2.0
"""Activations in host memory between forward and backward, as the plan's strategy has it.

Tensors that autograd saves in a module's forward pass through hooks of `saved_tensors_hooks`. The plan's instructions
copy the storages to the host, let go of them, and bring them back: `take`, `drop` and `give` are called by the
replayer. A step that leaves its plan in between copies back what its backward asks for.
"""

from __future__ import annotations

import functools
import json
import warnings
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks

from shardplan import patterns

from .._model.forwards import replace

_CHANGED = (
    "shardplan: a tensor that the backward needs was changed in place after autograd saved it, and its activations "
    "are offloaded "
    "(saved at version {}, now at version {})"
)


class _Saved:
    """A tensor that autograd has saved."""

    __slots__ = ("__weakref__", "dtype", "offset", "shape", "storage", "stride", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, storage: _Storage) -> None:
        self.tensor, self.version, self.storage = tensor.detach(), tensor._version, storage
        self.dtype, self.shape, self.stride, self.offset = (
            tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(),
        )

    def check(self) -> None:
        if self.tensor is not None and self.tensor._version != self.version:
            raise RuntimeError(_CHANGED.format(self.version, self.tensor._version))


class _Storage:
    """Saved tensors of one storage: on the device, or on the host only."""

    __slots__ = ("__weakref__", "back", "host", "nbytes", "saved", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.nbytes = storage.nbytes()
        self.host: torch.Tensor | None = None
        self.back: torch.Tensor | None = None
        self.saved: list[weakref.ref] = []

    def living(self) -> Iterator[_Saved]:
        for reference in self.saved:
            if (saved := reference()) is not None:
                yield saved

    def bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def go(self, host: torch.Tensor) -> None:
        """The device's memory is let go of; `host` has the copy."""
        for saved in self.living():
            saved.check()
            saved.tensor = None
        self.storage, self.host = None, host


class Offloader:
    """The activations of an applied plan: what its runtime calls."""

    def __init__(self, device: torch.device, min_bytes: int, parts: dict[int, list[int]]) -> None:
        self.device, self.min_bytes = device, min_bytes
        # By unit and module of the latest forward.
        self.made: dict[int, dict[int, list[weakref.ref]]] = {unit: {} for unit in parts}
        self.taken: dict[int, list[weakref.ref | None]] = {}  # by unit, in the order of the plan's parts
        # The latest copies that came back: nobody waits for them, and they are still written.
        self.unclaimed: list[torch.Tensor] = []
        self.warned = False

    # ---- the runtime's ----
    def take(self, unit: int, host: list[torch.Tensor]) -> list[torch.Tensor]:
        """The storages that the plan copies to `host` next, as bytes. A storage that the forward has not saved is empty
        memory; one that the plan does not have stays."""
        left = [
            found
            for of_module in self.made[unit].values()
            for reference in of_module
            if (found := reference()) is not None
        ]
        self.made[unit] = {}
        chosen = []
        for part in host:
            match = next((found for found in left if found.nbytes == part.numel()), None)
            chosen.append(match)
            if match is not None:
                left.remove(match)
                for saved in match.living():
                    saved.check()
        if (left or None in chosen) and not self.warned:
            self._warn(unit, host, chosen, left)
        self.taken[unit] = [found and weakref.ref(found) for found in chosen]
        return [
            found.bytes() if found else torch.empty_like(part, device=self.device)
            for found, part in zip(chosen, host, strict=True)
        ]

    def _warn(self, unit: int, host: list[torch.Tensor], chosen: list[_Storage | None], left: list[_Storage]) -> None:
        self.warned = True
        missing = [part.numel() for found, part in zip(chosen, host, strict=True) if found is None]
        warnings.warn(
            f"shardplan: of unit {unit} the plan moves {len(host)} tensors to the host; its forward has not saved "
            f"{len(missing)} of them "
            f"({sum(missing)} bytes), and {len(left)} others ({sum(found.nbytes for found in left)} bytes), which "
            "stay on the device. Memory is "
            "not what the plan says: trace the model as it is trained, in its dtypes and with its attention, and plan "
            "it again",
            stacklevel=2,
        )

    def drop(self, unit: int, host: list[torch.Tensor]) -> None:
        for reference, part in zip(self.taken[unit], host, strict=True):
            if reference and (found := reference()) is not None:
                found.go(part)

    def give(self, unit: int, parts: list[torch.Tensor]) -> None:
        """The copies to `parts` are under way: the stream that computes has waited for them before the next unit's
        come, and not before."""
        self.unclaimed = []
        for reference, part in zip(self.taken.pop(unit), parts, strict=True):
            if reference and (found := reference()) is not None:
                found.back, found.host = part, None
            else:
                self.unclaimed.append(part)

    # ---- autograd's ----
    def pack(self, kept: set[int], collected: dict[int, _Storage], tensor: torch.Tensor) -> object:
        plain = (
            type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device.type == self.device.type
        )
        if not plain or (tensor.requires_grad and tensor.is_leaf):
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.min_bytes or storage._cdata in kept:
            return tensor
        of = collected.get(storage._cdata)
        if of is None or of.storage is None:
            of = collected[storage._cdata] = _Storage(storage)
        saved = _Saved(tensor, of)
        of.saved.append(weakref.ref(saved))
        return saved

    def unpack(self, packed: object) -> torch.Tensor:
        if not isinstance(packed, _Saved):
            return packed
        if packed.tensor is not None:
            packed.check()
            return packed.tensor
        of = packed.storage
        if of.back is None:  # a step that has left its plan
            of.back, of.host = of.host.to(self.device, copy=True), None
        empty = torch.empty(0, dtype=packed.dtype, device=self.device)
        return empty.set_(of.back.untyped_storage(), packed.offset, packed.shape, packed.stride)

    def wrapped(self, unit: int, module: nn.Module, forward: Callable) -> Callable:
        @functools.wraps(forward)
        def run(*args: object, **kwargs: object) -> object:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kept = {
                tensor.untyped_storage()._cdata
                for tensor in _tensors([args, kwargs, list(module.parameters()), list(module.buffers())])
            }
            collected: dict[int, _Storage] = {}
            pack = functools.partial(self.pack, kept, collected)
            with saved_tensors_hooks(pack, self.unpack):
                output = forward(*args, **kwargs)
            returned = {tensor.untyped_storage()._cdata for tensor in _tensors(output)}
            self.made[unit][id(module)] = [weakref.ref(of) for key, of in collected.items() if key not in returned]
            return output

        return run


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    """Plain ones, wherever they are."""
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    for leaf in leaves:
        if (
            isinstance(leaf, torch.Tensor)
            and leaf.layout == torch.strided
            and type(leaf) in (torch.Tensor, nn.Parameter)
        ):
            yield leaf


def offload(plan, model: nn.Module, device: torch.device, runtime) -> Callable[[], None]:
    """Makes the modules whose activations the plan moves hand them over. Returns what undoes it."""
    parts = plan.activations
    rule = json.loads(plan.strategy_json).get("activation_offload")
    if not parts or not rule:
        return lambda: None
    offloader = Offloader(device, rule.get("min_bytes", 1 << 20), parts)
    runtime.set_activations(offloader)
    return replace(
        [
            (module, offloader.wrapped(unit, module, module.forward))
            for unit, module in _chosen(plan, model, rule, parts)
        ]
    )


def _chosen(plan, model: nn.Module, rule: dict, parts: dict[int, list[int]]) -> list[tuple[int, nn.Module]]:
    """The outermost modules of the rule in units whose activations the plan moves."""
    unit_of = {
        fqn: number for number, unit in enumerate(plan.units) for fqn in unit.modules if unit.parameter_group == 0
    }
    chosen: dict[str, tuple[int, nn.Module]] = {}
    for name, module in model.named_modules():
        above = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
        if any(fqn in chosen for fqn in above):
            continue
        unit = next((unit_of[fqn] for fqn in above if fqn in unit_of), -1)
        if unit in parts and any(patterns.matches(entry, name, type(module).__name__) for entry in rule["modules"]):
            chosen[name] = (unit, module)
    return list(chosen.values())

# SPDX-License-Identifier: Apache-2.0
"""The routing of tokens to experts (--routing): values for the tensors of a traced model that depend on it.

[Note: values of routing] A traced tensor has no values. A model with experts reads some that follow from one choice:
the experts of each token, the indices of a top-k. This choice is made here, and values are computed along with the
model. An operator whose inputs all have values runs on them, on the CPU. Everything that a model reads, finds or sizes
by counts of tokens then fits together, whatever way it counts.

Counts of other ranks come by collectives. All ranks have the same counts, so what a rank gets from another one is what
it has itself. With shares from a file the traced rank owns the experts with the most tokens: the blocks of experts of
two ranks change places. How many ranks share the experts is seen at the exchange of the counts, behind the choice.
There the recording begins again.
"""

from __future__ import annotations

import csv
import fnmatch
import math
import os
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from shardplan.tracer import collectives
from shardplan.tracer.errors import TracerError

aten = torch.ops.aten
BALANCED = "balanced"
_VALUES = "_shardplan_values"
_MOST_ELEMENTS = 2**25  # of a tensor with values
# Their result depends on arguments other than the first.
_FILLED = {
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
CHOICES = {aten.topk.default: 1, aten.max.dim: 1, aten.argmax.default: None}  # where the indices are in the result


class RanksOfExperts(Exception):
    """So many ranks share the experts, and this one owns another block than it should: the recording begins again."""


@dataclass
class _Share:
    layer: str
    shares: list[float]


@dataclass
class Routing:
    """source: "": values are not known. choosers: FQNs of modules that choose by a top-k."""

    source: str = ""
    layers: list[_Share] = field(default_factory=list)
    choosers: set[str] = field(default_factory=set)
    _owners: tuple[int, int] | None = None  # ranks that share the experts, and which of them this one is
    _stale: dict[int, object] = field(default_factory=dict)  # storages of values that are no longer right

    @staticmethod
    def of(source: str) -> Routing:
        """Raises TracerError."""
        return Routing(source, [] if source in ("", BALANCED) else _read(source))

    @property
    def name(self) -> str:
        return os.path.basename(self.source)

    @property
    def is_known(self) -> bool:
        return bool(self.source)

    def values(self, tensor) -> torch.Tensor | None:
        found = getattr(tensor, _VALUES, None)
        if found is None:
            return tensor.constant if isinstance(tensor, FakeTensor) else tensor
        return None if found.untyped_storage()._cdata in self._stale else found

    # ---- values along with the model ----

    def run(self, func, args: tuple, kwargs: dict):
        """The result on values, which are changed in place where the operator does so; None: some are not known."""
        tensors = _tensors((args, kwargs))
        if not any(isinstance(t, FakeTensor) for t in tensors):
            return None
        found = [self.values(t) for t in tensors]
        known = all(value is not None for value in found) and not collectives.is_collective(func)
        has_none = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._overloadpacket.__name__
        if not known or has_none or sum(value.numel() for value in found) > _MOST_ELEMENTS:
            self._forget_written(func, args)
            return None
        on_cpu = torch.device("cpu")
        replaced = tree_map(
            lambda v: self.values(v) if isinstance(v, torch.Tensor) else on_cpu if isinstance(v, torch.device) else v,
            (args, kwargs),
        )
        with unset_fake_temporarily(), torch.no_grad():
            try:
                return func(*replaced[0], **replaced[1])
            except Exception:  # the model's own error comes from the operator itself
                return None

    def _forget_written(self, func, args: tuple) -> None:
        for argument, declared in zip(args, func._schema.arguments):
            written = declared.alias_info is not None and declared.alias_info.is_write
            value = getattr(argument, _VALUES, None) if written else None
            if value is not None:
                self._stale[value.untyped_storage()._cdata] = value.untyped_storage()

    def note(self, func, args: tuple, kwargs: dict, out, real, fqn: str) -> None:
        """Keeps the values of the operator's result. fqn: of the module that runs it."""
        if func in CHOICES:
            where = CHOICES[func]
            self._choose(args[0], out if where is None else out[where], fqn)
        elif real is not None:
            _attach(out, real)
        elif collectives.is_collective(func):
            self._note_exchange(func, args, kwargs, out)
        elif (filled := _filled(func, args, kwargs, out)) is not None:
            _attach(out, filled)

    def made_of(self, real, args: tuple):
        """Fake tensors for a result whose shape depends on values."""
        like = next(t for t in _tensors(args) if isinstance(t, FakeTensor))
        return tree_map(
            lambda r: like.new_empty(r.shape, dtype=r.dtype) if isinstance(r, torch.Tensor) else r, real
        )

    # ---- the choice ----

    def _choose(self, scores: torch.Tensor, indices: torch.Tensor, fqn: str) -> None:
        if not scores.dtype.is_floating_point or indices.dim() == 0 or scores.numel() == 0:
            return
        self.choosers.add(fqn)
        keeps = indices.dim() == scores.dim()
        differing = [d for d in range(scores.dim()) if keeps and indices.shape[d] != scores.shape[d]]
        dim = differing[0] if differing else scores.dim() - 1
        experts = scores.shape[dim]
        chosen = indices.shape[dim] if keeps else 1
        if not self.is_known or indices.numel() > _MOST_ELEMENTS or chosen > experts:
            return
        tokens = indices.numel() // chosen
        with unset_fake_temporarily():
            ids = self._experts_of_tokens(tokens, chosen, experts, fqn)
            if keeps:
                shape = [s for d, s in enumerate(indices.shape) if d != dim]
                ids = ids.reshape(*shape, chosen).movedim(-1, dim)
            else:
                ids = ids.reshape(indices.shape)
            setattr(indices, _VALUES, ids.contiguous())

    def _experts_of_tokens(self, tokens: int, chosen: int, experts: int, fqn: str) -> torch.Tensor:
        counts = self._counts(tokens, chosen, experts, fqn)
        if counts is None:
            return (torch.arange(tokens * chosen) % experts).reshape(tokens, chosen)
        # Neighbours of an expert in this list are different tokens. Any part of the tokens chooses like the whole.
        by_expert = torch.arange(experts).repeat_interleave(torch.tensor(counts)).reshape(chosen, tokens).t()
        step = next(s for s in range(max(1, round(tokens * 0.618)), 2 * tokens + 2) if math.gcd(s, tokens) == 1)
        return by_expert[torch.arange(tokens) * step % tokens]

    def _counts(self, tokens: int, chosen: int, experts: int, fqn: str) -> list[int] | None:
        shares = self._shares_of(fqn)
        if shares is None:
            return None
        if len(shares) != experts:
            raise TracerError(
                f"--routing {self.source}: it has {len(shares)} experts, and {fqn or '(root)'} chooses among {experts}"
            )
        shares = self._with_this_rank_busiest(shares)
        whole = sum(shares)
        counts = _apportioned([share / whole for share in shares], tokens * chosen)
        if max(counts) > tokens:
            expert = counts.index(max(counts))
            raise TracerError(
                f"--routing {self.source}: expert {expert} of {fqn or '(root)'} would get {counts[expert]} of "
                f"{tokens * chosen} choices, but a token chooses an expert once: at most {tokens} (a share of 1 in "
                f"{chosen})"
            )
        return counts

    def _shares_of(self, fqn: str) -> list[float] | None:
        """None: balanced."""
        number = next((part for part in fqn.split(".") if part.isdigit()), None)
        parents = [fqn[:end] for end in (*(i for i, c in enumerate(fqn) if c == "."), len(fqn))]
        for entry in self.layers:
            if entry.layer == number or any(fnmatch.fnmatchcase(parent, entry.layer) for parent in parents):
                return entry.shares
        return next((entry.shares for entry in self.layers if not entry.layer), None)

    def _with_this_rank_busiest(self, shares: list[float]) -> list[float]:
        if self._owners is None or len(shares) % self._owners[0]:
            return shares
        ranks, own = self._owners
        block = len(shares) // ranks
        blocks = [shares[i * block : (i + 1) * block] for i in range(ranks)]
        busiest = max(range(ranks), key=lambda i: sum(blocks[i]))
        blocks[own], blocks[busiest] = blocks[busiest], blocks[own]
        return [share for part in blocks for share in part]

    # ---- of other ranks ----

    def _note_exchange(self, func, args: tuple, kwargs: dict, out) -> None:
        kind, name = collectives.kind_of(func), func._overloadpacket.__name__
        if name == "alltoall_":
            self._note_lists(collectives.group_of(func, args, kwargs), *args[:2])
            return
        if name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce"):
            source, result = args[0], out
        elif name in ("alltoall_base_", "_allgather_base_"):
            source, result = args[1], args[0]
        else:
            return
        value = self.values(source)
        if value is None:
            return
        group = collectives.group_of(func, args, kwargs)
        with unset_fake_temporarily():
            if kind == "all_gather":
                _attach(result, torch.cat([value] * group.size()))
            elif kind == "all_reduce" and args[1] == "sum":
                _attach(result, value * group.size())
            elif kind == "all_to_all":
                splits = collectives.splits_of(func, args, kwargs)
                parts = {rows for part in (splits or ())[:2] for rows in part}
                if len(parts) <= 1 and value.shape[0] % group.size() == 0:
                    self._know_owners(group.size(), group.rank())
                    _attach(result, torch.cat([value.chunk(group.size())[group.rank()]] * group.size()))

    def _note_lists(self, group, received: list, sent: list) -> None:
        """Every rank sends this one what it sends itself."""
        own = self.values(sent[group.rank()])
        if own is not None and not own.dtype.is_floating_point:
            self._know_owners(group.size(), group.rank())
            with unset_fake_temporarily():
                _attach(received, [own.clone() for _ in received])

    def _know_owners(self, ranks: int, own: int) -> None:
        if self.layers and self._owners != (ranks, own):
            self._owners = (ranks, own)
            raise RanksOfExperts


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _attach(out, real) -> None:
    if isinstance(out, torch.Tensor) and isinstance(real, torch.Tensor) and out.shape == real.shape:
        setattr(out, _VALUES, real)
    elif isinstance(out, (list, tuple)) and isinstance(real, (list, tuple)):
        for one, other in zip(out, real):
            _attach(one, other)


def _filled(func, args: tuple, kwargs: dict, out) -> torch.Tensor | None:
    """Values of what is made without values: zeros, ones, counting numbers. Integers alone: others are no counts."""
    if not isinstance(out, FakeTensor) or out.dtype.is_floating_point or out.numel() > _MOST_ELEMENTS:
        return None
    with unset_fake_temporarily():
        if func in _FILLED:
            return torch.full(out.shape, _FILLED[func], dtype=out.dtype)
        if _tensors((args, kwargs)) or func._overloadpacket.__name__ not in ("zeros", "ones", "full", "arange"):
            return None
        return func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False})


def _apportioned(shares: list[float], total: int) -> list[int]:
    """Whole numbers of that sum; the largest remainders are rounded up, the first ones of equal ones."""
    exact = [share * total for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


# ---- the file ----

_COLUMNS = ("expert", "share")


def _read(path: str) -> list[_Share]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TracerError(f"--routing {path}: cannot read it ({error}); {BALANCED} needs no file") from error
    header = [name.strip() for name in rows[0]] if rows else []
    if any(header.count(name) != 1 for name in _COLUMNS) or set(header) - {*_COLUMNS, "layer"}:
        raise TracerError(
            f"{path}:1: found the columns {', '.join(header) or '(none)'}; expected expert, share and, if shares "
            "differ by layer, layer"
        )
    layers: dict[str, dict[int, float]] = {}
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if len(row) != len(header):
            raise TracerError(f"{path}:{number}: found {len(row)} fields; expected {len(header)}, as in line 1")
        fields = dict(zip(header, (value.strip() for value in row)))
        expert, share = _expert(path, number, fields["expert"]), _share(path, number, fields["share"])
        experts = layers.setdefault(fields.get("layer", ""), {})
        if expert in experts:
            raise TracerError(f"{path}:{number}: found expert {expert} again; expected each expert once a layer")
        experts[expert] = share
    if not layers:
        raise TracerError(f"{path}:2: found no rows; expected one for each expert")
    for layer, experts in layers.items():
        missing = next((i for i in range(len(experts)) if i not in experts), None)
        if missing is not None:
            of = f" of layer {layer}" if layer else ""
            raise TracerError(
                f"{path}:{len(rows)}: found no expert {missing}{of}; expected all from 0 to {max(experts)}"
            )
    return [_Share(layer, [experts[i] for i in range(len(experts))]) for layer, experts in layers.items()]


def _expert(path: str, line: int, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise TracerError(f"{path}:{line}: found expert {text!r}; expected its number, from 0 up")
    return int(text)


def _share(path: str, line: int, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise TracerError(f"{path}:{line}: found share {text!r}; expected a positive number")
    return share

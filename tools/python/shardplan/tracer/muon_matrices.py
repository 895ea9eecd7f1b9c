# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a traced model a matrix optimizer steps, and the matrices that they are: `matrices`.

People group them so: the matrices of hidden layers are Muon's, embeddings, the output head, biases and vectors are
AdamW's. A trace says it in its parameters, and planners read it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardplan.patterns import matches
from shardplan.tracer.errors import UsageProblem

_HEADS = frozenset(("lm_head", "output", "head", "unembed"))
_EMBEDDING_PARTS = frozenset(("input_embeddings", "output_embeddings"))


@dataclass(frozen=True)
class Matrix:
    """shape: of one whole matrix. is_cut: FSDP cuts it by rows; a stack of experts is cut between its matrices."""

    shape: tuple[int, int]
    dtype: str
    is_cut: bool = True


def matrices(
    trace: dict,
    patterns: Iterable[str] = (),
    blocks: Iterable[tuple[str, int]] = (),
    note: Callable[[str], None] = lambda text: None,
) -> list[Matrix]:
    """The different matrices, in the order of the trace's parameters, which are marked `muon` in the trace. patterns:
    whose they are; none: those of hidden layers. blocks: patterns of parameters, and the rows of the matrices that each
    of these consists of. Raises UsageProblem."""
    parameters = _Parameters(trace)
    found: dict[Matrix, None] = {}
    distributed = []
    for entry in parameters.named(patterns) if patterns else parameters.of_hidden_layers():
        entry["muon"] = True
        *stack, rows, columns = entry["shape"]
        if any(p["size"] > 1 and not (stack and p.get("dim", -1) <= 0) for p in entry.get("placements", ())):
            distributed.append(entry["fqn"])
        else:
            found.setdefault(Matrix((rows, columns), entry["dtype"], not stack))
    if distributed:
        note(
            f"optimizer_steps is without {distributed[0]}, which is distributed before FSDP shards it"
            + (f" ({len(distributed) - 1} more are, too)" if len(distributed) > 1 else "")
        )
    for pattern, rows in blocks:
        for entry in parameters.named([pattern], "--muon-blocks"):
            all_rows = _numel(entry) // entry["shape"][-1]
            if all_rows % rows:
                raise UsageProblem(
                    f"--muon-blocks {pattern}={rows}: {rows} rows do not divide the {all_rows} of {entry['fqn']}"
                )
            found.setdefault(Matrix((rows, entry["shape"][-1]), entry["dtype"], False))
    return list(found)


class _Parameters:
    """The parameters of a trace, with the modules that have them."""

    def __init__(self, trace: dict):
        self._entries = trace["parameters"]
        self._owners: list[list[dict]] = [[] for _ in self._entries]
        for module in trace["modules"]:
            for named in module.get("parameters", ()):
                self._owners[named["parameter"]].append(module)

    def of_hidden_layers(self) -> list[dict]:
        return [entry for entry, owners in zip(self._entries, self._owners) if _is_of_hidden_layers(entry, owners)]

    def named(self, patterns: Iterable[str], flag: str = "--muon-matrices") -> list[dict]:
        """Raises UsageProblem: a pattern names no matrix that trains."""
        chosen = set()
        for pattern in patterns:
            there = [i for i, entry in enumerate(self._entries) if _is_named(pattern, entry, self._owners[i])]
            if not there:
                raise UsageProblem(f"{flag} {pattern}: no parameter has such a name")
            able = [i for i in there if _is_able(self._entries[i])]
            if not able:
                first = self._entries[there[0]]
                found = f"has the shape {first['shape']}" if first.get("requires_grad", True) else "is frozen"
                raise UsageProblem(f"{flag} {pattern}: expected a matrix that trains; {first['fqn']} {found}")
            chosen.update(able)
        return [self._entries[i] for i in sorted(chosen)]


def _numel(entry: dict) -> int:
    result = 1
    for size in entry["shape"]:
        result *= size
    return result


def _is_able(entry: dict) -> bool:
    """A matrix, or a stack of matrices."""
    return len(entry["shape"]) in (2, 3) and 0 not in entry["shape"] and entry.get("requires_grad", True)


def _is_named(pattern: str, entry: dict, owners: list[dict]) -> bool:
    if pattern.startswith("class:"):
        return any(matches(pattern, "", module["class_name"]) for module in owners)
    return any(matches(pattern, fqn) for fqn in (entry["fqn"], *entry.get("shared_with", ())))


def _is_of_hidden_layers(entry: dict, owners: list[dict]) -> bool:
    if not _is_able(entry) or entry["fqn"].endswith("bias"):
        return False
    if any(_is_embedding(module) or _is_head(module) for module in owners):
        return False
    # A convolution's kernels are no matrices, and a stack of one is the positions of an image.
    is_convolution = any(module["class_name"].startswith("Conv") for module in owners)
    return len(entry["shape"]) == 2 or (min(entry["shape"]) > 1 and not is_convolution)


def _is_embedding(module: dict) -> bool:
    return module["class_name"].endswith("Embedding") or not _EMBEDDING_PARTS.isdisjoint(module.get("parts", ()))


def _is_head(module: dict) -> bool:
    """A Linear that makes the logits: in no numbered block, where attention has its output."""
    *path, name = module["fqn"].split(".")
    return name in _HEADS and module["class_name"].endswith("Linear") and not any(part.isdigit() for part in path)

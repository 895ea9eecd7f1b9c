# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a traced model a matrix optimizer steps, and the matrices that they are: `matrices`.

People group them so: the matrices of hidden layers are Muon's, embeddings, the output head, biases and vectors are
AdamW's.
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


def matrices(trace: dict, patterns: Iterable[str], note: Callable[[str], None]) -> list[Matrix]:
    """The different matrices, in the order of the trace's parameters. patterns: whose they are; none: those of hidden
    layers. Raises UsageProblem."""
    found, distributed = [], []
    for entry in _parameters(trace, list(patterns)):
        *stack, rows, columns = entry["shape"]
        if any(p["size"] > 1 and not (stack and p.get("dim", -1) <= 0) for p in entry.get("placements", ())):
            distributed.append(entry["fqn"])
            continue
        matrix = Matrix((rows, columns), entry["dtype"], not stack)
        if matrix not in found:
            found.append(matrix)
    if distributed:
        note(
            f"{distributed[0]} and {len(distributed) - 1} more are distributed before FSDP shards them, so "
            "optimizer_steps is without them"
            if len(distributed) > 1
            else f"{distributed[0]} is distributed before FSDP shards it, so optimizer_steps is without it"
        )
    return found


def _parameters(trace: dict, patterns: list[str]) -> list[dict]:
    """Entries of the trace."""
    owners = _owners(trace)
    able = [
        entry
        for entry in trace["parameters"]
        if len(entry["shape"]) in (2, 3) and entry.get("requires_grad", True) and 0 not in entry["shape"]
    ]
    if not patterns:
        return [
            entry
            for number, entry in enumerate(trace["parameters"])
            if entry in able and _is_of_hidden_layers(entry, owners.get(number, []))
        ]
    chosen = []
    for pattern in patterns:
        named = [
            entry for number, entry in enumerate(trace["parameters"]) if _is_named(pattern, entry, owners.get(number))
        ]
        if not named:
            raise UsageProblem(f"--muon-matrices {pattern}: no parameter has such a name")
        if not any(entry in able for entry in named):
            raise UsageProblem(
                f"--muon-matrices {pattern}: expected a matrix that trains; {named[0]['fqn']} "
                + (f"has the shape {named[0]['shape']}" if named[0].get("requires_grad", True) else "is frozen")
            )
        chosen += [entry for entry in named if entry in able]
    return [entry for entry in able if entry in chosen]


def _owners(trace: dict) -> dict[int, list[dict]]:
    """Modules by the parameter that they have."""
    found: dict[int, list[dict]] = {}
    for module in trace["modules"]:
        for named in module.get("parameters", ()):
            found.setdefault(named["parameter"], []).append(module)
    return found


def _is_named(pattern: str, entry: dict, owners: list[dict] | None) -> bool:
    classes = {module["class_name"] for module in owners or ()}
    if pattern.startswith("class:"):
        return any(matches(pattern, "", name) for name in classes)
    return any(matches(pattern, fqn) for fqn in (entry["fqn"], *entry.get("shared_with", ())))


def _is_of_hidden_layers(entry: dict, owners: list[dict]) -> bool:
    if entry["fqn"].endswith("bias") or any(_is_embedding(module) or _is_head(module) for module in owners):
        return False
    if len(entry["shape"]) == 2:
        return True
    # The position embeddings of images are one matrix, and a convolution's kernels are none.
    return min(entry["shape"]) > 1 and not any(module["class_name"].startswith("Conv") for module in owners)


def _is_embedding(module: dict) -> bool:
    return module["class_name"].endswith("Embedding") or not _EMBEDDING_PARTS.isdisjoint(module.get("parts", ()))


def _is_head(module: dict) -> bool:
    """A Linear that makes the logits: in no numbered block, where attention has its output."""
    *path, name = module["fqn"].split(".")
    return name in _HEADS and module["class_name"].endswith("Linear") and not any(part.isdigit() for part in path)

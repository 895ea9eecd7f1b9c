# SPDX-License-Identifier: Apache-2.0
"""The peak of allocated memory by category and by module, from the allocator's own history
(`torch.cuda.memory._snapshot()`).

The history is read from its begin. A block has the stretch and the module of its allocation: threads write both into
the history (modules.py); one that does not is placed by its time. Categories are those of `shardplan memory`
(docs/reference/memory.md).
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterator

from .modules import FORWARD_MARK, MOST_EVENTS
from .phases import BACKWARD, FORWARD, OPTIMIZER, SETUP, Known, Stretch

_GRANULARITY = 512  # of an allocation; what a block has more than that is the allocator's rounding
_CURVE_POINTS = 600
ROUNDING = "rounding"
_NEVER = 1 << 60
# Functions of PyTorch's FSDP and what they allocate: (end of the file's name, function, category).
_FSDP = (
    ("_fsdp_collectives.py", "foreach_all_gather", "all_gather_output"),
    ("_fsdp_collectives.py", "foreach_reduce", "reduce_scatter_input"),
    ("_fsdp_param.py", "alloc_all_gather_outputs", "param_unsharded"),
    ("_fsdp_param.py", "init_all_gather_outputs", "param_unsharded"),
    ("_fsdp_param.py", "init_unsharded_param", "param_unsharded"),
    ("_flat_param.py", "_alloc_padded_unsharded_flat_param", "param_unsharded"),
    ("_flat_param.py", "pre_unshard", "all_gather_input"),
    ("_runtime_utils.py", "_reduce_grad", "reduce_scatter_input"),
)
_COMMUNICATION = ("distributed_c10d.py", "_functional_collectives.py")


@dataclasses.dataclass
class Block:
    size_bytes: int
    stretch: int
    module: str
    frames: list
    marked_by: str
    freed_in: int = _NEVER  # stretch


@dataclasses.dataclass
class Peak:
    size_bytes: int
    stretch: int
    module: str
    categories: dict[str, int]
    modules: dict[str, int]
    curve: list[tuple[int, int]]  # (event, allocated bytes)


def rounded(size: int) -> int:
    return max(_GRANULARITY, -(-size // _GRANULARITY) * _GRANULARITY)


class _Placing:
    """The stretch and the module of each entry of the history."""

    def __init__(self, stretches: list[Stretch]) -> None:
        self._ends = [stretch.end_us for stretch in stretches]

    def of(self, entry: dict) -> tuple[int, str, str]:
        """The stretch, who marked it, and the module. A thread that has passed no point for a stretch has an old mark:
        its time counts."""
        by_time = min(bisect.bisect_left(self._ends, entry["time_us"]), len(self._ends) - 1)
        number, _, rest = entry.get("user_metadata", "").partition("|")
        if number.isdigit() and int(number) >= by_time - 1:
            kind, _, module = rest.partition("|")
            return int(number), kind, module
        return by_time, "", ""


def peak_of(trace: list[dict], stretches: list[Stretch], addresses: list[Known], measured_bytes: int) -> Peak | None:
    """trace: of the rank's device, whole. measured_bytes: the allocator's own peak, which the categories add up to.
    None: nothing was allocated, or the first of the history is lost."""
    at = _event_of_peak(trace)
    if at is None or len(trace) >= MOST_EVENTS:
        return None
    placing = _Placing(stretches)
    alive: dict[int, Block] = {}
    at_peak: dict[int, Block] = {}
    for number, entry in enumerate(trace):
        action, address = entry["action"], entry.get("addr")
        if action == "alloc":
            stretch, marked_by, module = placing.of(entry)
            alive[address] = Block(
                rounded(entry["size"]), stretch, module, entry.get("frames", []) if number <= at else [], marked_by
            )
        elif action == "free_requested" and (block := alive.pop(address, None)) is not None:
            block.freed_in = placing.of(entry)[0]
        if number == at:
            at_peak = dict(alive)
    stretch, _, module = placing.of(trace[at])
    categories: collections.Counter = collections.Counter()
    modules: collections.Counter = collections.Counter()
    known = _known(at_peak, addresses)
    for address, block in at_peak.items():
        found = known.get(address)
        categories[found.category if found else _category(block, stretches)] += block.size_bytes
        modules[found.module if found else block.module] += block.size_bytes
    total = sum(categories.values())
    if measured_bytes != total:
        categories[ROUNDING] += measured_bytes - total
    return Peak(
        measured_bytes, stretch, module, dict(categories.most_common()), dict(modules.most_common()), _curve(trace)
    )


def _allocated(trace: list[dict]) -> Iterator[int]:
    """Bytes behind each entry of the history."""
    alive: dict[int, int] = {}
    allocated = 0
    for entry in trace:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = size = rounded(entry["size"])
            allocated += size
        elif entry["action"] == "free_requested":
            allocated -= alive.pop(entry["addr"], 0)
        yield allocated


def _event_of_peak(trace: list[dict]) -> int | None:
    """The first entry behind which the most is allocated. None: nothing ever is."""
    most, at = 0, None
    for number, allocated in enumerate(_allocated(trace)):
        if allocated > most:
            most, at = allocated, number
    return at


def _known(alive: dict[int, Block], addresses: list[Known]) -> dict[int, Known]:
    """Roles that optimizers give to blocks. An address counts while the block at it is the one that was there."""
    found = {}
    for known in addresses:
        block = alive.get(known.address)
        if block is not None and block.stretch <= known.stretch <= block.freed_in:
            found[known.address] = known
    return found


def _category(block: Block, stretches: list[Stretch]) -> str:
    for frame in block.frames:
        for file, function, category in _FSDP:
            if frame["name"] == function and frame["filename"].endswith(file):
                return category
    phase = stretches[min(block.stretch, len(stretches) - 1)].phase
    outlives = block.freed_in > block.stretch
    if any(frame["filename"].endswith(_COMMUNICATION) for frame in block.frames[:4]):
        return "communication"
    if phase == SETUP:
        return "other"
    if phase == OPTIMIZER:
        return "optimizer_state" if outlives else "optimizer_temp"
    if phase == FORWARD:
        return "saved" if outlives else "forward_temp"
    if phase == BACKWARD and block.marked_by == FORWARD_MARK and block.module:
        return "recompute"
    return "grad_unsharded" if outlives else "backward_temp"


def _curve(trace: list[dict]) -> list[tuple[int, int]]:
    """The most allocated of each of so many parts of the history."""
    part = max(1, -(-len(trace) // _CURVE_POINTS))
    points: list[tuple[int, int]] = []
    most = 0
    for number, allocated in enumerate(_allocated(trace)):
        most = max(most, allocated)
        if number % part == part - 1:
            points.append((number, most))
            most = allocated
    return points

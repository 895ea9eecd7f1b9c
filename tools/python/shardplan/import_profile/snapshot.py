# SPDX-License-Identifier: Apache-2.0
"""Memory snapshots, `pickle.dump(torch.cuda.memory._snapshot(), file)`: what was allocated and reserved while they were
recorded."""

from __future__ import annotations

import dataclasses
import gzip
import io
import pickle
import zlib

from shardplan import files

from .kineto import BadProfile, Profile


@dataclasses.dataclass(frozen=True)
class Memory:
    """One device's memory, in the words of torch.cuda's statistics."""

    peak_bytes: int
    steady_bytes: int  # allocated at the end
    reserved_bytes: int  # at the most
    cache_releases: int
    out_of_memory: bool
    peak_at: str = ""
    by_category: tuple[tuple[str, int], ...] = ()


class _Plain(pickle.Unpickler):
    """Lists, dicts, texts and numbers: a pickle that names anything else is no snapshot, and could run whatever it
    names."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _load(path: str) -> dict:
    try:
        data = files.read_bytes(path)
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        found = _Plain(io.BytesIO(data)).load()
    except OSError as error:
        raise BadProfile(f"{path}: cannot be read: {error.strerror or error}") from error
    except (
        pickle.UnpicklingError, EOFError, zlib.error, ValueError, IndexError, KeyError, AttributeError, TypeError,
        MemoryError, OverflowError,
    ) as error:
        raise BadProfile(
            f"{path}: no memory snapshot ({error}; expected a pickle of torch.cuda.memory._snapshot())"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise BadProfile(
            f"{path}: no memory snapshot (found {type(found).__name__} without segments; expected "
            "torch.cuda.memory._snapshot())"
        )
    return found


# A block counts until it is given back, also where another stream still uses it (free_completed comes later).
_ALLOCATES = {"alloc": 1, "free_requested": -1}
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def read(path: str, device: int) -> Memory:
    """Memory of the process's device with that index. The history is walked back from what is alive at its end. Raises
    BadProfile."""
    found = _load(path)
    try:
        segments = [segment for segment in found["segments"] if segment.get("device", 0) == device]
        traces = found.get("device_traces") or []
        trace = traces[device] if device < len(traces) else []
        allocated = sum(
            block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"
        )
        reserved = sum(segment["total_size"] for segment in segments)
        most_allocated, most_reserved, steady = allocated, reserved, allocated
        for entry in reversed(trace):
            action, size = entry["action"], entry["size"]
            if action in _ALLOCATES:
                allocated -= _ALLOCATES[action] * _rounded(size)
            elif action in _RESERVES:
                reserved -= _RESERVES[action] * size
            most_allocated, most_reserved = max(most_allocated, allocated), max(most_reserved, reserved)
        releases = sum(entry["action"] == "segment_free" for entry in trace)
        out_of_memory = any(entry["action"] == "oom" for entry in trace)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadProfile(f"{path}: no memory snapshot of torch (missing or odd: {error})") from error
    return Memory(most_allocated, steady, most_reserved, releases, out_of_memory)


def _rounded(size: int) -> int:
    """The size to which the caching allocator rounds a request."""
    return max(512, -(-size // 512) * 512)


def of_profile(profile: Profile) -> Memory | None:
    """Memory that the profiler itself recorded, with profile_memory=True."""
    if not profile.memory:
        return None
    return Memory(
        max(one[1] for one in profile.memory), profile.memory[-1][1], max(one[2] for one in profile.memory), 0, False
    )

# SPDX-License-Identifier: Apache-2.0
"""A step of torch.optim.Muon on several matrices, put together of the steps that a trace has of each: in the form of a
recording."""

from shardplan.tracer.muon_matrices import Matrix
from shardplan.tracer.muon_steps import MuonOptions, Ranks, record_step

_OF_SHARDS, _OF_REPLICAS = -1, -2  # communicators of a traced step


def traced_steps(shapes, dtype: str, ranks: Ranks, options: MuonOptions) -> list[dict]:
    """In the order of the matrices."""
    kinds = {shape: record_step(Matrix(shape, dtype), ranks, options) for shape in shapes}
    return [kinds[shape] for shape in shapes]


def _of_the_whole_step(steps: list[dict]) -> list[tuple[int, list]]:
    """(number of the matrix, event). torch keeps a matrix's update until it has the next one's, so what `apply` frees
    last is freed behind the next `update`."""
    events, kept = [], []
    for number, step in enumerate(steps):
        events += [(number, event) for event in step["update"]]
        events += kept
        *applied, last = step["apply"]
        events += [(number, event) for event in (*step["orthogonalize"], *applied)]
        assert last[0] == "-"
        kept = [(number, last)]
    return events + kept


def expected_events(steps: list[dict], ranks: Ranks) -> list[list]:
    """["+", number, bytes], ["-", number], ["op", name, dtype] and ["collective", kind, dtype, bytes, ranks] of rank
    0."""
    groups = {
        _OF_SHARDS: list(range(ranks.shards)),
        _OF_REPLICAS: list(range(0, ranks.shards * ranks.replicas, ranks.shards)),
    }
    found, storages = [], {}
    for number, (kind, *rest) in _of_the_whole_step(steps):
        if kind == "+":
            storages[number, rest[0]] = len(storages)
            found.append(["+", storages[number, rest[0]], rest[1]])
        elif kind == "-":
            found.append(["-", storages[number, rest[0]]])
        elif len(rest) > 10:
            details = rest[10]
            assert "work" not in details
            found.append(
                ["collective", details["kind"], rest[2], details["size_bytes"], groups[details["communicator"]]]
            )
        else:
            found.append(["op", rest[0], rest[2]])
    return found

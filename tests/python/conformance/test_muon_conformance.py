# SPDX-License-Identifier: Apache-2.0
"""torch.optim.Muon on FSDP2's parameters and real ranks, against the steps that `shardplan trace --muon` records."""

import pytest
from conftest import installed_pytorch
from muon_events import expected_events, traced_steps
from muon_step_ranks import MuonCase, Recorded, work

from shardplan.tracer.muon_options import MuonOptions, Ranks
from shardplan_conformance import processes

pytestmark = pytest.mark.skipif(installed_pytorch() != "2.15", reason="DTensor's choices are those of one release")

CASES = [
    MuonCase("wide", 2, ((4, 6),)),
    MuonCase("tall", 2, ((6, 4),)),
    MuonCase("square", 2, ((8, 8),)),
    MuonCase("rows_not_divisible", 2, ((5, 3),)),
    MuonCase("bfloat16", 2, ((8, 6), (6, 8)), dtype="bfloat16"),
    MuonCase("no_nesterov", 2, ((8, 6), (6, 8)), nesterov=False),
    MuonCase("three_iterations", 2, ((6, 4),), ns_steps=3),
    MuonCase("layers", 2, ((8, 6), (6, 8), (8, 8), (8, 6))),
    MuonCase("wide", 3, ((6, 9),)),
    MuonCase("rows_not_divisible", 3, ((7, 9), (7, 5), (5, 12))),
    MuonCase("reduced_and_scattered", 3, ((384, 2048),)),
    MuonCase("wide", 4, ((8, 12),)),
    MuonCase("rows_not_divisible", 4, ((10, 7), (11, 30))),
    MuonCase("a_rank_without_rows", 4, ((5, 6), (6, 5))),
    MuonCase("reduced_and_scattered", 4, ((256, 2048), (2048, 8))),
    MuonCase("replicas", 4, ((8, 6), (6, 8), (8, 8)), replicas=2),
    MuonCase("replicas_rows_not_divisible", 4, ((5, 3), (3, 5)), replicas=2),
    MuonCase("replicas_bfloat16", 4, ((6, 4), (2048, 8)), dtype="bfloat16", replicas=2),
]

_REDUCED = ["collective", "all_reduce"]


class GlooRanks:
    def __init__(self, count: int, folder):
        context = processes.context()
        self._processes, self._connections, self._recorded = [], [], {}
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, str(folder / "store"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def record(self, case: MuonCase) -> list[Recorded]:
        """One recording for each rank of the case, made once."""
        if case in self._recorded:
            return self._recorded[case]
        for connection in self._connections:
            connection.send(case)
        answers = [connection.recv() for connection in self._connections[: case.ranks]]
        for rank, answer in enumerate(answers):
            assert isinstance(answer, Recorded), f"rank {rank}: {answer}"
        self._recorded[case] = answers
        return answers

    def end(self) -> None:
        for connection, process in zip(self._connections, self._processes):
            connection.send(None)
            process.join(timeout=10)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    found = GlooRanks(max(case.ranks for case in CASES), tmp_path_factory.mktemp("gloo"))
    yield found
    found.end()


def expected(case: MuonCase) -> list[list]:
    """By the traced steps on CPU ranks. A functional reduction copies inside of its operator, where no mode looks."""
    ranks = Ranks(case.shards, case.replicas)
    options = MuonOptions(ns_steps=case.ns_steps, nesterov=case.nesterov, device="cpu")
    events = expected_events(traced_steps(case.shapes, case.dtype, ranks, options), ranks)
    following = [*events[1:], []]
    return [e for e, after in zip(events, following) if e[:2] != ["op", "aten.clone"] or after[:2] != _REDUCED]


def without_waits(events: list[list]) -> list[list]:
    """Each collective is waited for before anything else happens but frees."""
    result = []
    for event in events:
        if event[0] == "wait":
            assert next(e for e in reversed(result) if e[0] != "-")[0] == "collective"
        else:
            result.append(event)
    return result


def collectives(events: list[list]) -> list[tuple]:
    return [tuple(event[1:4]) for event in events if event[0] == "collective"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}_{case.ranks}")
def test_a_step_on_gloo_ranks_is_the_traced_one(ranks, case):
    """Collectives, kernels, allocations and frees, event for event."""
    recorded = ranks.record(case)
    assert without_waits(recorded[0].events) == expected(case)
    for other in recorded[1:]:
        assert [kind for kind, *_ in collectives(other.events)] == [
            kind for kind, *_ in collectives(recorded[0].events)
        ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}_{case.ranks}")
def test_the_state_is_one_momentum_like_the_gradient(ranks, case):
    for rank, recorded in enumerate(ranks.record(case)):
        names = [(name, dtype) for name, _, dtype in recorded.states]
        assert names == [("momentum_buffer", case.dtype)] * len(case.shapes)
        for (rows, columns), (_, shape, _) in zip(case.shapes, recorded.states):
            each = -(-rows // case.shards)
            first = each * (rank % case.shards)
            assert shape == (max(0, min(rows, first + each) - first), columns)

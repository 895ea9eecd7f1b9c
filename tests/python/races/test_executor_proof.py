# SPDX-License-Identifier: Apache-2.0
"""Plans that the executor replays race nowhere, and the proof would see it: without one kind of order in the recording
there are races. tests/device/mutations.py takes the order out of the executor itself, for tools/nightly."""

import pytest
from executor_proof import LIBRARY, SUITE, record

RANKS, EVERY = 2, 20  # of the conformance suite's plans

# The mutations "no wait" and "no record_stream" leave these out.
LEFT_OUT = {"wait": "and nothing orders them", "hold": "may still read it"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    if not LIBRARY.exists() or not SUITE.exists():
        pytest.skip(f"no {LIBRARY.name} or no {SUITE.name}: torch has no CUDA, or the build has sanitizers")
    return record(SUITE, RANKS, EVERY, tmp_path_factory.mktemp("recording"))


def test_nothing_races_in_the_plans(recorded):
    proof = recorded.proof()
    assert recorded.plans > 1 and proof.accesses > 1000, recorded.said
    assert proof.verdict == "none" and "not looked at" not in proof.text, proof.text[-4000:]


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_without_an_order_there_are_races(recorded, kind):
    proof = recorded.proof((kind,))
    assert any(LEFT_OUT[kind] in race for race in proof.races), proof.text[-4000:]

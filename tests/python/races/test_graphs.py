# SPDX-License-Identifier: Apache-2.0
"""A CUDA graph does nothing where it is captured, and all of its works where it is launched."""

import pytest
from proofs import FOLDER, prove


@pytest.mark.parametrize(("words", "verdict"), [((), "none"), (("early",), "races")])
def test_works_of_a_graph_are_issued_where_it_is_launched(words, verdict):
    proof = prove(1, FOLDER / "graph_replays.py", *words)
    assert proof.verdict == verdict and "not looked at" not in proof.text, proof.text
    if words:
        assert any("copy writes what aten::" in race for race in proof.races), proof.text

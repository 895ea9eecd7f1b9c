# SPDX-License-Identifier: Apache-2.0
"""A kernel of Triton writes what its code stores to, and reads the rest."""

import pytest
from proofs import FOLDER, prove

pytest.importorskip("triton")


@pytest.mark.parametrize(("shared", "verdict"), [("reads", "none"), ("writes", "races")])
def test_kernels_that_share_what_both_read_do_not_race(shared, verdict):
    proof = prove(1, FOLDER / "triton_streams.py", shared)
    assert proof.verdict == verdict, proof.text

# SPDX-License-Identifier: Apache-2.0
"""The guide's page on rehearsals shows what examples/rehearse prints, which test_examples runs."""

import re

from conftest import ROOT


def test_the_page_shows_what_the_example_prints():
    page = (ROOT / "docs" / "guide" / "rehearse-a-job.md").read_text()
    printed = (ROOT / "examples" / "rehearse" / "expected.txt").read_text().splitlines()
    blocks = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "fsdp2.py" in block]
    assert len(blocks) == 2
    shown = [line for block in blocks for line in block.splitlines() if line and line != "..." and not line.startswith("$ ")]
    missing = [line for line in shown if not any(mine and line.startswith(mine) for mine in printed)]
    assert len(shown) > 20 and missing == []

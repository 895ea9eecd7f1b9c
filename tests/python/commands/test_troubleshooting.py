# SPDX-License-Identifier: Apache-2.0
"""Every error text of the page on troubleshooting is one that the sources can print."""

import re

import pytest
from conftest import ROOT

PAGE = ROOT / "docs" / "guide" / "troubleshooting.md"
TEXTS = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
FOLDERS = ("schemas", "simulator", "planner", "executor", "tools")


@pytest.fixture(scope="module")
def sources() -> str:
    """All sources, string literals that are split over lines joined."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".cc", ".h", ".py"):
                found.append(re.sub(r'"\s*\n\s*f?"', "", path.read_text()))
    return "\n".join(found)


def test_there_are_texts():
    assert len(TEXTS) >= 15


@pytest.mark.parametrize("text", TEXTS)
def test_the_sources_have_the_text(text, sources):
    assert text in sources

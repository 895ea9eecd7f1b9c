# SPDX-License-Identifier: Apache-2.0
"""dev/check_prose counts sentences as a reader does."""

import importlib.machinery
import importlib.util
import json

import pytest
from conftest import ROOT

_loader = importlib.machinery.SourceFileLoader("check_prose", str(ROOT / "dev" / "check_prose"))
check_prose = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_prose", _loader))
_loader.exec_module(check_prose)

LONG = "A " + "word " * 34 + "more."


@pytest.mark.parametrize(
    ("text", "long", "openings"),
    [
        (LONG, 1, 0),
        (LONG.replace("more.", "more") + "\nand more.", 1, 0),  # over two lines
        (LONG.replace(" word word", " word. Word"), 0, 0),
        ("- " + LONG + "\n- Short.", 1, 0),
        ("```sh\n" + LONG + "\n```\n| " + LONG + " |\n# " + LONG, 0, 0),
        ("Of two. What is. `code` does. As it is.", 0, 3),
        ("[Of](page.md) a link.", 0, 1),
        ("Often it is. Whatever.", 0, 0),
    ],
)
def test_sentences(tmp_path, monkeypatch, text, long, openings):
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text + "\n")
    found = check_prose.faults("*.md")
    assert (len(found["long"]), len(found["openings"])) == (long, openings), found


def test_the_guide_has_no_long_sentence():
    assert json.loads((ROOT / "dev" / "prose.json").read_text())["guide"] == {"long": 0, "openings": 0}

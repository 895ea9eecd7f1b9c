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
    found = check_prose.faults([tmp_path / "page.md"], "guide")
    assert (len(found["long"]), len(found["openings"])) == (long, openings), found


CPP = """// SPDX-License-Identifier: Apache-2.0
// A header. Of two
// lines, one thought.
//    Of a drawing.
#include "a.h"

const char* kText = "// Of no comment";
int a;  // As many.
int b;  // Small, and
        // Where it goes on
// Those of the next.
int c = R"(
// Of a raw string)" [0];
"""
PYTHON = """#!/usr/bin/env python3
\"\"\"Of a module.

    Of code.

name: what it is
other: Whose it is.
\"\"\"
# What a comment
# says. Those count.
text = "# Of no comment"


def function():
    \"\"\"What it does.\"\"\"
    return "Of a string"  # As ever
"""


@pytest.mark.parametrize(
    ("name", "room", "text", "openings"),
    [
        ("a.h", "c++/schemas", CPP, ["Of two lines, one thought.", "As many.", "Those of the next."]),
        (
            "a.py",
            "python/tools",
            PYTHON,
            ["What a comment says.", "Those count.", "As ever", "Of a module.", "Whose it is.", "What it does."],
        ),
    ],
)
def test_sentences_of_comments_and_docstrings(tmp_path, monkeypatch, name, room, text, openings):
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    assert [row.split(": ", 1)[1] for row in check_prose.faults([tmp_path / name], room)["openings"]] == openings


def test_a_long_comment_is_counted_over_its_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    words = LONG.split()
    (tmp_path / "a.cc").write_text(f"// {' '.join(words[:20])}\n// {' '.join(words[20:])}\n")
    assert len(check_prose.faults([tmp_path / "a.cc"], "c++/tools")["long"]) == 1


def test_the_guide_has_no_long_sentence():
    assert json.loads((ROOT / "dev" / "prose.json").read_text())["guide"] == {"long": 0, "openings": 0}

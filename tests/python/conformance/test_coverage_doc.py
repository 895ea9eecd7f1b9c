# SPDX-License-Identifier: Apache-2.0
"""docs/reference/pytorch-coverage.md: a row for every function of PyTorch's FSDP, and nothing named there that does not
exist."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest
import torch
from conftest import installed_pytorch

ROOT = pathlib.Path(__file__).resolve().parents[3]
DOC = ROOT / "docs" / "reference" / "pytorch-coverage.md"
LIST = pathlib.Path(__file__).with_name("pytorch_functions.txt")
SOURCES = ("planner", "executor", "schemas", "simulator", "tools", "tests")
RECORDINGS = ROOT / "tests" / "conformance"
GOLDENS = ROOT / "tests" / "planner" / "goldens"
TORCH = pathlib.Path(torch.__file__).parents[1]
INSTALLED = installed_pytorch()
RELEASES = ("2.11", "2.15")
NEITHER = "-"  # the mark of a function that another version has


def _listed() -> dict[str, list[tuple[str, str]]]:
    """File of PyTorch -> (function, mark) in the order of the file; the mark is "" (in both releases), the one release
    that has it, or NEITHER."""
    files: dict[str, list[tuple[str, str]]] = {}
    for line in LIST.read_text().splitlines():
        if line.startswith("["):
            functions = files.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            name, _, mark = line.partition(" ")
            functions.append((name, mark))
    return files


def _rows() -> dict[str, list[list[str]]]:
    """File of PyTorch (a heading of the page) -> the cells of its rows."""
    files: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in DOC.read_text().splitlines():
        if heading := re.fullmatch(r"##+ `(torch/[^`]+)`", line):
            rows = files.setdefault(heading[1], [])
        elif line.startswith("#"):
            rows = []
        elif line.startswith("| `"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return files


FILES = _listed()


def _decides(row: list[str]) -> tuple[str, str]:
    """The release that alone has the function ("": both), and what it decides."""
    release, only, decides = row[1].partition(" only: ")
    return (release, decides) if only and release in RELEASES else ("", row[1])


def _functions(text: str) -> list[str]:
    """Classes and functions, nested ones too, as a dotted path."""
    found: list[str] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.append(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(text), "")
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_function_has_one_row(file):
    assert [row[0].strip("`") for row in _rows().get(file, [])] == [name for name, _ in FILES[file]]


@pytest.mark.parametrize("file", FILES)
def test_marks_are_those_of_the_installed_torch(file):
    assert INSTALLED in RELEASES, f"docs/reference/pytorch-coverage.md is of torch {' and '.join(RELEASES)}"
    installed = set(_functions((TORCH / file).read_text()))
    assert installed == {name for name, mark in FILES[file] if mark in ("", INSTALLED)}


@pytest.mark.parametrize("file", FILES)
def test_rows_of_one_release_say_so(file):
    assert {row[0].strip("`"): _decides(row)[0] for row in _rows()[file]} == {
        n: "" if m == NEITHER else m for n, m in FILES[file]
    }


def test_the_page_has_no_other_files():
    assert list(_rows()) == list(FILES)


def test_what_a_function_decides_is_placed_and_shown():
    """A row that decides something names code and a test or recording, or says that it is out of scope or not done."""
    for file, rows in _rows().items():
        for row in rows:
            assert len(row) == 5 and all(row), f"{file}: {row}"
            name, _, planner, executor, shown = row
            if _decides(row)[1].startswith("Nothing"):
                continue
            places = planner + executor
            excused = "out of scope" in places or "not done" in places
            assert "`" in places or excused, f"{file} {name}: no place is named"
            assert "`" in shown or shown == "as above" or excused, f"{file} {name}: nothing shows it"


def _source_files() -> list[pathlib.Path]:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in files if path.suffix in (".cc", ".h", ".py", ".cu")]


def test_every_file_function_test_and_recording_named_exists():
    sources = _source_files()
    texts: dict[pathlib.Path, str] = {}
    wrong = []
    for token in re.findall(r"`([^`]+)`", DOC.read_text()):
        if match := re.fullmatch(r"([\w/]+\.(?:cc|h|py|cu))(?::(\w+))?", token):
            if token.startswith("torch/") or (TORCH / "torch/distributed/fsdp" / match[1]).exists():
                continue
            found = [path for path in sources if f"/{path.relative_to(ROOT)}".endswith(f"/{match[1]}")]
            if match[2]:
                for path in found:
                    texts.setdefault(path, path.read_text())
                found = [path for path in found if re.search(rf"\b{match[2]}\b", texts[path])]
            if len(found) != 1:
                wrong.append(f"{token}: {len(found)} such places")
        elif match := re.fullmatch(r"goldens/(fsdp1|fsdp2)/(\w+)", token):
            if not (GOLDENS / match[1] / match[2]).is_dir():
                wrong.append(f"{token}: no such golden")
        elif match := re.fullmatch(r"(fsdp1|fsdp2|fsdp2_215|memory)/(\w+|\*)", token):
            if match[2] != "*" and not (RECORDINGS / match[1] / f"{match[2]}.json").exists():
                wrong.append(f"{token}: no such recording")
    assert not wrong, "\n".join(wrong)

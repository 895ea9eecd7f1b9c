# SPDX-License-Identifier: Apache-2.0
"""Names in anonymous namespaces differ within a library: presets compile different numbers of files as one, and every
number has to do. Types outside of them have one definition in all libraries: one program may hold several."""

import collections
import re

import pytest
from conftest import ROOT

LIBRARIES = {
    "schemas": ["schemas/src"],
    "checkpoints": ["schemas/checkpoints"],
    "verifier": ["schemas/verifier"],
    "simulator": ["simulator/src"],
    "planner": ["planner/src"],
    "replay": ["executor/src/replay", "executor/src/virtual"],
    "executor": ["executor/src/torch", "executor/src/cpu", "executor/checkpoints"],
    "executor_cuda": ["executor/src/cuda"],
    "training": ["executor/training", "executor/tracer"],
    "run": ["executor/run"],
    "binding": ["executor/training/binding"],
    "cli": ["tools/cli"],
    "conformance": ["tests/conformance/program"],
    "planner_test": ["tests/planner"],
    "schemas_test": ["tests/schemas"],
    "virtual_test": ["tests/executor/virtual"],
}
# Folders within that are a library of their own.
INSIDE = {"training": "executor/training/binding"}
DEFINITIONS = (
    re.compile(r"^(?:struct|class|enum class) (\w+)[^;\n]*\{", re.MULTILINE),
    re.compile(r"^(?:static )?(?:constexpr|const)\b[^=;{(]*?\b(k\w+)\b", re.MULTILINE),
    re.compile(r"^[A-Za-z][^\n;={}()]*?\b(\w+)\(([^{;]*?)\)(?: const)?(?: noexcept)? \{", re.MULTILINE),
)


def definitions(text: str) -> set[str]:
    """Types and constants by name, functions with the types of their arguments, of the anonymous namespaces of a
    file."""
    space = re.search(r"^namespace ([\w:]+) \{", text, re.MULTILINE)
    found = set()
    for block in re.findall(r"^namespace \{\n(.*?)^\}  // namespace\n", text, re.DOTALL | re.MULTILINE):
        for pattern in DEFINITIONS:
            for name, *rest in (match.groups() for match in pattern.finditer(block)):
                arguments = re.sub(r"\b\w+(,|$)", r"\1", re.sub(r"\s+", " ", "".join(rest)))
                found.add(f"{space.group(1) if space else ''}::{name}({arguments})")
    return found


def test_equal_names_are_found():
    text = (
        "namespace a {{\nnamespace {{\nconstexpr int kMost = 1;\nint Count(int {}) {{\n  return 1;\n}}\nstruct Place "
        "{{\n}};\n}}  // namespace\n}}\n"
    )
    assert (
        definitions(text.format("x")) == definitions(text.format("y")) == {"a::kMost()", "a::Count(int )", "a::Place()"}
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_differ_within_a_library(library):
    files = collections.defaultdict(set)
    sources = {path for folder in LIBRARIES[library] for path in (ROOT / folder).rglob("*.cc")}
    if library in INSIDE:
        sources -= set((ROOT / INSIDE[library]).rglob("*.cc"))
    for path in sources:
        for name in definitions(path.read_text()):
            files[name].add(path.name)
    assert files, "the library has files"
    assert not {name: sorted(where) for name, where in files.items() if len(where) > 1}


SPACE = re.compile(r"^namespace ?([\w:]*) \{$|^\}  // namespace.*$", re.MULTILINE)
TYPE = re.compile(r"^(?:struct|class|enum class) (\w+)(?: final)?(?: : [^;\n]*)? \{$", re.MULTILINE)


def named_types(text: str) -> list[str]:
    """Types of the named namespaces of a file."""
    found, spaces, at = [], [], 0
    for space in [*SPACE.finditer(text), None]:
        if "" not in spaces:
            within = text[at : space.start() if space else len(text)]
            found += ["::".join([*spaces, match.group(1)]) for match in TYPE.finditer(within)]
        if space is None:
            break
        at = space.end()
        if space.group(1) is not None:
            spaces.append(space.group(1))
        elif spaces:
            spaces.pop()
    return found


def test_named_types_are_found():
    text = "namespace a {\nstruct B final {\n};\nnamespace {\nstruct C {\n};\n}  // namespace\nclass D : public B {\n"
    assert named_types(text) == ["a::B", "a::D"]


def test_a_type_has_one_definition_in_all_libraries():
    files = collections.defaultdict(list)
    for folder in ("schemas", "simulator", "planner", "executor", "device", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".h", ".cc"):
                for name in named_types(path.read_text()):
                    files[name].append(str(path.relative_to(ROOT)))
    assert len(files) > 300
    assert not {name: where for name, where in files.items() if len(where) > 1}

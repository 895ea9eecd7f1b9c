# SPDX-License-Identifier: Apache-2.0
"""Modules of the Python packages import one way: no circle, wherever in a module the import stands."""

import ast
import pathlib

from conftest import ROOT

PYTHON = ROOT / "tools" / "python"


def imported(path: pathlib.Path) -> set[str]:
    """Modules of the project, "shardplan.torch._api.apply"."""
    own = path.relative_to(PYTHON).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*own[: len(own) - node.level], *filter(None, [node.module])] if node.level else [node.module]
            found |= {".".join(base)} | {".".join([*base, alias.name]) for alias in node.names}
    return found


def test_no_module_imports_one_that_imports_it():
    paths = {
        ".".join(path.relative_to(PYTHON).with_suffix("").parts): path
        for path in PYTHON.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: imported(path) & paths.keys() - {name} for name, path in paths.items()}
    assert "shardplan.torch._replay.applied" in graph["shardplan.torch._api.apply"], "imports are seen"
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert not graph, f"in circles, or on the way to one: {sorted(graph)}"

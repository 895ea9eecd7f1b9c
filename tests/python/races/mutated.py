# SPDX-License-Identifier: Apache-2.0
"""Runs a script with edges of PyTorch taken out: `mutated.py NAMES SCRIPT ARGUMENTS`, NAMES of edges.py with commas
between them. The statements go when the module is imported; the installed file stays as it is. The last line names the
edges by whose place the script came."""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import pathlib
import runpy
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from edges import EDGES, Edge  # noqa: E402


_REACHED = "_reached_edges"  # a name that every module sees


class NotThere(Exception):
    """The installed PyTorch has not the statement that an edge names."""


class _TakeOut(ast.NodeTransformer):
    """Puts `edge.instead` for the statement, in one function."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.found = 0
        self.inside: list[str] = []

    def _enter(self, node):
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()
        return node

    visit_ClassDef = visit_FunctionDef = _enter  # noqa: N815

    def generic_visit(self, node):
        super().generic_visit(node)
        if not isinstance(node, ast.stmt) or ".".join(self.inside) != self.edge.where:
            return node
        if ast.unparse(node) != self.edge.statement:
            return node
        self.found += 1
        if self.edge.which not in (-1, self.found - 1):
            return node
        instead = f"{_REACHED}.add({self.edge.name!r}); {self.edge.instead}"
        return [_placed(statement, node) for statement in ast.parse(instead).body]


def _placed(statement: ast.stmt, at: ast.stmt) -> ast.stmt:
    """With the line of what it stands for."""
    for node in ast.walk(statement):
        ast.copy_location(node, at)
    return statement


def without(source: str, edges: list[Edge], path: str) -> ast.Module:
    """The module's tree with the edges taken out. Raises NotThere."""
    tree = ast.parse(source)
    for edge in edges:
        visitor = _TakeOut(edge)
        tree = visitor.visit(tree)
        if visitor.found != edge.count:
            raise NotThere(
                f"{edge.name}: {edge.statement!r} is {visitor.found} times in {edge.where} of {path} (expected "
                f"{edge.count}): this is another PyTorch than the edges are of"
            )
    return tree


def install(edges: list[Edge]) -> None:
    """From here on these modules are imported without the edges."""
    by_module: dict[str, list[Edge]] = {}
    for edge in edges:
        by_module.setdefault(edge.module, []).append(edge)
    if early := by_module.keys() & sys.modules.keys():
        raise NotThere(f"{', '.join(sorted(early))}: imported already")
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self, name: str):
        if name not in by_module:
            return original(self, name)
        path = self.get_filename(name)
        return compile(without(self.get_source(name), by_module[name], path), path, "exec", dont_inherit=True)

    loader.get_code = get_code


def main() -> None:
    names, script, *arguments = sys.argv[1:]
    setattr(builtins, _REACHED, set())
    install([EDGES[name] for name in names.split(",") if name])
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    print("reached", *sorted(getattr(builtins, _REACHED)), flush=True)


if __name__ == "__main__":
    main()

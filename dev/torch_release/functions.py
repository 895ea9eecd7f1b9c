# SPDX-License-Identifier: Apache-2.0
"""FSDP's functions in several releases of torch: a hash of each, and what one release has otherwise than another.

The table `fsdp_functions.txt` holds the hashes of the releases that are planned; `dev/update_fsdp_functions` writes
it."""

from __future__ import annotations

import ast
import difflib
import hashlib
import pathlib
import re
from dataclasses import dataclass

from versions import key

FSDP = "torch/distributed/fsdp"
TABLE = pathlib.Path(__file__).with_name("fsdp_functions.txt")
MODULE = "(module)"  # statements of a file outside its functions and classes
ABSENT = "-"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NOT_COUNTED = {"returns", "annotation", "type_comment", "type_params", "kind"}
_DIGITS = 10

Digests = dict[str, dict[str, str]]  # file -> function -> hash


@dataclass(frozen=True)
class Change:
    file: str
    name: str
    kind: str  # new, gone, changed
    like: tuple[str, ...]  # the other planned releases that have the same


def _normal(node: object, inner: bool = True) -> str:
    """Structure without docstrings, comments and annotations of arguments. A definition inside another one counts by
    its name."""
    if isinstance(node, list):
        return "[" + ",".join(_normal(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if inner and isinstance(node, _DEFINITIONS):
        return f"<{node.name}>"
    fields = []
    for name, value in ast.iter_fields(node):
        annotated = isinstance(node, ast.AnnAssign) and name == "annotation"
        if value is None or value == [] or (name in _NOT_COUNTED and not annotated):
            continue
        if name == "body" and isinstance(node, (*_DEFINITIONS, ast.Module)):
            value = [child for index, child in enumerate(value) if not (index == 0 and _is_docstring(child))]
        if isinstance(node, ast.Module):
            value = [child for child in value if not isinstance(child, (ast.Import, ast.ImportFrom, *_DEFINITIONS))]
        fields.append(f"{name}={_normal(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def definitions(text: str) -> dict[str, list[ast.AST]]:
    """Dotted name -> the functions or classes of that name, as tests/python/conformance/test_coverage_doc.py names
    them."""
    found: dict[str, list[ast.AST]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _DEFINITIONS):
                found.setdefault(prefix + child.name, []).append(child)
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    tree = ast.parse(text)
    found[MODULE] = [tree]
    visit(tree, "")
    return found


def hashes(text: str) -> dict[str, str]:
    """Dotted name -> hash."""

    def digest(nodes: list[ast.AST]) -> str:
        return hashlib.sha256("\n".join(_normal(node, inner=False) for node in nodes).encode()).hexdigest()[:_DIGITS]

    return {name: digest(nodes) for name, nodes in definitions(text).items()}


def of_tree(site_packages: pathlib.Path) -> Digests:
    """All files of FSDP in an installed torch."""
    files = sorted((site_packages / FSDP).rglob("*.py"))
    return {str(file.relative_to(site_packages)): hashes(file.read_text()) for file in files}


def write_table(by_release: dict[str, Digests]) -> str:
    releases = sorted(by_release, key=key)
    lines = [
        '# Hashes of the functions of PyTorch\'s FSDP in the releases that are planned; "-": the release does not '
        'have it.',
        f"# Written by dev/update_fsdp_functions. Columns: {' '.join(releases)}",
    ]
    for file in sorted(set().union(*by_release.values())):
        lines += ["", f"[{file}]"]
        names = dict.fromkeys(name for item in releases for name in by_release[item].get(file, {}))
        lines += [
            " ".join([name, *(by_release[item].get(file, {}).get(name, ABSENT) for item in releases)]) for name in names
        ]
    return "\n".join(lines) + "\n"


def read_table(text: str) -> dict[str, Digests]:
    """Release -> hashes."""
    releases = re.search(r"^#.*Columns: (.*)$", text, re.MULTILINE)[1].split()
    table: dict[str, Digests] = {release: {} for release in releases}
    for line in text.splitlines():
        if line.startswith("["):
            file = line.strip("[]")
        elif line and not line.startswith("#"):
            name, *digests = line.split()
            for release, digest in zip(releases, digests, strict=True):
                if digest != ABSENT:
                    table[release].setdefault(file, {})[name] = digest
    return table


def compare(table: dict[str, Digests], base: str, found: Digests) -> list[Change]:
    """Differences between `found` and the planned release `base`."""
    changes = []
    for file in sorted(table[base].keys() | found.keys()):
        before, now = table[base].get(file, {}), found.get(file, {})
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) == now.get(name):
                continue
            kind = "gone" if name not in now else "new" if name not in before else "changed"
            like = tuple(
                other for other in table if other != base and table[other].get(file, {}).get(name) == now.get(name)
            )
            changes.append(Change(file, name, kind, like))
    return changes


class _Hollow(ast.NodeTransformer):
    """Definitions inside another one lose their bodies: each counts as a function of its own."""

    def _hollow(self, node):
        node.body, node.decorator_list = [ast.Pass()], []
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _hollow


def _own_lines(text: str, name: str) -> list[str]:
    nodes = definitions(text).get(name, [])
    for node in nodes:
        node.body = [_Hollow().visit(child) for child in node.body if not _is_docstring(child)] or [ast.Pass()]
    return [line for node in nodes for line in ast.unparse(node).splitlines()]


def lines_changed(before: str, now: str, name: str) -> str:
    """"+3 -1": lines of the function, or class, that one text has and the other does not."""
    marks = [line[0] for line in difflib.ndiff(_own_lines(before, name), _own_lines(now, name))]
    return f"+{marks.count('+')} -{marks.count('-')}"


def page_rows(page: str) -> dict[tuple[str, str], str]:
    """(file, function) -> what it decides, by docs/reference/pytorch-coverage.md."""
    rows, file = {}, ""
    for line in page.splitlines():
        if heading := re.fullmatch(r"##+ `(torch/[^`]+)`", line):
            file = heading[1]
        elif line.startswith("#"):
            file = ""
        elif file and line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            rows[file, cells[0].strip("`")] = cells[1]
    return rows


def rules(page: str) -> list[tuple[str, str, list[str]]]:
    """(rule, since, the functions of PyTorch where it shows), by docs/reference/pytorch-versions.md."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 6 and re.fullmatch(r"`\w+`", cells[0]) and re.fullmatch(r"\d+\.\d+", cells[1]):
            found.append((cells[0].strip("`"), cells[1], cells[4].strip("`").split(", ")))
    return found


def likeness(table: dict[str, Digests], found: Digests, function: str) -> str:
    """"as in 2.15": the planned releases that have the same function of that name."""

    def digest(files: Digests) -> str:
        return next((digests[function] for digests in files.values() if function in digests), ABSENT)

    now = digest(found)
    same = [release for release in table if digest(table[release]) == now]
    here = "is not there" if now == ABSENT else "is there"
    return f"{here}, as in {' and '.join(same)}" if same else f"{here}, as in no planned release"

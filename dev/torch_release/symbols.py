# SPDX-License-Identifier: Apache-2.0
"""Names of torch that this repository uses and no header or signature promises: symbols, operators, attributes of
private modules.

The names come from the built libraries and from the sources' syntax trees; whether a release has them, its libraries
and its interpreter say."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass, field

_OF_TORCH = re.compile(r"^_Z\w*?(3c10|2at|5torch|4c10d)|^(__)?cuda[A-Z]|^cu[A-Z]|^nccl[A-Z]|^THP")
_OPERATOR = re.compile(r'(?<!starts_with\()"((?:aten|c10d|fsdp|prims)::\w+)"')
_ASKING = {"hasattr", "getattr", "existing"}  # calls that allow for a name that is not there
_PATCHING = {"wrap", "before"}  # shardplan_conformance.patches.Patches: (owner, "name", ...)

# Runs with the release's interpreter: the names that do not resolve.
_PROBE = """
import importlib, json, sys
import torch
names, operators = json.load(sys.stdin)
def resolves(path):
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        return True
    return False
known = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
print(json.dumps([[n for n in names if not resolves(n)], [o for o in operators if o not in known]]))
"""


@dataclass
class Uses:
    dotted: dict[str, str] = field(default_factory=dict)  # torch.a.b -> FILE:LINE
    private: dict[str, str] = field(default_factory=dict)  # attributes of objects of torch: _name -> FILE:LINE
    asked: set[str] = field(default_factory=set)  # names that the sources allow to be absent
    guards: set[str] = field(default_factory=set)  # constants that say whether the release has something
    own: set[str] = field(default_factory=set)  # names that the sources define themselves


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _asks(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _called(node) in _ASKING


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


class _Collector(ast.NodeVisitor):
    """Fills Uses from one file."""

    def __init__(self, uses: Uses, place: str):
        self._uses, self._place = uses, place
        self._bound: dict[str, str] = {}  # name in the file -> dotted path
        self._local: list[set[str]] = []  # names that the functions around bind otherwise
        self._pythons: set[str] = set()  # modules of Python's own library
        self._guarded = 0  # branches around that run only where the release has what they use

    def _use(self, dotted: str, node: ast.AST) -> None:
        if not self._guarded:
            self._uses.dotted.setdefault(dotted, f"{self._place}:{node.lineno}")

    def visit_Import(self, node: ast.Import) -> None:
        self._pythons |= {alias.asname or alias.name.split(".")[0] for alias in node.names} & sys.stdlib_module_names
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self._use(alias.name, node)
                self._bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and not node.level and node.module.split(".")[0] == "torch":
            for alias in node.names:
                self._use(f"{node.module}.{alias.name}", node)
                self._bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _function(self, node) -> None:
        self._uses.own.add(node.name)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self._local.append({a.arg for a in arguments if a} | stored)
        self.generic_visit(node)
        self._local.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._uses.own.add(node.name)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """`aten = torch.ops.aten` binds a name, too."""
        path = self._path(node.value)
        if path and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and not self._local:
            self._bound[node.targets[0].id] = path
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._uses.own.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if path := self._path(node):
            self._use(path, node)
            return
        if _root(node) in self._pythons:
            return
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if own or isinstance(node.ctx, ast.Store):
            self._uses.own.add(node.attr)
        elif node.attr.startswith("_") and not node.attr.startswith("__") and not self._guarded:
            self._uses.private.setdefault(node.attr, f"{self._place}:{node.lineno}")
        self.visit(node.value)

    def _branch(self, node: ast.If | ast.IfExp) -> None:
        guard = any(
            _asks(n) or getattr(n, "attr", getattr(n, "id", "")) in self._uses.guards for n in ast.walk(node.test)
        )
        self.visit(node.test)
        self._guarded += guard
        for child in [*node.body, *node.orelse] if isinstance(node, ast.If) else [node.body, node.orelse]:
            self.visit(child)
        self._guarded -= guard

    visit_If = visit_IfExp = _branch

    def visit_Call(self, node: ast.Call) -> None:
        called = _called(node)
        if called in _ASKING:
            for argument in node.args:
                self._uses.asked |= {
                    n.value for n in ast.walk(argument) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
        if called in _PATCHING and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            if owner := self._path(node.args[0]):
                self._use(f"{owner}.{node.args[1].value}", node)
        self.generic_visit(node)

    def _path(self, node: ast.AST) -> str | None:
        """The dotted path of a chain of attributes that begins at an imported name."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if (
            not isinstance(node, ast.Name)
            or node.id not in self._bound
            or any(node.id in names for names in self._local)
        ):
            return None
        return ".".join([self._bound[node.id], *reversed(attributes)])


def python_uses(files: dict[str, str]) -> Uses:
    """Names that sources use. files: place -> text."""
    trees = {place: ast.parse(text) for place, text in files.items()}
    uses = Uses()
    for node in (node for tree in trees.values() for node in tree.body):
        if isinstance(node, ast.Assign) and any(_asks(n) for n in ast.walk(node.value)):
            uses.guards |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for place, tree in trees.items():
        _Collector(uses, place).visit(tree)
    return uses


def operators(files: dict[str, str]) -> dict[str, str]:
    """Operators that C++ sources name: aten::name -> place."""
    found: dict[str, str] = {}
    for place, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            for name in _OPERATOR.findall(line):
                found.setdefault(name, f"{place}:{number}")
    return found


def words_of(folders: list[pathlib.Path]) -> set[str]:
    """Every private identifier in the Python sources and stubs of packages."""
    files = [path for folder in folders for pattern in ("*.py", "*.pyi") for path in folder.rglob(pattern)]
    return set().union(*(re.findall(r"\b_[a-zA-Z]\w*", path.read_text(errors="replace")) for path in files))


def probe(python: pathlib.Path, names: list[str], ops: list[str]) -> tuple[list[str], list[str]]:
    """The dotted names and operators that this interpreter's torch does not have."""
    done = subprocess.run(
        [python, "-c", _PROBE], input=json.dumps([names, ops]), capture_output=True, text=True, check=True
    )
    missing, unknown = json.loads(done.stdout.strip().splitlines()[-1])
    return missing, unknown


def missing_names(uses: Uses, unresolved: list[str], words: set[str]) -> list[str]:
    """One line for each name that is not there, and that the sources do not allow to be absent."""
    lines = [f"{name} ({uses.dotted[name]})" for name in unresolved if not uses.asked.intersection(name.split("."))]
    absent = {name: place for name, place in uses.private.items() if name not in words | uses.own | uses.asked}
    return lines + [f"attribute {name} ({place})" for name, place in absent.items()]


def names_of(listing: str) -> set[str]:
    """The symbols that `nm` lists. A weak one may be absent."""
    rows = [line.split() for line in listing.splitlines() if line.strip()]
    return {row[-1].split("@")[0] for row in rows if row[-2] not in ("w", "v")}


def _nm(library: pathlib.Path, which: str) -> set[str]:
    return names_of(
        subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    )


def exported(libraries: list[pathlib.Path]) -> set[str]:
    return set().union(*(_nm(library, "--defined-only") for library in libraries))


def needed(library: pathlib.Path) -> set[str]:
    """Symbols that a built library asks of torch, CUDA and NCCL."""
    return {name for name in _nm(library, "--undefined-only") if _OF_TORCH.match(name)}


def demangled(names: list[str]) -> list[str]:
    if not names:
        return []
    return subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()

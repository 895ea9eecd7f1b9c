# SPDX-License-Identifier: Apache-2.0
"""Packages of shardplan.torch: their order, their sizes, and who sets the state of an applied plan."""

import ast
import pathlib

from conftest import ROOT

TORCH = ROOT / "tools" / "python" / "shardplan" / "torch"
ORDER = ("_job", "_model", "_parameters", "_checkpoints", "_plans", "_replay", "_muon", "_calls", "_api")
MOST_FILES, LEAST_FILES, LEAST_LINES = 9, 3, 60


def files(package: str) -> list[pathlib.Path]:
    return sorted((TORCH / package).glob("*.py"))


def packages_imported(path: pathlib.Path) -> set[str]:
    """Packages of shardplan.torch that a file of one of them imports, wherever in the file the import stands."""
    own = path.relative_to(TORCH).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (("shardplan", "torch", *own)[: 2 + len(own) - node.level + 1]) if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[2] for name in names if name.startswith("shardplan.torch.") and name.count(".") >= 2}
    return found & set(ORDER)


def test_every_file_is_in_a_package_of_the_order():
    assert {path.name for path in TORCH.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ORDER)
    assert [path.name for path in TORCH.glob("*.py")] == ["__init__.py"]


def test_imports_are_seen():
    assert packages_imported(TORCH / "_api" / "apply.py") == set(ORDER) - {"_api", "_muon"}


def test_a_package_imports_earlier_ones_alone():
    """So no two of them form a ring."""
    wrong = [
        f"{path.relative_to(TORCH)} imports {target}"
        for number, package in enumerate(ORDER)
        for path in files(package)
        for target in sorted(packages_imported(path))
        if ORDER.index(target) > number
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_have_few_files_and_files_have_something_to_say():
    wrong = [
        f"{package} has {len(files(package))} files"
        for package in ORDER
        if not LEAST_FILES <= len(files(package)) <= MOST_FILES
    ]
    for package in ORDER:
        for path in files(package):
            lines = len(path.read_text().splitlines())
            if path.name != "__init__.py" and lines < LEAST_LINES:
                wrong.append(f"{path.relative_to(TORCH)} has {lines} lines: they belong to the file of their noun")
    assert not wrong, "\n".join(wrong)


def test_the_state_of_an_applied_plan_is_set_by_itself_alone():
    """Other files call its methods."""
    wrong = []
    for package in ORDER:
        for path in files(package):
            for node in ast.walk(ast.parse(path.read_text())):
                targets = (
                    node.targets
                    if isinstance(node, ast.Assign)
                    else [node.target]
                    if isinstance(node, (ast.AugAssign, ast.AnnAssign))
                    else []
                )
                for target in (inner for outer in targets for inner in ast.walk(outer)):
                    if not isinstance(target, ast.Attribute) or not isinstance(target.ctx, ast.Store):
                        continue
                    if ast.unparse(target.value).removesuffix("()").removeprefix("self.").lstrip("_") == "applied":
                        wrong.append(f"{path.relative_to(TORCH)}:{node.lineno} sets {ast.unparse(target)}")
    assert not wrong, "\n".join(wrong)

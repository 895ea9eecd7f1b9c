# SPDX-License-Identifier: Apache-2.0
"""dev/check_torch: versions, comparison of functions, names that the sources use; and that its table is that of the
installed torch."""

import pathlib
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

sys.path.append(str(ROOT / "dev" / "torch_release"))
import functions  # noqa: E402
import running  # noqa: E402
import symbols  # noqa: E402
import versions  # noqa: E402

SITE = pathlib.Path(torch.__file__).parents[1]
INDEX = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.11.0, 2.9.1\n  INSTALLED: 2.15.0"
TABLE = functions.read_table(functions.TABLE.read_text())
FILE = "torch/distributed/fsdp/a.py"


def test_versions_of_the_index_are_read():
    assert versions.listed(INDEX) == ["2.15.0", "2.14.1", "2.11.0", "2.9.1"]
    assert versions.listed("ERROR: no network") == []


@pytest.mark.parametrize(
    "version, why",
    [("2.99.0", "is not on the package index"), ("2.9.1", "is older"), ("2.15", "is not on"), ("../x", "is not on")],
)
def test_a_version_that_nobody_knows_is_an_error_that_lists_those_known(version, why):
    with pytest.raises(versions.BadVersion, match=why) as error:
        versions.check(version, versions.listed(INDEX), "2.11")
    assert str(error.value).endswith("known: 2.15.0, 2.14.1, 2.11.0")


def test_a_version_of_the_index_is_taken():
    versions.check("2.14.1", versions.listed(INDEX), "2.11")


@pytest.mark.parametrize("arguments", [[], ["2.11.0", "--stage", "none"], ["2.11.0", "--cases", "0"]])
def test_wrong_usage_ends_with_2(arguments):
    done = subprocess.run(
        [sys.executable, ROOT / "dev" / "check_torch", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "usage: dev/check_torch" in done.stderr


@pytest.mark.parametrize(
    "version, base", [("2.10.0", "2.11"), ("2.11.0", "2.11"), ("2.14.1", "2.11"), ("2.15.3", "2.15"), ("3.0.0", "2.15")]
)
def test_the_nearest_release_is_the_newest_that_is_not_newer(version, base):
    assert versions.nearest(version, ["2.11", "2.15"]) == base


def test_requirements_are_those_of_the_project_with_another_torch():
    text = (ROOT / "tools" / "requirements.txt").read_text()
    made = versions.requirements(text, "2.13.0").splitlines()
    assert "torch==2.13.0" in made and "cuda-toolkit[crt,cccl]" in made
    assert not any(re.match(r"torch==(?!2\.13\.0)|nvidia-cuda-c", line) for line in made)
    assert [line for line in text.splitlines() if line.startswith("numpy")][0] in made


BEFORE = '''
"""Module."""
import os
LIMIT = 1
class Group:
    """A class."""
    size: int = 2
    def post(self, x: int) -> int:
        """Says."""
        return x  # as it is
    def outer(self):
        def inner(): return 1
        return inner
'''


def test_words_and_annotations_change_no_hash():
    other = (
        BEFORE.replace("A class.", "Another.")
        .replace("Says.", "Speaks.")
        .replace("  # as it is", "")
        .replace("x: int) -> int", "x)")
    )
    assert functions.hashes(other.replace("import os", "import sys")) == functions.hashes(BEFORE)


@pytest.mark.parametrize("old, new, changed", [
    ("return x", "return x + 1", ["Group.post"]),
    ("return 1", "return 2", ["Group.outer.inner"]),
    ("size: int = 2", "size: float = 2", ["Group"]),
    ("LIMIT = 1", "LIMIT = 2", ["(module)"]),
])
def test_a_change_is_that_of_the_innermost_function_alone(old, new, changed):
    before, now = functions.hashes(BEFORE), functions.hashes(BEFORE.replace(old, new))
    assert [name for name in before if before[name] != now[name]] == changed


def test_new_gone_and_changed_functions_are_found():
    table = {"2.11": {FILE: {"f": "1", "g": "1", "h": "1"}}, "2.15": {FILE: {"f": "2", "g": "1", "k": "5"}}}
    found = {FILE: {"f": "2", "h": "7", "k": "4"}}
    change = lambda name, kind, *like: functions.Change(FILE, name, kind, like)  # noqa: E731
    assert functions.compare(table, "2.11", found) == [
        change("f", "changed", "2.15"), change("g", "gone"), change("h", "changed"), change("k", "new"),
    ]
    assert functions.compare(table, "2.15", table["2.15"]) == []
    assert functions.likeness(table, found, "f") == "is there, as in 2.15"
    assert functions.likeness(table, found, "h") == "is there, as in no planned release"
    assert functions.likeness(table, found, "absent") == "is not there, as in 2.11 and 2.15"


def test_lines_of_a_changed_function_are_counted_without_those_inside():
    now = BEFORE.replace("return x", "y = x\n        return y").replace("return 1", "return 2")
    assert functions.lines_changed(BEFORE, now, "Group.post") == "+2 -1"
    assert functions.lines_changed(BEFORE, now, "Group.outer.inner") == "+1 -1"
    assert functions.lines_changed(BEFORE, now, "Group") == "+0 -0"
    assert functions.lines_changed(BEFORE, now, "Gone") == "+0 -0"


def test_a_table_is_read_as_it_was_written():
    by_release = {
        "2.15": {FILE: {"f": "2", "new": "3"}},
        "2.11": {FILE: {"f": "1"}, "torch/distributed/fsdp/b.py": {"g.h": "4"}},
    }
    assert functions.read_table(functions.write_table(by_release)) == by_release


def test_the_table_is_that_of_the_installed_torch():
    release = versions.release(torch.__version__)
    if release not in TABLE:
        pytest.skip(f"torch {release} is not planned")
    assert functions.of_tree(SITE) == TABLE[release], "dev/update_fsdp_functions rewrites the table"


def test_the_table_has_the_releases_that_are_planned(shardplan):
    refused = shardplan("plan", "none.json", "--pytorch", "0").stderr
    assert re.search(r"not in \{(.*)\}", refused)[1].split(",") == list(TABLE)


def test_every_rule_names_functions_of_a_planned_release():
    rules = functions.rules((ROOT / "docs" / "reference" / "pytorch-versions.md").read_text())
    header = (ROOT / "schemas/include/shardplan/schemas/pytorch_rules.h").read_text()
    assert len(rules) == len(re.findall(r"\.rule = &PyTorchRules::", header))
    known = {name for files in TABLE.values() for names in files.values() for name in names}
    # ATen's.
    elsewhere = {
        name for name, policy in re.findall(r'\.name = "(\w+)".*?\.policy = "(\w*)"', header, re.S) if not policy
    }
    assert [place for name, _, places in rules if name not in elsewhere for place in places if place not in known] == []


def test_rows_of_the_coverage_page_are_found():
    rows = functions.page_rows((ROOT / "docs" / "reference" / "pytorch-coverage.md").read_text())
    assert rows["torch/distributed/fsdp/_runtime_utils.py", "_is_fsdp_root"].startswith("Nothing")


SOURCE = '''
import torch
from torch.distributed.fsdp import _state as states
aten = torch.ops.aten
HAS_IT = hasattr(states.State, "maybe")

def use(group, torch_like, states_of):
    torch._C._there(aten.mm.default)
    hooks.wrap(states.State, "method", None)
    if HAS_IT:
        hooks.wrap(states.State, "maybe", None)
    if hasattr(group, "_asked"):
        return group._asked
    return group._groups, own._mine

def shadowed(states):
    states.not_torch

class Own:
    def _mine(self): self._kept = 1
'''


def test_names_that_sources_use_are_collected():
    uses = symbols.python_uses({"a.py": SOURCE})
    assert set(uses.dotted) == {
        "torch", "torch.distributed.fsdp._state", "torch.ops.aten", "torch.distributed.fsdp._state.State",
        "torch._C._there", "torch.ops.aten.mm.default", "torch.distributed.fsdp._state.State.method",
    }
    assert set(uses.private) == {"_groups", "_mine"}


def test_names_of_pythons_own_library_are_not_torchs():
    source = "import concurrent.futures\nimport torch\nconcurrent.futures.thread._WorkItem\ntorch.fx.x()._node\n"
    assert set(symbols.python_uses({"a.py": source}).private) == {"_node"}


def test_missing_names_are_those_that_sources_rely_on():
    uses = symbols.python_uses({"a.py": SOURCE})
    assert symbols.missing_names(uses, ["torch._C._there"], {"_other"}) == [
        "torch._C._there (a.py:8)",
        "attribute _groups (a.py:14)",
    ]
    assert symbols.missing_names(uses, [], {"_groups"}) == []


def test_weak_symbols_are_not_needed():
    listing = (
        "                 U cudaMalloc@libcudart.so.13\n                 w _ZTH3raw\n000000000001 T "
        "_ZN2at3mmE\n000000000002 W _ZN2at3addE\n"
    )
    assert symbols.names_of(listing) == {"cudaMalloc", "_ZN2at3mmE", "_ZN2at3addE"}


def test_operators_of_sources_are_found():
    text = 'x\nf("aten::mm", "aten::add_", "std::y", name.starts_with("aten::new_"));'
    assert symbols.operators({"a.cc": text}) == {
        "aten::mm": "a.cc:2",
        "aten::add_": "a.cc:2",
    }


def test_the_installed_torch_has_every_name_that_the_sources_use():
    sources = ("tools/python/shardplan", "tests/python/shardplan_conformance")
    python = {
        str(path.relative_to(ROOT)): path.read_text() for folder in sources for path in (ROOT / folder).rglob("*.py")
    }
    native = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("executor", "device")
        for path in (ROOT / folder).rglob("*.cc")
    }
    uses, operators = symbols.python_uses(python), symbols.operators(native)
    unresolved, unknown = symbols.probe(pathlib.Path(sys.executable), sorted(uses.dotted), sorted(operators))
    assert unknown == [] and len(uses.dotted) > 200 and len(operators) > 20
    assert symbols.missing_names(uses, unresolved, symbols.words_of([SITE / "torch", SITE / "transformers"])) == []


def test_a_probe_says_what_is_not_there():
    assert symbols.probe(
        pathlib.Path(sys.executable),
        ["torch.nn.Linear", "torch.nn.Nothing", "torch.nothing.x"],
        ["aten::mm", "aten::none"],
    ) == (["torch.nn.Nothing", "torch.nothing.x"], ["aten::none"])


def test_a_junit_file_is_counted_and_its_failures_are_named(tmp_path):
    path = tmp_path / "a.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="t.test_a" name="x"/><testcase classname="t.test_a" '
        'name="y"><failure message="no&#10;more"/>'
        '</testcase><testcase name="z"><skipped/></testcase></testsuite></testsuites>'
    )
    assert running.junit(path) == ("1 passed, 1 failed, 1 skipped", ["test_a::y: no"])


def test_a_report_has_the_table_and_one_line_for_each_difference():
    results = [
        running.Result("build", "builds", 61.2),
        running.Result("functions", "2 differ", 1, ["new: f", "gone: g"]),
    ]
    text = running.report("2.16.0", "2.15", results)
    assert "| build | builds | 61 |" in text and text.endswith("## functions\n- new: f\n- gone: g\n")
    assert running.report("2.15.0", "2.15", results[:1]).endswith("Nothing is different.\n")

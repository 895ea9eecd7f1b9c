# SPDX-License-Identifier: Apache-2.0
"""The stub of the C++ module says all of it: names, members, arguments, types; and type checkers find it."""

import ast
import inspect

import native_stubs
from conftest import ROOT
from shardplan.torch._job.native import native


def test_the_stub_is_what_the_module_says():
    assert native_stubs.STUB.read_text() == native_stubs.text(), "dev/update_stubs writes it"


def test_every_public_name_is_in_it():
    """By another way: the parsed stub against dir()."""
    tree = ast.parse(native_stubs.STUB.read_text())
    names = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = {member.name for member in node.body if isinstance(member, ast.FunctionDef)} - {
                "__init__"
            }
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = {argument.arg for argument in node.args.args}
        elif isinstance(node, ast.AnnAssign):
            names[node.target.id] = None
    public = {name for name in dir(native) if not name.startswith("_")} | {"__version__"}
    assert set(names) == public
    for name in public - {"__version__"}:
        value = getattr(native, name)
        if inspect.isclass(value):
            assert names[name] == {member for member in dir(value) if not member.startswith("_")}, name
        else:
            for argument in names[name]:
                assert f"{argument}:" in value.__doc__, (name, argument)


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "tools" / "python" / "shardplan" / "py.typed").exists()
    install = (ROOT / "cmake" / "Install.cmake").read_text() + (ROOT / "pyproject.toml").read_text()
    assert install.count("_shardplan-stubs") == 2 and "py.typed" in install

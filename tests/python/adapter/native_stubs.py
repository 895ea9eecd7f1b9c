# SPDX-License-Identifier: Apache-2.0
"""The stub of the C++ module, made of what pybind11 says of it: tools/python/_shardplan-stubs. `dev/update_stubs`
writes it, a test compares."""

import pathlib
import re
import types

from shardplan.torch._job.native import native

STUB = pathlib.Path(__file__).resolve().parents[3] / "tools" / "python" / "_shardplan-stubs" / "__init__.pyi"
_HEAD = '''"""The compiled half of shardplan.torch. Written by dev/update_stubs from the module itself."""

import collections.abc
import typing

import torch
import torch.distributed.distributed_c10d

'''
_OBJECT = {"object": "typing.Any", "list": "list[typing.Any]", "tuple": "tuple[typing.Any, ...]"}


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__version__"


def _types(signature: str) -> str:
    signature = signature.replace("_shardplan.", "")
    # torch 2.15's pybind11 adds this: one stub for every release.
    signature = signature.replace(" | typing.SupportsIndex", "")
    return re.sub(r"\b(object|list|tuple)\b(?!\[|\()", lambda found: _OBJECT[found.group()], signature)


def _function(name: str, doc: str, indent: str) -> str:
    signature, _, about = doc.partition("\n")
    if not signature.startswith(f"{name}("):
        raise ValueError(f"{name} has no signature: {doc!r}")
    first = re.sub(r"self: \w+(\.\w+)?", "self", signature[len(name) :])
    body = f'\n{indent}    """{about.strip()}"""' if about.strip() else ""
    return f"{indent}def {name}{_types(first)}:{body or ' ...'}\n"


def _class(name: str, kind: type) -> str:
    lines = []
    for member, value in sorted(vars(kind).items()):
        if isinstance(value, property) and _is_public(member):
            result = _types(value.fget.__doc__.strip().rpartition("-> ")[2])
            lines.append(f"    @property\n    def {member}(self) -> {result}: ...\n")
            if value.fset is not None:
                given = _types(re.search(r", arg\d: (.*)\) -> None", value.fset.__doc__).group(1))
                lines.append(f"    @{member}.setter\n    def {member}(self, value: {given}) -> None: ...\n")
        elif (_is_public(member) or member == "__init__") and (value.__doc__ or "").startswith(f"{member}(self"):
            lines.append(_function(member, value.__doc__, "    "))
        elif _is_public(member) and callable(value):
            raise ValueError(f"{name}.{member} has no signature")
    return f"class {name}:\n" + ("".join(lines) or "    ...\n")


def text() -> str:
    parts = [_HEAD]
    for name in sorted(filter(_is_public, vars(native))):
        value = getattr(native, name)
        if isinstance(value, type):
            parts.append(_class(name, value))
        elif isinstance(value, (types.BuiltinFunctionType, types.FunctionType)):
            parts.append(_function(name, value.__doc__, ""))
        elif not isinstance(value, types.ModuleType):
            parts.append(f"{name}: {type(value).__name__}\n")
    return parts[0] + "\n".join(parts[1:])


if __name__ == "__main__":
    from shardplan.files import write_text

    write_text(STUB, text())

# SPDX-License-Identifier: Apache-2.0
"""The front page and the guide: every command that a page shows with a prompt prints what the page says.

A block begins a command with "$ "; a line that ends in a backslash goes on. Its output follows, "..." stands for any
lines. Commands of a page run in one folder, in their order, with the repository's `tools` and `examples` in it. A
comment `<!-- files: NAME=PATH ... -->` puts files of the repository there under a name. A Python block that begins with
"# NAME.py" is that file; a C++ block that begins with "// NAME" and a CMake block that begins with "# CMakeLists.txt"
likewise. All other C++ blocks of a page with a CMakeLists.txt are compiled, too, each as the body of a function
(CONTEXT). PREFIX is a folder with shardplan installed.
"""

import gzip
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder, free_port

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """(command, expected lines) of the blocks with prompts."""
    found = []
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        if not any(line.startswith("$ ") for line in lines):
            continue
        continued = False
        for line in lines:
            if continued:
                found[-1] = (found[-1][0] + " " + line.strip().rstrip("\\").rstrip(), [])
            elif line.startswith("$ "):
                found.append((line[2:].rstrip("\\").rstrip(), []))
            else:
                found[-1][1].append(line.rstrip())
                continue
            continued = line.endswith("\\")
    return found


# What a snippet may use. A block that begins with "struct" stands at namespace scope.
CONTEXT = """
#include <csignal>
#include <map>
#include <optional>
#include <stdexcept>
#include <torch/optim/adamw.h>
#include "model.h"
#include "shardplan/executor/trace_recorder.h"
#include "shardplan/executor/training.h"
namespace executor = shardplan::executor;
at::Tensor Loss(Net& net, const at::Tensor& points, const at::Tensor& kinds);
extern volatile std::sig_atomic_t told_to_end;
"""
ARGUMENTS = (
    "Net& net, executor::Training& training, torch::optim::AdamW& optimizer, const at::Tensor& points, const "
    "at::Tensor& kinds, "
    "int64_t& step, std::map<std::string, at::Tensor>& extra, shardplan::Status& saving"
)


def files_of(text: str) -> dict[str, str]:
    """The files that a page shows, and the snippets of a page with a CMakeLists.txt as a part of its project."""
    files = dict(
        re.findall(
            r"^```(?:python|cpp|cmake)\n(?:#|//) (\w+\.(?:py|h|cc|txt))\n(.*?)^```", text, re.MULTILINE | re.DOTALL
        )
    )
    if "CMakeLists.txt" not in files:
        return {name: code for name, code in files.items() if name.endswith(".py")}
    source = CONTEXT
    for i, block in enumerate(re.findall(r"^```cpp\n(?!// \w+\.(?:h|cc)\n)(.*?)^```", text, re.MULTILINE | re.DOTALL)):
        source += block if block.startswith("struct") else f"void Snippet{i}({ARGUMENTS}) {{ {{\n{block}}} }}\n"
    files["CMakeLists.txt"] += (
        "add_library(snippets OBJECT snippets.cc)\ntarget_link_libraries(snippets PRIVATE shardplan::training)\n"
    )
    return files | {"snippets.cc": source}


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> pathlib.Path:
    prefix = tmp_path_factory.mktemp("installed")
    subprocess.run(
        ["cmake", "--install", str(build_folder()), "--prefix", str(prefix)], check=True, stdout=subprocess.DEVNULL
    )
    return prefix


def agree(expected: list[str], printed: list[str]) -> bool:
    pattern = "".join(r"(?:.*\n)*" if line.strip() == "..." else re.escape(line) + r"\n" for line in expected)
    return re.fullmatch(pattern, "".join(line.rstrip() + "\n" for line in printed)) is not None


TESTED = [page for page in PAGES if commands_of(page.read_text())]


def test_pages_have_commands():
    assert {page.name for page in TESTED} >= {"README.md", "getting-started.md", "prediction.md"}


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        (["a", "..."], ["a", "b", "c"], True),
        (["a", "...", "c"], ["a", "c"], True),
        (["a"], ["a", "b"], False),
        (["a", "..."], ["b"], False),
        (["..."], [], True),
        (["a.c"], ["abc"], False),
    ],
)
def test_dots_stand_for_any_lines(expected, printed, same):
    assert agree(expected, printed) == same


@pytest.mark.parametrize("page", TESTED, ids=lambda page: page.name)
def test_commands_print_what_the_page_says(page, tmp_path, request):
    text = page.read_text()
    for name in ("tools", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for entry in " ".join(re.findall(r"<!-- files: (.*?) -->", text)).split():
        name, _, path = entry.partition("=")
        if path.endswith(".gz") and not name.endswith(".gz"):
            (tmp_path / name).write_bytes(gzip.decompress((ROOT / path).read_bytes()))
        else:
            shutil.copy(ROOT / path, tmp_path / name)
    for name, code in files_of(text).items():
        (tmp_path / name).write_text(code)
    environment = os.environ | {
        "SHARDPLAN_BUILD": str(build_folder()), "SHARDPLAN_PYTHON": sys.executable,
        "PATH": f"{build_folder() / 'bin'}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    environment |= {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    if "$PREFIX" in text:
        environment["PREFIX"] = str(request.getfixturevalue("installed"))
    for command, expected in commands_of(text):
        command = command.replace("tools/shardplan", "shardplan")
        # Progress is for who watches; what a command says at its end is on either stream.
        done = subprocess.run(
            ["bash", "-c", f"{command} 2>stderr"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=280,
            check=False,
        )
        said = (tmp_path / "stderr").read_text()
        printed = done.stdout.splitlines()
        if expected and not printed:
            printed, expected = said.splitlines(), ["...", *expected]
        assert done.returncode in (0, 1), f"{command}: {done.returncode}\n{said}"
        assert not expected or agree(expected, printed), f"{command} prints\n" + "\n".join(printed)

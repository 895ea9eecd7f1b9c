# SPDX-License-Identifier: Apache-2.0
"""`shardplan.building`: one compile for the processes of a node, kept by what it depends on, and errors that say what
to do. The package is the real one, beside sources and a torch that are small; the adapter itself is compiled so by
dev/wheels."""

import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

SOURCES = {
    # Each configure leaves a line, so that compiles are counted.
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.25)
project(small CXX)
file(APPEND "$ENV{COUNTED}" "once\\n")
add_library(_shardplan MODULE module.cc)
set_target_properties(_shardplan PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/python)
add_executable(shardplan-run run.cc)
set_target_properties(shardplan-run PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(shardplan_device SHARED EXCLUDE_FROM_ALL module.cc)
add_library(shardplan_device_kernels SHARED EXCLUDE_FROM_ALL module.cc)
set_target_properties(shardplan_device shardplan_device_kernels PROPERTIES LIBRARY_OUTPUT_DIRECTORY \
${CMAKE_BINARY_DIR}/device)
file(WRITE ${CMAKE_BINARY_DIR}/device/torch_version "2.15.0\n")
""",
    "module.cc": "int answer() { return 42; }\n",
    "run.cc": (
        "#include <cstdio>\nint main(int count, char** words) { for (int i = 1; i < count; ++i) std::puts(words[i]); "
        "}\n"
    ),
}
TORCH = {
    "__init__.py": "from .version import __version__\n",
    "version.py": "__version__ = '2.15.0+cpu'\ngit_version = 'abc'\ncuda = None\n",
}
ASK = (
    "from shardplan.building import *\ntry:\n  b = built()\n  print(b.module)\nexcept NotBuilt as error:\n  "
    "print('NotBuilt:', error)\n"
)


@pytest.fixture
def place(tmp_path):
    """A wheel's package in `site`, with the small sources."""
    site = tmp_path / "site"
    shutil.copytree(
        ROOT / "tools" / "python" / "shardplan",
        site / "shardplan",
        ignore=shutil.ignore_patterns("__pycache__", "torch", "tracer"),
    )
    sources = site / "shardplan" / "building" / "sources"
    (sources / "lib" / platform.machine()).mkdir(parents=True)
    for folder, files in ((sources, SOURCES), (site / "torch", TORCH)):
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    return tmp_path


def environment(place, **more):
    own = {name: value for name, value in os.environ.items() if not name.startswith("SHARDPLAN_") and name != "CXX"}
    return (
        own
        | {
            "PYTHONPATH": str(place / "site"), "SHARDPLAN_CACHE": str(place / "cache"),
            "COUNTED": str(place / "counted"),
        }
        | more
    )


def start(place, code=ASK, **more):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(place, **more),
    )


def ask(place, **more):
    said, errors = (process := start(place, **more)).communicate(timeout=280)
    assert process.returncode == 0, errors
    return said.strip(), errors


def compiled(place):
    return len((place / "counted").read_text().splitlines()) if (place / "counted").exists() else 0


def test_ranks_that_come_together_compile_once(place):
    ranks = [start(place) for _ in range(4)]
    said = [rank.communicate(timeout=280) for rank in ranks]
    assert {out for out, _ in said} == {said[0][0]} and said[0][0].endswith(".so\n"), said
    assert compiled(place) == 1
    assert sum("compiling the adapter for torch 2.15.0+cpu" in errors for _, errors in said) == 1
    (folder,) = (path for path in (place / "cache" / "built").iterdir() if path.is_dir())
    assert sorted(path.name for path in folder.iterdir()) == ["_shardplan.so", "built.json", "shardplan-run"]
    assert ask(place)[0] == said[0][0].strip() and compiled(place) == 1  # and is kept


def test_the_device_is_compiled_apart_for_a_torch_with_cuda(place):
    device = ASK.replace("b = built()\n  print(b.module)", "print(built_device())")
    said = ask(place, code=device)[0]
    assert (
        said.startswith("NotBuilt: torch 2.15.0+cpu is built without CUDA")
        and "pip install torch==2.15.0 (no GPU is needed)" in said
    )
    (place / "site" / "torch" / "version.py").write_text(
        "__version__ = '2.15.0+cu130'\ngit_version = 'abc'\ncuda = '13.0'\n"
    )
    folder = pathlib.Path(ask(place, code=device)[0])
    there = ["built.json", "libshardplan_device.so", "libshardplan_device_kernels.so", "torch_version"]
    assert sorted(path.name for path in folder.iterdir()) == there
    assert ask(place, code=device)[0] == str(folder) and compiled(place) == 1
    assert pathlib.Path(ask(place)[0]).parent != folder and compiled(place) == 2


def test_what_is_kept_belongs_to_sources_torch_and_compiler(place):
    first = ask(place)[0]
    (place / "site" / "torch" / "version.py").write_text(
        "__version__ = '2.15.0+cpu'\ngit_version = 'of another size: bytecode is kept by second and size'\ncuda = "
        "None\n"
    )
    second = ask(place)[0]
    (place / "site" / "shardplan" / "building" / "sources" / "module.cc").write_text("int answer() { return 43; }\n")
    third = ask(place)[0]
    wrapped = place / "g++-mine"
    wrapped.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "g++ (mine) 12.9.9" && exit\nexec g++ "$@"\n')
    wrapped.chmod(0o755)
    fourth = ask(place, CXX=str(wrapped))[0]
    assert len({first, second, third, fourth}) == 4 and compiled(place) == 4


def test_a_machine_without_a_compiler_takes_what_another_kept(place):
    first = ask(place)[0]
    empty = place / "empty"
    empty.mkdir()
    assert ask(place, PATH=str(empty))[0] == first
    shutil.rmtree(place / "cache")
    said = ask(place, PATH=str(empty))[0]
    assert said.startswith("NotBuilt: no C++ compiler is found: g++ 12 or later is needed (apt-get install g++-12")


def test_what_fails_fails_once_for_all_and_is_tried_anew_later(place):
    source = place / "site" / "shardplan" / "building" / "sources" / "module.cc"
    source.write_text("int answer() { return fourty_two; }\n")
    ranks = [start(place) for _ in range(3)]
    said = {rank.communicate(timeout=280)[0] for rank in ranks}
    assert len(said) == 1 and compiled(place) == 1
    (text,) = said
    assert text.startswith("NotBuilt: the adapter does not compile: ") and "fourty_two" in text
    log = text.split("(the whole log: ")[1].rstrip(")\n")
    assert "fourty_two" in open(log).read()
    assert not [path for path in (place / "cache" / "built").iterdir() if path.is_dir()]
    time.sleep(0.05)
    assert ask(place)[0] == text.strip() and compiled(place) == 2


def test_what_cmake_asks_for_is_told(place):
    sources = place / "site" / "shardplan" / "building" / "sources"
    (sources / "CMakeLists.txt").write_text(
        SOURCES["CMakeLists.txt"] + 'message(FATAL_ERROR "headers are not found: pip install them")\n'
    )
    assert "NotBuilt: the adapter does not compile: headers are not found: pip install them" in ask(place)[0]


def test_a_compile_that_is_killed_leaves_nothing_in_the_way(place):
    sources = place / "site" / "shardplan" / "building" / "sources"
    text = (sources / "CMakeLists.txt").read_text()
    (sources / "CMakeLists.txt").write_text(
        text + 'if(EXISTS "$ENV{SLOW}")\n  execute_process(COMMAND sleep 120)\nendif()\n'
    )
    (place / "slow").write_text("")
    rank = start(place, SLOW=str(place / "slow"))
    while compiled(place) == 0:
        time.sleep(0.05)
        assert rank.poll() is None
    rank.send_signal(signal.SIGKILL)
    rank.communicate()
    assert [path for path in (place / "cache" / "built").iterdir() if ".part" in path.name]
    (place / "slow").unlink()
    said = ask(place, SLOW=str(place / "slow"))[0]
    assert said.endswith(".so") and not [path for path in (place / "cache" / "built").iterdir() if ".part" in path.name]


@pytest.mark.parametrize("name", ["_shardplan.so", "shardplan-run", "built.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "emptied", "removed"])
def test_what_is_damaged_is_compiled_again(place, name, damage):
    """A part of a module ends the process that loads it without a word."""
    module = ask(place)[0]
    path = pathlib.Path(module).with_name(name)
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        middle = len(data) // 2
        path.write_bytes(
            {
                "truncated": data[:middle], "changed": data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :],
                "emptied": b"",
            }[damage]
        )
    assert ask(place)[0] == module and path.read_bytes() == data and compiled(place) == 2


def test_the_compiler_ends_with_the_process_that_started_it(place):
    """However it ends: a launcher's SIGTERM and SIGKILL leave no compilers behind, which take gigabytes."""
    slow = place / "g++-slow"
    slow.write_text(
        f'#!/bin/sh\ncase " $* " in *module.cc*) echo $$ >{place}/compiler; exec sleep 120;; esac\nexec g++ "$@"\n'
    )
    slow.chmod(0o755)
    for number in (signal.SIGKILL, signal.SIGTERM):
        rank = start(place, CXX=str(slow))
        deadline = time.monotonic() + 120
        while not ((place / "compiler").exists() and (place / "compiler").read_text().strip()):
            assert rank.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        compiler_id = int((place / "compiler").read_text())
        rank.send_signal(number)
        rank.communicate()
        while os.path.exists(f"/proc/{compiler_id}") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{compiler_id}")
        (place / "compiler").unlink()


def test_the_last_word_is_told_where_nobody_complains(place):
    from shardplan.building.compile import _complaint

    log = place / "log"
    log.write_text("ninja: Entering directory `work'\n[1/2] Building\nninja: build stopped: interrupted by user.\n")
    assert _complaint(log) == "ninja: build stopped: interrupted by user."


def test_a_folder_that_cannot_be_written_is_an_error_with_a_way_out(place):
    (place / "file").write_text("")
    said = ask(place, SHARDPLAN_CACHE=str(place / "file" / "cache"))[0]
    assert (
        said.startswith("NotBuilt: what is compiled cannot be kept in ")
        and "set SHARDPLAN_CACHE to a folder that can be written" in said
    )


def test_one_that_is_kept_is_read_where_nothing_can_be_written(place):
    first = ask(place)[0]
    for path in (place / "cache" / "built").iterdir():
        if path.is_file():
            path.unlink()  # the lock would be made anew
    code = (
        "import builtins, os, fcntl\ndef refuse(*_): raise OSError(30, 'Read-only file system')\nos.mkdir = "
        "fcntl.flock = refuse\n"
        + ASK
    )
    said, errors = (process := start(place, code)).communicate(timeout=280)
    assert process.returncode == 0 and said.strip() == first, errors


def test_a_wheel_of_another_machine_is_named(place):
    lib = place / "site" / "shardplan" / "building" / "sources" / "lib"
    (lib / platform.machine()).rename(lib / "riscv64")
    assert (
        ask(place)[0]
        == (
            f"NotBuilt: this shardplan is for riscv64 (found {platform.machine()}, linux): pip install "
            "--force-reinstall shardplan"
        )
    )


def test_a_torch_that_is_too_old_is_not_compiled_for(place):
    (place / "site" / "torch" / "__init__.py").write_text("from . import version\n__version__ = '2.10.1+cpu'\n")
    assert (
        ask(place)[0] == "NotBuilt: torch 2.11 or later is needed (found 2.10.1+cpu): pip install 'shardplan[torch]'"
        and compiled(place) == 0
    )


def compiler(folder, name, version, says=None):
    path = folder / name
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "{says or f"g++ (Some) {version}"}"\n[ "$1" = -dumpfullversion ] && '
        f'echo {version}\nexit 0\n'
    )
    path.chmod(0o755)
    return str(path)


def find(place, **more):
    code = (
        "from shardplan.building import machine, NotBuilt\ntry: print(machine.find_compiler().path)\nexcept NotBuilt "
        "as e: print(e)"
    )
    return start(place, code, PATH=str(place / "bin"), **more).communicate(timeout=280)[0].strip()


def test_the_compiler_is_the_first_that_is_new_enough(place):
    (place / "bin").mkdir()
    old = compiler(place / "bin", "g++", "11.4.0")
    said = find(place)
    assert said.startswith(
        f"{old} is g++ 11.4.0, which is too old: g++ 12 or later is needed (apt-get install g++-12, "
    )
    twelve = compiler(place / "bin", "g++-12", "12.3.0")
    assert find(place) == twelve  # Ubuntu 22.04, once it is installed
    thirteen = compiler(place / "bin", "g++-13", "13.1.0")
    assert find(place) == thirteen
    assert find(place, CXX="g++-12") == twelve
    compiler(place / "bin", "g++", "12.2.0")
    assert find(place) == old  # the same path, which is new enough now
    clang = compiler(place / "bin", "clang++", "4.2.1", says="clang version 19")
    assert find(place, CXX=clang).startswith(f"{clang} is no g++ (found clang version 19): ")
    assert find(place, CXX="none").startswith("CXX names none, which is not found: ")


def doctor(place, *arguments, **more):
    code = (
        f"import sys; sys.argv = ['doctor', *{list(arguments)!r}]\nfrom shardplan.doctor import cli\ncli.CHECKS = [c "
        "for c in cli.CHECKS if c.name == 'shardplan.torch']\nsys.exit(cli.main())"
    )
    process = start(place, code, **more)
    said, _ = process.communicate(timeout=280)
    return process.returncode, said


def test_doctor_says_what_is_not_compiled_and_compiles_it(place):
    package = place / "site" / "shardplan" / "torch"  # one that finds the module
    (package / "_job").mkdir(parents=True)
    for folder in (package, package / "_job"):
        (folder / "__init__.py").write_text("")
    (package / "_job" / "native.py").write_text(
        "import types\nfrom shardplan.building import built\nnative = types.SimpleNamespace(__version__='0', "
        "__file__=built().module)\n"
    )
    code, said = doctor(place)
    assert code == 0 and "not compiled yet" in said and "shardplan doctor --build" in said and compiled(place) == 0
    code, said = doctor(place, "--build")
    assert code == 0 and said.startswith("ok    shardplan.torch") and compiled(place) == 1
    (place / "site" / "shardplan" / "building" / "sources" / "module.cc").write_text("wrong\n")
    code, said = doctor(place, "--build")
    assert (
        code == 4
        and said.startswith("FAIL  shardplan.torch  the adapter does not compile: ")
        and said.endswith("not ready: shardplan.torch\n")
    )
    code, said = doctor(place, PATH=str(place))
    assert code == 4 and "no C++ compiler is found" in said


def test_run_starts_the_program_of_the_torch_at_hand(place):
    process = subprocess.run(
        [sys.executable, "-m", "shardplan.building", "plan.json", "--steps", "2"],
        capture_output=True,
        text=True,
        env=environment(place),
        timeout=280,
        check=False,
    )
    assert (process.returncode, process.stdout) == (0, "plan.json\n--steps\n2\n"), process.stderr
    shutil.rmtree(place / "site" / "torch")
    code = (
        "import importlib.util as u, runpy; f = u.find_spec\nu.find_spec = lambda n, *a: None if n == 'torch' else "
        "f(n, *a)\nrunpy.run_module('shardplan.building', run_name='__main__')"
    )
    process = start(place, code)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 4 and "shardplan run: torch is not installed: pip install 'shardplan[torch]'" in errors


def test_the_record_says_what_it_was_compiled_for(place):
    module = ask(place)[0]
    with open(os.path.join(os.path.dirname(module), "built.json")) as file:
        facts = json.load(file)["facts"]
    assert "2.15.0+cpu" in facts and "abc" in facts and any("g++" in fact for fact in facts)

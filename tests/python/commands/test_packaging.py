# SPDX-License-Identifier: Apache-2.0
"""The torch that a build takes, and the targets that find_package finds without one."""

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tomllib

import pytest
from conftest import ROOT, build_folder, installed_pytorch

sys.path += [str(ROOT / "cmake"), str(ROOT / "dev" / "torch_release")]
import wheel  # noqa: E402
import wheel_metadata  # noqa: E402

from shardplan import installing, versions  # noqa: E402


def interpreter(folder: pathlib.Path, name: str, has_torch: bool) -> pathlib.Path:
    """A program that answers as Python does when it is asked where torch is."""
    made = folder / name
    torch = made / "site-packages" / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '2.15.0+cpu'\n")
    (torch / "lib" / "libtorch_cpu.so").touch()
    python = made / "python3"
    python.write_text(f"#!/bin/sh\nprintf %s '{torch if has_torch else ''}'\n")
    python.chmod(0o755)
    return python


def configured(folder: pathlib.Path, path: pathlib.Path, *definitions: str) -> str:
    """The torch that FindTorchWheel of a copied source tree takes."""
    source = folder / "source"
    (source / "cmake").mkdir(parents=True, exist_ok=True)
    (source / "cmake" / "FindTorchWheel.cmake").write_text((ROOT / "cmake" / "FindTorchWheel.cmake").read_text())
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES NONE)\nset(CMAKE_FIND_LIBRARY_PREFIXES lib)\n"
        "set(CMAKE_FIND_LIBRARY_SUFFIXES .so)\nlist(APPEND CMAKE_MODULE_PATH "
        "${CMAKE_CURRENT_LIST_DIR}/cmake)\nfind_package(TorchWheel)\n"
        'message(STATUS "torch of <${TorchWheel_DIR}>")\n'
    )
    build = folder / f"build{len(list(folder.iterdir()))}"
    done = subprocess.run(
        ["cmake", "-S", source, "-B", build, "-G", "Ninja", *definitions], capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return pathlib.Path(done.stdout.split("torch of <")[1].split(">")[0]).parents[1].name


def test_the_interpreter_that_builds_a_wheel_is_asked_first(tmp_path):
    on_path = interpreter(tmp_path, "on_path", has_torch=True)
    pips = interpreter(tmp_path, "pips", has_torch=True)
    without = interpreter(tmp_path, "without", has_torch=False)
    given = interpreter(tmp_path, "given", has_torch=True)
    path = on_path.parent
    assert configured(tmp_path, path) == "on_path"
    # scikit-build-core gives these for a virtual environment that is not on PATH.
    assert configured(tmp_path, path, f"-DPython3_EXECUTABLE={pips}") == "pips"
    assert configured(tmp_path, path, f"-DPython_EXECUTABLE={pips}") == "pips"
    assert configured(tmp_path, path, f"-DPython3_EXECUTABLE={without}") == "on_path"
    assert configured(tmp_path, path, f"-DPython3_EXECUTABLE={pips}", f"-DSHARDPLAN_PYTHON={given}") == "given"
    venv = tmp_path / "source" / ".venv"
    venv.mkdir()
    (venv / "bin").symlink_to(interpreter(tmp_path, "projects", has_torch=True).parent)
    assert configured(tmp_path, path) == "projects"
    assert configured(tmp_path, path, f"-DPython3_EXECUTABLE={pips}") == "pips"


def test_the_replayer_is_found_without_torch(tmp_path):
    if not (build_folder() / "bin" / "shardplan-run").exists():
        pytest.skip("no executor in this build")
    subprocess.run(
        ["cmake", "--install", build_folder(), "--prefix", tmp_path / "installed"], check=True, capture_output=True
    )
    python = tmp_path / "installed" / "share" / "shardplan" / "python"
    assert (python / "shardplan" / "py.typed").exists() and (python / "_shardplan-stubs" / "__init__.pyi").exists()
    for component in ("replay", "executor"):
        source = tmp_path / component
        source.mkdir()
        (source / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES CXX)\nset(CMAKE_CXX_STANDARD 23)\n"
            f"find_package(shardplan REQUIRED COMPONENTS {component})\nadd_executable(x "
            "x.cc)\ntarget_link_libraries(x shardplan::replay)\n"
            "if(TARGET shardplan::executor)\n  message(FATAL_ERROR there)\nendif()\n"
        )
        (source / "x.cc").write_text(
            '#include "shardplan/executor/virtual_backend.h"\nint main() { return &shardplan::executor::ReplayFiller '
            '== nullptr; }\n'
        )
        configure = [
            "cmake", "-S", source, "-B", source / "build", "-G", "Ninja",
            f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'}",
        ]
        done = subprocess.run(
            [*configure, "-DSHARDPLAN_PYTHON=/bin/false"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert ("shardplan::executor is not" in done.stdout) == (component == "executor")
    subprocess.run(["cmake", "--build", tmp_path / "replay" / "build"], check=True, capture_output=True)
    subprocess.run([tmp_path / "replay" / "build" / "x"], check=True)


def test_a_module_that_is_built_with_another_torch_is_named(tmp_path):
    module = tmp_path / "python" / f"_shardplan{sysconfig.get_config_var('EXT_SUFFIX')}"
    module.parent.mkdir()
    module.write_text("not a library")
    done = subprocess.run(
        [sys.executable, "-c", "import shardplan.torch"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools" / "python"), "SHARDPLAN_BUILD": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{module.parent} does not load with torch" in done.stderr and "is built with another torch" in done.stderr


def test_the_version_is_one():
    version = re.search(r"project\(shardplan VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert versions.__version__ == version
    assert re.search(r"^## ([0-9.]+) ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


BOUNDS = [">=2.11", "<2.16"]


@pytest.mark.parametrize(("release", "version", "torch"), [
    ("2.15", "0.1.0+torch2.15", "torch==2.15.*"),
    ("2.11", "0.1.0+torch2.11", "torch==2.11.*"),
    (None, "0.1.0", "torch>=2.11,<2.16"),
])  # fmt: skip
def test_a_wheel_is_named_by_its_torch_and_requires_that(release, version, torch):
    made = wheel_metadata.adapter("0.1.0", release, BOUNDS, ["numpy"])
    assert made == {"version": version, "dependencies": ["shardplan==0.1.0", torch, "numpy"]}


@pytest.mark.parametrize("release", ["2.9", "2.10", "2.16", "3.0"])
def test_no_wheel_is_built_with_a_torch_that_is_not_supported(release):
    with pytest.raises(
        RuntimeError, match=f"torch {release} is installed, and shardplan is built with torch>=2.11,<2.16"
    ):
        wheel_metadata.adapter("0.1.0", release, BOUNDS, [])


def pyproject(folder: pathlib.Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def settings_of(folder: pathlib.Path) -> dict:
    """Settings of the provider of the wheel's metadata."""
    settings = pyproject(folder)["tool"]["dynamic-metadata"][0]
    assert settings["provider"]["module"] == wheel_metadata.__name__
    assert (
        folder / settings["provider"]["path"] / "wheel_metadata.py"
    ).resolve() == ROOT / "cmake" / "wheel_metadata.py"
    return settings


def test_the_wheels_metadata_are_those_of_the_project_and_the_interpreter():
    core = wheel_metadata.dynamic_metadata(settings_of(ROOT), {})
    made = wheel_metadata.dynamic_metadata(settings_of(ROOT / "executor"), {})
    version = core["version"]
    assert (
        core["readme"]["content-type"] == "text/markdown" and made["version"] == f"{version}+torch{installed_pytorch()}"
    )
    assert made["dependencies"] == [f"shardplan=={version}", f"torch=={installed_pytorch()}.*", "numpy"]
    shown = subprocess.run(
        [build_folder() / "bin" / "shardplan", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert version in shown


def test_both_wheels_name_one_range_of_torch():
    bounds = settings_of(ROOT / "executor")["torch"]
    assert pyproject(ROOT)["project"]["optional-dependencies"]["torch"][0] == f"torch{','.join(bounds)}"
    lowest, highest = (".".join(map(str, release)) for release in installing.TORCH_RELEASES)
    assert (
        bounds[0] == f">={lowest}"
        and wheel_metadata._is_within(highest, bounds)
        and not wheel_metadata._is_within(f"2.{int(highest[2:]) + 1}", bounds)
    )


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--output"], ["--none"]])
def test_wrong_usage_of_the_wheels_script_ends_with_2(arguments):
    done = subprocess.run(
        [sys.executable, ROOT / "dev" / "wheels", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "usage: dev/wheels" in done.stderr


def test_a_wheel_is_tried_without_the_checkout(monkeypatch):
    for name in ("PYTHONPATH", "SHARDPLAN_BUILD", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, str(ROOT))
    monkeypatch.setenv("PATH", os.pathsep.join([str(ROOT / ".venv" / "bin"), "/usr/bin"]))
    environment = wheel.clean_environment("/fresh/bin")
    assert environment["PATH"] == "/fresh/bin:/usr/bin"
    assert not [name for name in environment if name.startswith(("PYTHON", "SHARDPLAN", "VIRTUAL_ENV"))]


def test_a_wheel_needs_libraries_of_torch_and_of_the_system_alone():
    present = [
        "libtorch_cpu.so", "libtorch_python.so", "libc10_cuda.so", "libcudart.so.13", "libnccl.so.2", "libstdc++.so.6",
        "libc.so.6", "ld-linux-x86-64.so.2",
    ]
    text = "\n".join(
        f" 0x0000000000000001 (NEEDED)             Shared library: [{name}]"
        for name in [*present, "libfmt.so.9", "libdeflate.so.0"]
    )
    assert wheel.missing_libraries(text) == ["libfmt.so.9", "libdeflate.so.0"]


def test_the_builder_of_a_wheel_is_the_projects():
    assert wheel.build_requirement((ROOT / "pyproject.toml").read_text()).startswith("scikit-build-core>=")


def test_the_environment_of_tools_setup_has_the_package(tmp_path):
    """The commands of README.md work without PYTHONPATH, from any folder."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists() or not list(ROOT.glob(".venv/lib/python3*/site-packages/shardplan.pth")):
        pytest.skip("tools/setup has not run")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", "import shardplan; print(shardplan.__path__[0])"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(ROOT / "tools" / "python" / "shardplan")

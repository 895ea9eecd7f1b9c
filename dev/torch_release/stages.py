# SPDX-License-Identifier: Apache-2.0
"""The stages of dev/check_torch. Each returns what it came to, and what is different."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass

import functions
import symbols
import versions
from running import Result, junit, last_line, run, say

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "python" / "device"))
import device_symbols  # noqa: E402

SYSTEM_PYTHON = "/usr/bin/python3"  # as in tools/setup: the one whose headers python3-dev brings
TARGETS = ("product", "shardplan-conformance")
TESTS = ("device_test", "executor_test", "executor_gpu_test",
         *(f"executor_{backend}_{suite}_test" for suite in ("conformance", "reshard") for backend in ("cpu", "cuda")))
SLOW = "equivalence or flat"
# Name -> arguments of pytest.
SUITES = {
    "tracer": ["tests/python/tracer", "tests/python/titan"],
    "conformance": ["tests/python/conformance"],
    "adapter": ["tests/python/adapter", "-k", f"not ({SLOW})"],
    "device and ranks": ["tests/python/device", "tests/python/ranks", "-k", f"not ({SLOW})"],
    "equivalence": ["tests/python/adapter", "tests/python/device", "tests/python/ranks", "-k", SLOW],
    "checkpoints": ["tests/python/checkpoints"],
}
CXX = "C++"
ALL_SUITES = [*SUITES, CXX]
LABELS = "executor|gpu|gpu_in_software|device"  # of ctest
LIVE_SEED = 1
SHOWN = 40  # lines of a kind


@dataclass
class Check:
    version: str
    base: str  # the planned release that is nearest
    table: dict[str, functions.Digests]
    cases: int  # random live cases of each policy
    suites: list[str]
    jobs: int

    @property
    def folder(self) -> pathlib.Path:
        return ROOT / "build" / "check_torch" / self.version

    @property
    def build(self) -> pathlib.Path:
        # It lies as deep as build/dev: ccache finds what that compiled without torch.
        return ROOT / "build" / f"torch-{self.version}"

    @property
    def python(self) -> pathlib.Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def site(self) -> pathlib.Path:
        return site_packages(self.folder / "venv")

    def log(self, name: str) -> pathlib.Path:
        return self.folder / "logs" / f"{name.replace(' ', '_')}.log"

    def environment(self) -> dict[str, str]:
        paths = ("tools/python", "tests/python", "tests/python/conformance")
        return {
            "SHARDPLAN_BUILD": str(self.build),
            "SHARDPLAN_PYTHON": str(self.python),  # else the command takes the project's own environment
            "PYTHONPATH": ":".join(str(ROOT / path) for path in paths),
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


def site_packages(venv: pathlib.Path) -> pathlib.Path:
    found = list(venv.glob("lib/python3*/site-packages"))
    if not found:
        raise versions.EnvironmentProblem(f"no virtual environment in {venv}")
    return found[0]


def venv(check: Check) -> Result:
    wanted = versions.requirements(
        "".join((ROOT / "tools" / name).read_text() for name in versions.LISTS), check.version
    )
    listed, stamp = check.folder / "requirements.txt", check.folder / "venv" / "requirements.stamp"
    if stamp.exists() and stamp.read_text() == wanted:
        return Result("venv", "there already")
    check.folder.mkdir(parents=True, exist_ok=True)
    listed.write_text(wanted)
    if not check.python.exists():
        interpreter = SYSTEM_PYTHON if pathlib.Path(SYSTEM_PYTHON).exists() else "python3"
        run([interpreter, "-m", "venv", check.folder / "venv"], check.log("venv"), ROOT)
    command = [
        check.python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--no-compile",
        "-r", listed,
    ]
    if run(command, check.log("venv"), ROOT) != 0:
        raise versions.EnvironmentProblem(f"pip failed: {last_line(check.log('venv'))} ({check.log('venv')})")
    stamp.write_text(wanted)
    return Result("venv", "installed")


def fsdp_functions(check: Check) -> Result:
    found = functions.of_tree(check.site)
    changes = functions.compare(check.table, check.base, found)
    rows = functions.page_rows((ROOT / "docs" / "reference" / "pytorch-coverage.md").read_text())
    paged = {file for file, _ in rows}
    result = Result("functions", "")
    known, of_page, others = Counter(), [], []
    for change in changes:
        if change.like:
            known[change.kind, change.like[0]] += 1
            continue
        decides = rows.get((change.file, change.name), "no row" if change.file in paged else "")
        lines = _changed_lines(check, change) if change.kind == "changed" else ""
        name = f"{change.file.removeprefix(functions.FSDP + '/')} {change.name}"
        line = f"{change.kind}: {name}{lines}" + (f"; decides: {decides[:100]}" if decides else "")
        (of_page if change.file in paged else others).append(line)
    result.different += [f"{count} {kind} as in {like}" for (kind, like), count in known.items()]
    result.different += of_page + [f"{line} (a file without rows)" for line in others]
    if known or of_page:
        page = (ROOT / "docs" / "reference" / "pytorch-versions.md").read_text()
        for rule, since, places in functions.rules(page):
            said = ", ".join(f"{place} {functions.likeness(check.table, found, place)}" for place in places)
            result.different.append(f"rule {rule} (since {since}): {said}")
    own = len(of_page) + len(others)
    total = sum(len(names) for names in found.values())
    result.result = (
        f"{total} functions; next to {check.base}: {own} differ, {sum(known.values())} more as another planned "
        "release has them"
    )
    _write_diff(check)
    return result


def _site_of(release: str) -> pathlib.Path | None:
    """An installed torch of a release: one that was checked, or the project's own."""
    for folder in [*sorted((ROOT / "build" / "check_torch").glob(f"{release}.*/venv")), ROOT / ".venv"]:
        for site in folder.glob("lib/python3*/site-packages"):
            text = (site / "torch" / "version.py").read_text() if (site / "torch" / "version.py").exists() else ""
            if f"'{release}." in text:
                return site
    return None


def _changed_lines(check: Check, change: functions.Change) -> str:
    """" +3 -1 from 2.11, +0 -2 from 2.15": next to each planned release whose sources are on this machine."""
    counted = []
    for release in check.table:
        site = _site_of(release)
        if site is not None and (site / change.file).exists():
            before, now = ((folder / change.file).read_text() for folder in (site, check.site))
            counted.append(f"{functions.lines_changed(before, now, change.name)} from {release}")
    return f" ({', '.join(counted)})" if counted else ""


def _write_diff(check: Check) -> None:
    base = _site_of(check.base)
    if base is not None:
        run(
            ["diff", "-urN", "-x", "__pycache__", base / functions.FSDP, check.site / functions.FSDP],
            check.folder / "fsdp.diff",
            ROOT,
        )


def build(check: Check) -> Result:
    configure = ["cmake", "--preset", "dev", "-B", check.build, f"-DSHARDPLAN_PYTHON={check.python}"]
    if run(configure, check.log("configure"), ROOT) != 0:
        return Result(
            "build", f"cmake fails: {check.log('configure')}", different=_errors(check.log("configure")), failed=True
        )
    if _make(check, "build", TARGETS) != 0:
        return Result("build", f"fails: {check.log('build')}", different=_errors(check.log("build")), failed=True)
    warnings = sum(" warning: " in line for line in check.log("build").read_text(errors="replace").splitlines())
    return Result("build", f"builds, {warnings} warnings" if warnings else "builds")


def _make(check: Check, log: str, targets: tuple[str, ...]) -> int:
    names = [word for target in targets for word in ("--target", target)]
    return run(["cmake", "--build", check.build, f"-j{check.jobs}", *names, "--", "-k", "0"], check.log(log), ROOT)


def _errors(log: pathlib.Path) -> list[str]:
    lines = [
        line.strip()
        for line in log.read_text(errors="replace").splitlines()
        if re.search(r"\berror\b|CMake Error|FAILED", line)
    ]
    return list(dict.fromkeys(line.replace(f"{ROOT}/", "")[:200] for line in lines))[:SHOWN]


def names(check: Check) -> Result:
    folders = ("tools/python/shardplan", "tests/python/shardplan_conformance")
    python = {str(p.relative_to(ROOT)): p.read_text() for f in folders for p in (ROOT / f).rglob("*.py")}
    native = {str(p.relative_to(ROOT)): p.read_text() for f in ("executor", "device") for p in (ROOT / f).rglob("*.cc")}
    uses, operators = symbols.python_uses(python), symbols.operators(native)
    unresolved, unknown = symbols.probe(check.python, sorted(uses.dotted), sorted(operators))
    different = symbols.missing_names(
        uses, unresolved, symbols.words_of([check.site / "torch", check.site / "transformers"])
    )
    different += [f"operator {name} ({operators[name]})" for name in unknown]
    said = [f"{len(uses.dotted) + len(uses.private)} names of Python, {len(operators)} operators"]
    libraries, whose = _libraries(check)
    if libraries:
        asked, missing = _of_libraries(check, libraries)
        said.append(f"{asked} symbols ({whose})")
        different += missing
    else:
        said.append("no library is built")
    return Result(
        "symbols",
        "; ".join([", ".join(said), f"{len(different)} missing" if different else "all there"]),
        different=different,
    )


def _libraries(check: Check) -> tuple[list[pathlib.Path], str]:
    """Libraries that are built against this torch, else those of build/dev."""
    for folder in (check.build, ROOT / "build" / "dev"):
        found = [*folder.glob("device/libshardplan_device*.so"), *folder.glob("**/_shardplan*.so")]
        if found:
            return found, folder.name
    return [], ""


def _of_libraries(check: Check, libraries: list[pathlib.Path]) -> tuple[int, list[str]]:
    """Symbols that our libraries need and torch's do not have; calls of CUDA and NCCL that torch makes and the device
    in software does not know."""
    given = symbols.exported([*check.site.glob("torch/lib/*.so*"), *check.site.glob("nvidia/**/lib/*.so*"), *libraries])
    lines, asked = [], 0
    for library in libraries:
        wanted = symbols.needed(library)
        asked += len(wanted)
        lines += [f"{library.name} needs {name}" for name in symbols.demangled(sorted(wanted - given))]
    for device in (library for library in libraries if library.name == "libshardplan_device.so"):
        lines += [
            f"torch asks the device for {name}"
            for name in device_symbols.not_given(device, check.site / "torch" / "lib")
        ]
    return asked, lines


def suites(check: Check) -> list[Result]:
    """Every suite that depends on torch, some beside each other: ranks wait more than they compute."""
    with concurrent.futures.ThreadPoolExecutor(check.jobs) as pool:
        running = [
            pool.submit(_ctest, check) if name == CXX else pool.submit(_suite, check, name, SUITES[name])
            for name in check.suites
        ]
        return [future.result() for future in running]


def _suite(check: Check, name: str, arguments: list[str]) -> Result:
    started = time.monotonic()
    log = check.log(name)
    written = log.with_suffix(".xml")
    written.unlink(missing_ok=True)
    say(f"suite {name}")
    command = [check.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={written}", *arguments]
    code = run(command, log, ROOT, check.environment())
    return _of_junit(f"suite {name}", written, log, code, started)


def _ctest(check: Check) -> Result:
    started = time.monotonic()
    log = check.log("ctest")
    written = log.with_suffix(".xml")
    written.unlink(missing_ok=True)
    say("suite C++")
    if _make(check, "build of tests", TESTS) != 0:
        faults = _errors(check.log("build of tests"))
        return Result(
            "suite C++",
            f"does not build: {check.log('build of tests')}",
            time.monotonic() - started,
            faults,
            failed=True,
        )
    command = [
        "ctest", "--test-dir", check.build, "-L", f"^({LABELS})$", "--output-on-failure", "--output-junit", written,
    ]
    code = run(command, log, ROOT, check.environment())
    return _of_junit("suite C++", written, log, code, started)


def _of_junit(name: str, written: pathlib.Path, log: pathlib.Path, code: int, started: float) -> Result:
    seconds = time.monotonic() - started
    say(f"{name}: {last_line(log)}")
    if not written.exists():
        return Result(name, f"does not run (exit code {code}): {log}", seconds, [last_line(log)], failed=True)
    result, failures = junit(written)
    return Result(name, result, seconds, failures, failed=code != 0)


def live(check: Check) -> list[Result]:
    """docs/internals/conformance.md: cases of their own, and random ones, as this torch runs them; then planned as each
    planned release."""
    jobs = {"live cases": ["--live", "live_cases:cases", "--fake"]}
    jobs |= {
        f"live random {policy}": ["--random", str(check.cases), "--seed", str(LIVE_SEED), "--fake", "--policy", policy]
        for policy in ("fsdp2", "fsdp1")
    }
    with concurrent.futures.ThreadPoolExecutor(check.jobs) as pool:
        running = [pool.submit(_live, check, name, arguments) for name, arguments in jobs.items()]
        return [future.result() for future in running]


def _live(check: Check, name: str, arguments: list[str]) -> Result:
    started = time.monotonic()
    log = check.log(name)
    kept = check.folder / "kept" / name.replace(" ", "_")
    shutil.rmtree(kept, ignore_errors=True)
    say(name)
    code = run(
        [check.build / "bin" / "shardplan", "conformance", *arguments, "--keep", kept], log, ROOT, check.environment()
    )
    text = log.read_text(errors="replace")
    matched = re.search(r"^matched .*$", text, re.MULTILINE)
    differing = [line[:200] for line in text.splitlines() if re.match(r"\S+: differs", line)]
    if not matched:
        return Result(
            name, f"does not run (exit code {code}): {log}", time.monotonic() - started, [last_line(log)], failed=True
        )
    recorded = {
        line for path in kept.glob("*.log") for line in path.read_text().splitlines()[:3] if line.startswith("# torch ")
    }
    if any(line.split()[2].split("+")[0] != check.version for line in recorded):
        return Result(name, f"recorded with another torch: {sorted(recorded)}", time.monotonic() - started, failed=True)
    planned = {release: _planned_as(check, kept, release) for release in check.table}
    compared = {path.name.removesuffix(".strategy.json") for path in kept.glob("*.strategy.json")} & {
        path.stem for path in kept.glob("*.log")
    }
    said = [
        matched[0],
        *(f"planned as {release}: {len(names)} of {len(compared)}" for release, names in planned.items()),
    ]
    none = sorted(compared - set().union(*planned.values()))
    said += [f"as no planned release: {len(none)}"] if none else []
    say(f"{name}: {matched[0]}")
    different = [
        f"{line}{' (nor does it agree with another planned release)' if line.split(':')[0] in none else ''}"
        for line in differing
    ]
    return Result(name, "; ".join(said), time.monotonic() - started, different[:SHOWN], failed=code != 0)


def _planned_as(check: Check, kept: pathlib.Path, release: str) -> set[str]:
    """The recordings that match plans of another release."""
    folder = kept.with_name(f"{kept.name}_{release}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept, folder)
    for path in folder.glob("*.strategy.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "pytorch": release}))
    log = check.log(folder.name)
    run([check.build / "bin" / "shardplan-conformance", folder], log, ROOT, check.environment())
    return set(re.findall(r"^(\S+): matches", log.read_text(errors="replace"), re.MULTILINE))

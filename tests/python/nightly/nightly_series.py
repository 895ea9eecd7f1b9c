# SPDX-License-Identifier: Apache-2.0
"""The table of nightly series: what a part of each runs, and where it goes on."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

from nightly_parts import Step, exit_code, junit, last_line
from nightly_run import Part, Series

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEV = ROOT / "build" / "dev"
PYTHON = str(ROOT / ".venv" / "bin" / "python")
JOBS = os.environ.get("SHARDPLAN_JOBS", str(os.cpu_count() or 2))
# The tests' own seeds are small numbers.
FIRST_SEED = 200_000


def build(preset: str, *targets: str) -> tuple[str, ...]:
    return ("tools/build", preset, f"-j{JOBS}", "--target", *targets)


def python(preset: str = "dev") -> dict[str, str]:
    return {"PYTHONPATH": "tools/python:tests/python/checkpoints", "SHARDPLAN_BUILD": str(ROOT / "build" / preset)}


def pytest(
    part: Part, name: str, *arguments: str, environment: dict[str, str] | None = None, before: tuple[str, ...] = ()
) -> Step:
    command = [
        *before, PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={part.folder / name}.xml",
        *arguments,
    ]
    return Step(command, junit(f"{name}.xml"), {**python(), **(environment or {})})


def gtest(
    part: Part, name: str, program: str, tests: str, environment: dict[str, str], before: tuple[str, ...] = ()
) -> Step:
    command = [
        *before, str(DEV / program), "--gtest_brief=1", f"--gtest_filter={tests}",
        f"--gtest_output=xml:{part.folder / name}.xml",
    ]
    return Step(command, junit(f"{name}.xml"), environment)


# ---- on the device in software: on the GPU where there is one ----

DEVICE = ("dev/on_device", str(DEV / "device" / "libshardplan_device.so"))
SLICES = 16  # of the conformance suite's cases


def modes(number: int) -> tuple[str, str, str]:
    """Lazy ones with seeds of the round."""
    return ("inline", f"lazy:{2 * number + 1}", f"lazy:{2 * number + 2}")


def conformance(part: Part) -> list[Step]:
    """Each slice in each mode; the last slice stands for the reshardings."""
    steps = []
    for position in range(part.position, part.position + part.count):
        sliced, mode = position // 3, modes(part.round)[position % 3]
        environment = {"SHARDPLAN_DEVICE_MODE": mode, "SHARDPLAN_EVERY": str(SLICES), "SHARDPLAN_FIRST": str(sliced)}
        program, tests = ("conformance", "*EveryNumberIsRight*") if sliced < SLICES else ("reshard", "*")
        steps.append(
            gtest(part, f"{sliced}-{mode}", f"tests/executor/executor_cuda_{program}_test", tests, environment, DEVICE)
        )
    return steps


def conformance_cpu(part: Part) -> list[Step]:
    """Slices of all cases on Gloo ranks."""
    steps = []
    for position in range(part.position, part.position + part.count):
        environment = {"SHARDPLAN_EVERY": str(SLICES), "SHARDPLAN_FIRST": str(position)}
        steps.append(
            gtest(
                part,
                f"cpu{position}",
                "tests/executor/executor_cpu_conformance_test",
                "*EveryNumberIsRight*",
                environment,
            )
        )
    return steps


def on_cuda(mode: str) -> dict[str, str]:
    return {
        **python(), "SHARDPLAN_DEVICE_MODE": mode, "SHARDPLAN_TEST_DEVICE": "cuda", "SHARDPLAN_STEPS": "10",
        "SHARDPLAN_ALL_SETTINGS": "1",
    }


def adapter(part: Part) -> list[Step]:
    """Both policies; inline for even seeds, lazy for odd ones."""
    steps = []
    for script in ("flat_random.py", "equivalence_random.py"):
        mode = "inline" if part.position % 2 == 0 else f"lazy:{part.position % 1000}"
        command = [
            *DEVICE, PYTHON, f"tests/python/adapter/{script}", "--seed", str(part.position), "--cases", str(part.count),
            "--batch", "25",
        ]
        steps.append(Step(command, last_line, on_cuda(mode)))
    return steps


@functools.cache
def adapter_files() -> list[str]:
    return sorted(
        f"tests/python/adapter/{path.name}"
        for path in (ROOT / "tests/python/adapter").glob("test_*.py")
        if re.match("test_(adapter|equivalence)", path.name)
    )


def adapter_file(part: Part) -> list[Step]:
    files = adapter_files()[part.position : part.position + part.count]
    return [pytest(part, pathlib.Path(file).stem, file, environment=on_cuda("inline"), before=DEVICE) for file in files]


@functools.cache
def mutations() -> list[str]:
    listed = subprocess.run(
        [sys.executable, "tests/device/mutations.py", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()


def backend_mutations(part: Part) -> list[Step]:
    names = mutations()[part.position : part.position + part.count]
    return [Step([PYTHON, "tests/device/mutations.py", name], last_line, python()) for name in names]


def memory(part: Part) -> list[Step]:
    return [
        Step(
            [PYTHON, "tests/python/device/memory_random.py", "--seed", str(part.position), "--cases", str(part.count)],
            last_line,
            python(),
        )
    ]


def rehearsed(part: Part) -> list[Step]:
    words = [
        PYTHON, "tests/python/device/memory_random.py", "--rehearsed", "--seed", str(part.position), "--cases",
        str(part.count),
    ]
    return [Step(words, last_line, python())]


def races(part: Part) -> list[Step]:
    """Random settings of FSDP2 and FSDP1, in which nothing races."""
    seeds = (str(part.position), str(part.position + part.count))
    return [Step([PYTHON, "tests/python/races/clean.py", "--seeds", *seeds], last_line, python())]


@functools.cache
def race_edges() -> list[str]:
    sys.path.append(str(ROOT / "tests/python/races"))
    from edges import EDGES

    return list(EDGES)


def race_mutations(part: Part) -> list[Step]:
    names = race_edges()[part.position : part.position + part.count]
    return [Step([PYTHON, "tests/python/races/mutations.py", name], last_line, python()) for name in names]


# ---- others ----


@functools.cache
def off_plan_cases() -> int:
    command = [PYTHON, "-c", "import off_plan, off_plan_all; print(len(off_plan.CASES))"]
    environment = {**os.environ, "PYTHONPATH": "tools/python:tests/python/adapter:tests/python"}
    return int(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout)


def off_plan(part: Part) -> list[Step]:
    return [
        pytest(
            part,
            "off_plan",
            "tests/python/adapter/test_off_plan.py",
            environment={"SHARDPLAN_OFF_PLAN": f"{part.position}+{part.count}"},
        )
    ]


PORTED = (
    "tests/python/adapter/test_auto.py", "tests/python/adapter/test_compiled.py",
    "tests/python/adapter/test_auto_features.py",
)


def ported(part: Part) -> list[Step]:
    files = PORTED[part.position : part.position + part.count]
    return [pytest(part, pathlib.Path(file).stem, file, environment={"SHARDPLAN_ALL_SETTINGS": "1"}) for file in files]


def examples(part: Part) -> list[Step]:
    return [
        pytest(part, "examples", "tests/python/commands/test_examples.py", environment={"SHARDPLAN_LONG_EXAMPLES": "1"})
    ]


def models() -> list[str]:
    return sorted(path.stem for path in (ROOT / "examples" / "models").glob("*.json"))


def shipped_models(part: Part) -> list[Step]:
    """A model: its shipped traces are what the tracer makes."""
    named = models()[part.position : part.position + part.count]
    return [Step([PYTHON, "dev/update_models", model, "--check"], exit_code(1), python()) for model in named]


def live(part: Part) -> list[Step]:
    """Random models and settings that the installed PyTorch runs, event for event."""
    command = [
        str(DEV / "bin" / "shardplan"), "conformance", "--random", str(part.count), "--seed", str(part.position),
        "--fake", "--policy",
    ]
    return [Step([*command, policy], exit_code(part.count), python()) for policy in ("fsdp2", "fsdp1")]


def checkpoints(part: Part) -> list[Step]:
    """Checks of a seed: states through all formats and layouts, damaged files, rewrites and saves that are killed;
    FSDP1's states at another world size; states that some ranks save and others load."""
    seeds = " ".join(str(seed) for seed in range(part.position, part.position + part.count))
    recorded = ("5-flat-6", "6-orig-9", "7-flat-5", "3-orig-7")[part.position % 4]
    kills = str(part.count + 1)
    scripts = "tests/python/checkpoints"
    return [
        pytest(
            part, "formats", scripts, "-k", "every_format_and_back or cut_and_changed",
            environment={"SHARDPLAN_SEED": seeds},
        ),
        Step(
            [PYTHON, f"{scripts}/killed.py", "--kills", kills, "--seed", str(part.position), "--megabytes", "128"],
            exit_code(int(kills)),
            python(),
        ),
        Step(
            [PYTHON, f"{scripts}/killed_saves.py", "--kills", kills, "--seed", str(part.position)],
            exit_code(int(kills)),
            python(),
        ),
        pytest(
            part, "recorded", "tests/python/conformance/test_optim_state_conformance.py", "-k", "installed_fsdp1",
            environment={"SHARDPLAN_RECORDED": recorded},
        ),
        Step([PYTHON, f"{scripts}/sessions.py", str(part.position % 4)], exit_code(), python()),
    ]


@functools.cache
def fuzz_targets(preset: str) -> list[str]:
    program = ROOT / "build" / preset / "tests" / "fuzz" / "fuzz_documents"
    return subprocess.run([program, "--targets"], capture_output=True, text=True, check=True).stdout.split()


def fuzz_step(preset: str, target: str, seed: int, count: int) -> Step:
    """An input that fails is left in the part's folder."""
    command = [str(ROOT / "build" / preset / "tests" / "fuzz" / "fuzz_documents"), target, str(seed), str(count)]
    return Step(command, exit_code(count), in_folder=True)


def fuzz(part: Part) -> list[Step]:
    return [fuzz_step("dev", target, part.position, part.count) for target in fuzz_targets("dev")]


# Whatever the budget and wherever the search ends; takes seconds a seed.
OPTIMIZED = "OptimizeLimits.*:OptimizeRobust.NeitherTheFastest*:Variants.TheFastest*:ActivationOffloadTest.AllowingIt*"


def optimizer(part: Part) -> list[Step]:
    """The search against all choices, and against settings of one seed; the bound on eleven times as many random plans,
    and on as many that recompute."""
    program, more = "tests/planner/planner_test", 11
    searched = {"SHARDPLAN_SEED": str(part.position), "SHARDPLAN_INSTANCES": str(part.count)}
    bounded = {"SHARDPLAN_SEED": str(more * part.position), "SHARDPLAN_RANDOM_PLANS": str(more * part.count)}
    return [
        gtest(part, "search", program, "ExhaustiveInstances.*", searched),
        gtest(part, "bound", program, "BoundOfRandomPlans.*:BoundOfRecomputingPlans.*", bounded),
        gtest(part, "limits", program, OPTIMIZED, {"SHARDPLAN_SEED": str(part.position)}),
    ]


def ranks(part: Part) -> list[Step]:
    return [
        Step(
            [
                PYTHON, "tests/python/ranks/rank_faults.py", "--build", str(DEV), "--seed", str(part.position),
                "--count", str(part.count),
            ],
            last_line,
            python(),
        )
    ]


def simulator(part: Part) -> list[Step]:
    environment = {"SHARDPLAN_SEED": str(part.position), "SHARDPLAN_RANDOM_PLANS": str(part.count)}
    return [pytest(part, "simulator", "tests/python/commands/test_naive_simulator.py", environment=environment)]


CHANGES_EVERY = 5003  # of the changes of every field of every plan, a part has one in so many


def verifier(part: Part) -> list[Step]:
    """Changes of fields from the position on; a random pair of edits of every plan, and of what it does on demand."""
    seed = str(part.round * CHANGES_EVERY + part.position)
    soak = [str(DEV / "tests/executor/virtual/virtual_soak"), "--seeds", "5"]
    return [
        Step(
            [*soak, "--fields", str(CHANGES_EVERY), "--offset", str(part.position), "--seeds-to-find", "3000"],
            last_line,
        ),
        Step([*soak, "--edits", "1", "--first-edit", seed, "--seeds-to-trust", "8"], last_line),
        Step([*soak, "--edits", "1", "--first-edit", seed, "--seeds-to-trust", "8", "--on-demand"], last_line),
    ]


# ---- under sanitizers: what has threads ----

# Programs, and which of their tests.
THREADS = {
    "virtual_replay_test": "",
    "executor_test": "",
    "executor_cpu_reshard_test": "",
    "executor_cpu_conformance_test": "",
    "planner_test": "Optimize|ExhaustiveInstances|Recomputation",
}
COMMAND_FILES = ("tests/python/checkpoints/test_reshard_checkpoint.py", "tests/python/commands/test_optimize.py")
# Trainings in C++ next to Python.
CPP_FILES = ("tests/python/cpp/test_gpt_cpp.py", "tests/python/cpp/test_cpp_training.py")
FUZZED = 300  # inputs a target


def sanitized_items(preset: str) -> list[tuple[str, str]]:
    """("test", name), ("fuzz", target), ("command" or "adapter", file of Python tests)."""
    listed = subprocess.run(
        ["ctest", "--preset", preset, "--show-only=json-v1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tests = json.loads(listed.stdout[listed.stdout.index("{") :])["tests"]
    program = {test["name"]: pathlib.Path(test.get("command", [""])[0]).name for test in tests}
    names = [name for name, of in program.items() if of in THREADS and re.search(THREADS[of], name)]
    items = (
        [("test", name) for name in names]
        + [("fuzz", target) for target in fuzz_targets(preset)]
        + [("command", file) for file in COMMAND_FILES]
    )
    # The C++ module: under asan only, whose library an interpreter that is not built with it can load first.
    return items + ([("adapter", file) for file in (*adapter_files(), *CPP_FILES)] if preset == "asan" else [])


def alone(part: Part) -> list[Step]:
    slices = range(part.position, part.position + part.count)
    return [
        Step(["dev/check_alone", "--slice", f"{position + 1}/{SLICES}"], last_line, python()) for position in slices
    ]


def at_hand(part: Part) -> list[Step]:
    return [pytest(part, "at_hand", "tests/python/nightly/at_hand.py")]


def exactly(names: list[str]) -> str:
    """A pattern of ctest."""
    return "^(" + "|".join(re.sub(r"([][.+*?()^$|\\])", r"\\\1", name) for name in names) + ")$"


@functools.cache
def asan_first() -> str:
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return " ".join(found)


def sanitized(preset: str, part: Part) -> list[Step]:
    items = sanitized_items(preset)[part.position : part.position + part.count]
    environment = {"SHARDPLAN_EVERY": "20", "SHARDPLAN_FIRST": str(part.round % 20), "TSAN_OPTIONS": "die_after_fork=0"}
    steps = []
    names = [name for kind, name in items if kind == "test"]
    if names:
        command = [
            "ctest", "--preset", preset, f"-j{JOBS}", "--timeout", "300", "-R", exactly(names), "--output-junit",
            str(part.folder / "ctest.xml"),
        ]
        steps.append(Step(command, junit("ctest.xml"), environment))
    for kind, name in items:
        if kind == "fuzz":
            steps.append(fuzz_step(preset, name, FIRST_SEED + part.round, FUZZED))
        elif kind != "test":
            loaded = {"LD_PRELOAD": asan_first(), "ASAN_OPTIONS": "detect_leaks=0"} if kind == "adapter" else {}
            steps.append(pytest(part, pathlib.Path(name).stem, name, environment={**python(preset), **loaded}))
    return steps


def sanitizer(preset: str, what: str, *more: str) -> Series:
    return Series(
        preset,
        f"{what} over what has threads: {', '.join(THREADS)}, the fuzz targets, the command",
        functools.partial(sanitized, preset),
        count=10,
        most=20,  # some take half a minute
        length=lambda: len(sanitized_items(preset)),
        build=build(preset, *THREADS, "fuzz_documents", "shardplan", *more),
    )


ALL = [
    Series(
        "conformance", "the cuda backend on the device in software: every case inline and under two lazy seeds",
        conformance, 3, 24, length=lambda: 3 * (SLICES + 1),
        build=build("dev", "executor_cuda_conformance_test", "executor_cuda_reshard_test"),
    ),
    Series(
        "conformance_cpu", "the cpu backend: every case on Gloo ranks", conformance_cpu, 4, 16, length=lambda: SLICES,
        build=build("dev", "executor_cpu_conformance_test"),
    ),
    Series(
        "adapter", "random models and settings on cuda next to real FSDP1 and FSDP2", adapter, 6, 60, FIRST_SEED,
        build=build("dev", "product"),
    ),
    Series(
        "adapter_files", "the adapter's Python tests on cuda", adapter_file, 1, 4, length=lambda: len(adapter_files()),
        build=build("dev", "product"),
    ),
    Series(
        "memory", "peaks of random trainings by PyTorch's own allocator", memory, 4, 60, FIRST_SEED,
        build=build("dev", "product"),
    ),
    Series(
        "rehearsed", "random trainings by shardplan rehearse next to shardplan memory", rehearsed, 4, 30, FIRST_SEED,
        build=build("dev", "product"),
    ),
    Series(
        "backend_mutations", "mutations of the cuda backend, each of which has to be seen", backend_mutations, 1, 4,
        length=lambda: len(mutations()), build=build("dev", "executor_cuda_conformance_test", "product"),
    ),
    Series(
        "races", "random settings of FSDP2 and FSDP1, proved to be free of races", races, 20, 200, FIRST_SEED,
        build=build("dev", "product"),
    ),
    Series(
        "race_mutations", "edges of FSDP2 and FSDP1 that are taken out, which the proof has to find",
        race_mutations, 2, 8, length=lambda: len(race_edges()), build=build("dev", "product"),
    ),
    Series(
        "off_plan", "what users do that a plan does not have, next to real FSDP1 and FSDP2", off_plan, 8, 80,
        length=off_plan_cases, build=build("dev", "product"),
    ),
    Series(
        "ported", "FSDP2's scripts ported line by line, every setting, compiled in every way", ported, 1, 1,
        length=lambda: len(PORTED), build=build("dev", "product"),
    ),
    Series(
        "examples", "examples that start launchers or a cluster", examples, 1, 1, length=lambda: 1,
        build=build("dev", "product"),
    ),
    Series(
        "alone", "each file of C++ compiled alone: a unity build hides what it does not include", alone, 2, 8,
        length=lambda: SLICES, build=build("dev", "product"),
    ),
    Series(
        "models", "shipped traces are what the tracer makes", shipped_models, 2, 8, length=lambda: len(models()),
        build=build("dev", "product"),
    ),
    Series(
        "at_hand", "the adapter compiled from the sources of the wheel, and trained with", at_hand, 1, 1,
        length=lambda: 1, build=build("dev", "shardplan"),
    ),
    Series(
        "live", "plans of random models and settings next to the installed FSDP1 and FSDP2", live, 10, 400, FIRST_SEED,
        build=build("dev", "product"),
    ),
    Series(
        "checkpoints", "formats, layouts, damaged files, kills, other ranks", checkpoints, 2, 40, FIRST_SEED,
        build=build("dev", "product"),
    ),
    Series(
        "fuzz", "changed inputs of every reader; a case is an input", fuzz, 200, 20_000, FIRST_SEED, by_one=True,
        build=build("dev", "fuzz_documents"),
    ),
    Series(
        "optimizer", "the optimising planner against all choices, its bound on random plans", optimizer, 10, 4000,
        FIRST_SEED, build=build("dev", "planner_test"),
    ),
    Series(
        "ranks", "ranks and launchers that are killed, stopped and signalled", ranks, 8, 100, FIRST_SEED,
        build=build("dev", "product"),
    ),
    Series(
        "simulator", "the simulator against the one written from its page", simulator, 50, 5000, FIRST_SEED,
        build=build("dev", "simulator_suite_plans"),
    ),
    Series(
        "verifier", "the verifier's verdict on changed plans against runs of them", verifier, 1, 1,
        length=lambda: CHANGES_EVERY, build=build("dev", "virtual_soak"),
    ),
    sanitizer("asan", "AddressSanitizer and UndefinedBehaviorSanitizer", "_shardplan", "training_programs"),
    sanitizer("tsan", "ThreadSanitizer"),
]

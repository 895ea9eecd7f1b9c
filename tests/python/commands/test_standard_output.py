# SPDX-License-Identifier: Apache-2.0
"""Standard output that cannot be written is an error of the environment, whatever the command and however little it has
to say."""

import os
import re
import subprocess

import pytest
from conftest import ROOT, build_folder
from writers import ALLOCATOR_LOG, FLAGS, OPTIMIZE, TABLE, TRACE, TRACER, environment, program, python

HAS_EXECUTOR = (build_folder() / "bin" / "shardplan-run").exists()
RECORDINGS = ROOT / "tests" / "conformance" / "fsdp2"
CASE = sorted(RECORDINGS.glob("*.log"))[0].stem


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    for name, more in (("plan", ()), ("other", ("--reshard-after-forward", "false"))):
        subprocess.run([program(), "plan", TRACE, *FLAGS, *more, "-q", "-o", folder / f"{name}.json"], check=True)
    (folder / "table.csv").write_text(TABLE)
    header = b'{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
    (folder / "state.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    best = [
        program(), "optimize", TRACE, *OPTIMIZE, "-o", folder / "best.json", "--certificate",
        folder / "certificate.json",
    ]
    subprocess.run(best, check=True, stdout=subprocess.DEVNULL)
    return folder


def full():
    return {"stdout": open("/dev/full", "w")}


def pipe_without_reader():
    read, write = os.pipe()
    os.close(read)
    return {"stdout": os.fdopen(write, "w")}


def closed():
    return {"preexec_fn": lambda: os.close(1)}


WAYS = {
    "full": (full, "No space left"), "pipe": (pipe_without_reader, "Broken pipe"),
    "closed": (closed, "Bad file descriptor"),
}
SHORT = {
    "version": ("--version",),
    "help": ("--help",),
    "list-passes": ("plan", TRACE, "--list-passes"),
    "plan": ("plan", TRACE, *FLAGS, "-q", "-o", "-"),
    "plan --explain": ("plan", TRACE, *FLAGS, "-q", "-o", "/dev/null", "--explain"),
    "plan --explain-schedule": ("plan", TRACE, *FLAGS, "-q", "-o", "/dev/null", "--explain-schedule"),
    "plan --graph": ("plan", TRACE, *FLAGS, "-q", "-o", "/dev/null", "--graph", "-"),
    "plan --dump": ("plan", TRACE, *FLAGS, "-q", "--stop-after", "choose_units", "--dump"),
    "validate": ("validate", "plan.json"),
    "validate several": ("validate", "plan.json", "other.json"),
    "validate ranks": ("validate", "--ranks-apart", "plan.json", "plan.json"),
    "simulate": ("simulate", "plan.json", "-q"),
    "simulate --report": ("simulate", "plan.json", "-q", "--report", "-"),
    "simulate --html": ("simulate", "plan.json", "-q", "--html", "-"),
    "compare": ("compare", "plan.json", "other.json"),
    "simulate --kineto": ("simulate", "plan.json", "-q", "--kineto", "-"),
    "compare --json": ("compare", "plan.json", "other.json", "--json", "-"),
    "memory": ("memory", "plan.json", "-q"),
    "memory --rows": ("memory", "plan.json", "-q", "--rows", "-"),
    "explain-memory": ("explain-memory", "plan.json"),
    "explain": ("explain", "plan.json"),
    "export": ("export", "plan.json", "--fsdp2", "-q", "-o", "/dev/null"),
    "export --output": ("export", "plan.json", "--fsdp2", "-o", "-"),
    "optimize": ("optimize", TRACE, *OPTIMIZE, "-o", "/dev/null"),
    "optimize --output": ("optimize", TRACE, *OPTIMIZE, "-o", "-"),
    "certify": ("certify", "best.json", "certificate.json", "--trace", TRACE),
    "explain-memory --json": ("explain-memory", "plan.json", "--json", "-"),
    "show": ("show", "plan.json"),
    "show --json": ("show", "plan.json", "--json"),
    "layout": ("layout", "plan.json"),
    "reshard": ("reshard", "plan.json", "other.json"),
    "reshard --output": ("reshard", "plan.json", "other.json", "-o", "-"),
    "reshard-checkpoint": ("reshard-checkpoint", "state.safetensors", "state", "--format", "distributed", "-q"),
    "diff equal": ("diff", "plan.json", "plan.json"),
    "diff": ("diff", "plan.json", "other.json"),
    "conformance": ("conformance", RECORDINGS, CASE),
    "cost": ("cost", "table.csv", "--leave-out", "size"),
    "cost --fit": ("cost", "table.csv", "--fit", "h100_sxm_8", "-o", "-"),
    "allocator-replay": ("allocator-replay", ALLOCATOR_LOG),
    "allocator-replay --json": ("allocator-replay", ALLOCATOR_LOG, "--json", "-"),
}
if HAS_EXECUTOR:
    SHORT["run"] = ("run", "plan.json", "--device", "virtual", "--steps", "1")


def tried(line, folder, way):
    options = WAYS[way][0]()
    try:
        return subprocess.run(
            [str(word) for word in line],
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            timeout=120,
            env=environment(),
            check=False,
            **options,
        )
    finally:
        if "stdout" in options:
            options["stdout"].close()


@pytest.mark.parametrize(
    "name, way", [(name, way) for name in SHORT for way in WAYS if name != "run" or way == "closed"]
)
def test_exit_4_and_a_reason(name, way, plans):
    done = tried([program(), *SHORT[name]], plans, way)
    assert done.returncode == 4, (done.returncode, done.stderr)
    assert "standard output" in done.stderr and WAYS[way][1] in done.stderr, done.stderr


def test_every_command_is_tried():
    said = subprocess.run([program()], capture_output=True, text=True, check=False).stderr
    commands = set(re.search(r"The commands are (.*)", said).group(1).split())
    # Options below or in Python, and `run` where it is not built.
    delegated = {"trace", "calibrate", "import-profile", "sweep", "evaluate", "doctor", "rehearse", "torchtitan"} | (
        set() if HAS_EXECUTOR else {"run"}
    )
    assert {words[0] for words in SHORT.values() if not words[0].startswith("-")} == commands - delegated


@pytest.mark.parametrize("command", ["plan", "trace", "conformance", "run", "validate"])
def test_help_that_nobody_can_read(command, plans):
    if command == "run" and not HAS_EXECUTOR:
        pytest.skip("no executor in this build")
    for way in WAYS if command != "run" else ("full",):  # LibTorch loads slowly
        done = tried([program(), command, "--help"], plans, way)
        assert done.returncode == 4 and "standard output" in done.stderr, (way, done.returncode, done.stderr)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bytes_printed", [1, 100_000])
def test_python_commands_say_it_too(way, bytes_printed, plans):
    """The frame that every Python command runs in, without the seconds that torch takes."""
    code = (
        "from shardplan import command\ndef main():\n    print('x' * int(sys.argv[1]))\n    return "
        "0\ncommand.run('shardplan trace', main)"
    )
    done = tried(python(code, bytes_printed), plans, way)
    assert done.returncode == 4, (done.returncode, done.stderr)
    assert (
        done.stderr
        == f"shardplan trace: cannot write to standard output: {WAYS[way][1]}"
        + done.stderr[done.stderr.index(WAYS[way][1]) + len(WAYS[way][1]) :]
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_on_standard_output(way, plans):
    done = tried([*python(TRACER), TRACE, "-q", "-o", "-"], plans, way)
    assert done.returncode == 4 and WAYS[way][1] in done.stderr
    done = subprocess.run([*python(TRACER), str(TRACE), "-q", "-o", "-"], capture_output=True, check=True)
    assert done.stdout == TRACE.read_bytes() and done.stderr == b"what a model prints\n"


def test_standard_error_that_cannot_be_written_changes_nothing(plans):
    for line in (
        ["diff", "plan.json", "other.json"],
        ["validate", "plan.json", "nowhere.json"],
        ["plan", TRACE, *FLAGS, "-o", "/dev/null"],
    ):
        words = [program(), *map(str, line)]
        expected = subprocess.run(words, capture_output=True, cwd=plans, check=False)
        with open("/dev/full", "w") as nowhere:
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=nowhere, cwd=plans, check=False)
        assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
        done = subprocess.run(words, stdout=subprocess.PIPE, cwd=plans, preexec_fn=lambda: os.close(2), check=False)
        assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)

# SPDX-License-Identifier: Apache-2.0
"""Every output of every command, for the tests of how they are written. `test_output_files.py` compares the list with
what --help says."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

from conftest import ROOT, build_folder

GOLDENS = ROOT / "tests" / "planner" / "goldens"
TRACE = GOLDENS / "traces" / "small.json"
CLUSTER = ROOT / "examples" / "three_layers" / "cluster.json"
ALLOCATOR_LOG = ROOT / "tests" / "simulator" / "allocator" / "data" / "h100_training_step.json"
FLAGS = ("--ranks", "2", "--unit", "layers.*")
# All is decided: a search of one plan.
OPTIMIZE = (
    *FLAGS, "--policy", "fsdp2", "--memory-budget", "device", "--fix", "units,reshard,prefetch,checkpoint,accumulation",
    "-q",
)


@dataclasses.dataclass(frozen=True)
class Writer:
    """`flag` of the command writes {out}. {plan}, {trace}, {log}, {best} and its {report}: inputs."""

    command: str
    flag: str
    words: tuple[str, ...]
    input: str = "{plan}"  # a file that it reads
    other: tuple[str, ...] = ()  # a second output, {other}
    same: tuple[str, ...] = ()  # the fields of a document that are the same in every run; none: all bytes

    @property
    def name(self) -> str:
        return f"{self.command} {self.flag}"

    def says(self, content: bytes) -> object:
        """The part of the content that two runs have in common."""
        return {field: json.loads(content)[field] for field in self.same} if self.same else content


WRITERS = (
    Writer("plan", "--output", ("{trace}", *FLAGS, "-q", "-o", "{out}"), "{trace}", ("--graph", "{other}")),
    Writer(
        "plan",
        "--graph",
        ("{trace}", *FLAGS, "-q", "-o", "{null}", "--graph", "{out}"),
        "{trace}",
        ("--write-strategy", "{other}"),
    ),
    Writer(
        "plan",
        "--write-strategy",
        ("{trace}", *FLAGS, "-q", "-o", "{null}", "--write-strategy", "{out}"),
        "{trace}",
        ("--graph", "{other}"),
    ),
    Writer(
        "plan", "--dump", ("{trace}", *FLAGS, "-q", "--stop-after", "place_events", "--dump", "-o", "{out}"), "{trace}"
    ),
    Writer("optimize", "--output", ("{trace}", *OPTIMIZE, "-o", "{out}"), "{trace}", ("--report", "{other}")),
    Writer(
        "optimize",
        "--certificate",
        ("{trace}", *OPTIMIZE, "-o", "{null}", "--certificate", "{out}"),
        "{trace}",
        ("--report", "{other}"),
    ),
    Writer(
        "optimize",
        "--report",
        ("{trace}", *OPTIMIZE, "-o", "{null}", "--report", "{out}"),
        "{trace}",
        ("--certificate", "{other}"),
        ("schema", "plan_digest", "step_ns", "lower_bound_ns"),
    ),
    Writer(
        "optimize",
        "--write-strategy",
        ("{trace}", *OPTIMIZE, "-o", "{null}", "--write-strategy", "{out}"),
        "{trace}",
        ("--report", "{other}"),
    ),
    Writer("explain", "--plot", ("{best}", "-q", "--report", "{report}", "--plot", "{out}"), "{best}"),
    Writer("simulate", "--report", ("{plan}", "-q", "--report", "{out}"), other=("--html", "{other}")),
    Writer("simulate", "--timeline", ("{plan}", "-q", "--timeline", "{out}"), other=("--report", "{other}")),
    Writer("simulate", "--kineto", ("{plan}", "-q", "--kineto", "{out}"), other=("--report", "{other}")),
    Writer("simulate", "--html", ("{plan}", "-q", "--html", "{out}"), other=("--timeline", "{other}")),
    Writer("export", "--output", ("{plan}", "--fsdp2", "-q", "-o", "{out}")),
    Writer("compare", "--json", ("{plan}", "{plan}", "-q", "--json", "{out}"), other=("--html", "{other}")),
    Writer("compare", "--html", ("{plan}", "{step}", "-q", "--html", "{out}"), other=("--json", "{other}")),
    Writer("memory", "--rows", ("{plan}", "-q", "--rows", "{out}"), other=("--plot", "{other}")),
    Writer("memory", "--plot", ("{plan}", "-q", "--plot", "{out}"), other=("--map", "{other}")),
    Writer("memory", "--map", ("{plan}", "-q", "--map", "{out}"), other=("--rows", "{other}")),
    Writer("explain-memory", "--json", ("{plan}", "--json", "{out}")),
    Writer("show", "--output", ("{plan}", "--json", "-o", "{out}")),
    Writer("layout", "--output", ("{plan}", "-o", "{out}")),
    Writer("reshard", "--output", ("{plan}", "{plan}", "-q", "-o", "{out}")),
    Writer("allocator-replay", "--json", ("{log}", "--json", "{out}"), "{log}"),
    Writer("trace", "--output", ("{trace}", "-q", "-o", "{out}"), "{trace}"),
    Writer("trace", "--strategy", ("{trace}", "-q", "-o", "{null}", "--strategy", "{out}"), "{trace}"),
    Writer(
        "cost", "--output", ("{table}", "--fit", str(CLUSTER), "--device", "h100-sxm", "-q", "-o", "{out}"), "{table}"
    ),
    Writer("calibrate", "--output", ("--from", "{measured}", "-o", "{out}"), "{measured}"),
    Writer("import-profile", "--output", ("{profile}", "--plan", "{plan}", "-q", "-o", "{out}")),
    Writer(
        "calibrate",
        "--measured",
        ("--device", "cpu", "--base", "{base}", "--measured", "{out}"),
        "{base}",
        ("--output", "{other}"),
    ),
)
TABLE = """\
device,collective,concurrent_groups,ranks_per_group,full_tensor_bytes,duration_ns
h100-sxm,all-gather,1,8,1048576,31136
h100-sxm,all-gather,1,8,2147483648,5343360
"""
MEASURED = """\
{"schema": "shardplan.measured/1", "device": {"kind": "cpu", "name": "an abacus", "memory_bytes": 1000000}, "ranks": \
2, "ranks_per_node": 2,
 "host": [{"what": "operator", "duration_ns": 1000, "least_ns": 900, "most_ns": 1100}], "failed": []}
"""
# One operator in one step.
PROFILE = """\
{"traceEvents": [
 {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 1.5, "dur": 100},
 {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 10, "dur": 20}]}
"""
# The tracer's command without the seconds that torch takes: what it would trace is in the file that it is given.
TRACER = """
import json, types
import shardplan.tracer
from shardplan import command
from shardplan.tracer import cli
from shardplan.tracer.errors import TracerError
class Options(types.SimpleNamespace):
    pass
def trace_source(source, options, progress):
    print("what a model prints")
    try:
        with open(source) as file:
            return json.load(file)
    except OSError as error:
        raise TracerError(f"cannot read {source}") from error
def strategy_of_source(source, options, progress):
    return [trace_source(source, options, progress)] * 2


shardplan.tracer.session = types.SimpleNamespace(
    Options=Options, trace_source=trace_source, strategy_of_source=strategy_of_source
)
sys.modules["shardplan.tracer.session"] = shardplan.tracer.session
command.run("shardplan trace", cli.main)
"""


# The command of calibrate without the measuring.
CALIBRATE = f"""
import json
from shardplan import command
from shardplan.calibrate import cli
cli._measure_on_ranks = lambda options: json.loads({MEASURED!r})
command.run("shardplan calibrate", cli.main)
"""
IN_PYTHON = {"trace": TRACER, "calibrate": CALIBRATE}


def program(name: str = "shardplan") -> str:
    return str(build_folder() / "bin" / name)


def commands() -> set[str]:
    """All that the program has, as it says itself."""
    said = subprocess.run([program()], capture_output=True, text=True, check=False).stderr
    return set(said.partition("The commands are ")[2].partition("\n")[0].split())


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tests" / "python" / "tracer"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "SHARDPLAN_PROGRAMS": str(build_folder() / "bin")}


def command_line(writer: Writer, files: dict[str, object], *more: str) -> list[str]:
    start = python(IN_PYTHON[writer.command]) if writer.command in IN_PYTHON else [program(), writer.command]
    return [*start, *(word.format_map({k: str(v) for k, v in files.items()}) for word in (*writer.words, *more))]


def run(line: list[str], **options) -> subprocess.CompletedProcess:
    given = {
        "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "timeout": 120, "env": environment(),
        **options,
    }
    return subprocess.run(line, check=False, **given)


def python(code: str, *arguments: object) -> list[str]:
    """A process that has the package, and nothing of torch."""
    return [
        sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'tools' / 'python')!r})\n{code}",
        *map(str, arguments),
    ]


def small_files() -> None:
    """In the child: a write that goes past 100 bytes of a file fails, as on a full disk."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # as a shell leaves it
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def everything_in(folder: pathlib.Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}

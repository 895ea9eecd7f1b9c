# SPDX-License-Identifier: Apache-2.0
"""Odd things that a user may give in place of a file: every command says what is wrong, in one line, with the code of
the kind of fault. And every command that reads a plan reads its text form."""

import json
import os
import re
import struct
import subprocess
import time

import pytest
from conftest import build_folder
from writers import (
    ALLOCATOR_LOG, CLUSTER, FLAGS, MEASURED, PROFILE, OPTIMIZE, TABLE, TRACE, TRACER, commands, environment,
    everything_in, program, python,
)

HAS_EXECUTOR = (build_folder() / "bin" / "shardplan-run").exists()
# Words with {file}, which the command reads.
READERS = {
    "rehearse --cluster": ("rehearse", "--cluster", "{file}", "-q", "--", "true"),
    "torchtitan --cluster": (
        "torchtitan", "--module", "llama3", "--config", "llama3_debugmodel", "--cluster", "{file}",
    ),
    "plan": ("plan", "{file}", "-o", "/dev/null"),
    "plan --strategy": ("plan", "{trace}", "--ranks", "2", "--strategy", "{file}", "-o", "/dev/null"),
    "plan --cluster": ("plan", "{trace}", "--cluster", "{file}", "-o", "/dev/null"),
    "validate": ("validate", "{file}"),
    "validate --ranks-apart": ("validate", "--ranks-apart", "{plan}", "{file}"),
    "simulate": ("simulate", "{file}"),
    "simulate second": ("simulate", "{plan}", "{file}"),
    "simulate --cluster": ("simulate", "{plan}", "--cluster", "{file}"),
    "memory": ("memory", "{file}"),
    "memory --strategy": ("memory", "{trace}", "--ranks", "2", "--strategy", "{file}"),
    "memory --cluster": ("memory", "{plan}", "--cluster", "{file}"),
    "explain-memory": ("explain-memory", "{file}"),
    "export --trace": ("export", "{plan}", "--fsdp2", "--trace", "{file}", "-o", "applied.py"),
    "explain-memory --trace": ("explain-memory", "{plan}", "--trace", "{file}"),
    "show": ("show", "{file}"),
    "layout": ("layout", "{file}"),
    "reshard": ("reshard", "{file}", "{plan}"),
    "reshard target": ("reshard", "{plan}", "{file}"),
    "diff": ("diff", "{plan}", "{file}"),
    "diff first": ("diff", "{file}", "{plan}"),
    "conformance": ("conformance", "{file}"),
    "allocator-replay": ("allocator-replay", "{file}"),
    "optimize": ("optimize", "{file}", *OPTIMIZE, "-o", "/dev/null"),
    "optimize --cluster": ("optimize", "{trace}", *OPTIMIZE, "--cluster", "{file}", "-o", "/dev/null"),
    "optimize --strategy": ("optimize", "{trace}", *OPTIMIZE, "--strategy", "{file}", "-o", "/dev/null"),
    "certify": ("certify", "{file}", "{certificate}", "--trace", "{trace}"),
    "certify certificate": ("certify", "{best}", "{file}", "--trace", "{trace}"),
    "certify --trace": ("certify", "{best}", "{certificate}", "--trace", "{file}"),
    "export": ("export", "{file}", "--fsdp2", "-o", "/dev/null"),
    "explain": ("explain", "{file}"),
    "explain --report": ("explain", "{best}", "--report", "{file}"),
    "compare": ("compare", "{file}", "{plan}"),
    "compare second": ("compare", "{plan}", "{file}"),
    "compare --cluster": ("compare", "{plan}", "{plan}", "--cluster", "{file}"),
    "cost": ("cost", "{file}"),
    "cost --cluster": ("cost", "{table}", "--cluster", "{file}"),
    "cost --fit": ("cost", "{table}", "--fit", "{file}", "-o", "/dev/null"),
    "calibrate --from": ("calibrate", "--from", "{file}", "-o", "/dev/null"),
    "calibrate --base": ("calibrate", "--from", "{measured}", "--base", "{file}", "-o", "/dev/null"),
    "import-profile": ("import-profile", "{file}", "--plan", "{plan}", "-q", "-o", "/dev/null"),
    "import-profile --plan": ("import-profile", "{profile}", "--plan", "{file}", "-q", "-o", "/dev/null"),
    "import-profile --snapshot": (
        "import-profile", "{profile}", "--plan", "{plan}", "--snapshot", "{file}", "-q", "-o", "/dev/null",
    ),
    "sweep": ("sweep", "{file}", "-q", "--", "--unit", "layers.*"),
    "sweep --cluster": ("sweep", "{trace}", "--cluster", "{file}", "-q", "--", "--unit", "layers.*"),
    "sweep --merge": ("sweep", "--merge", "{file}", "-o", "merged.csv"),
    "evaluate": ("evaluate",),  # reads the file that its standard input names
    "reshard-checkpoint": ("reshard-checkpoint", "{file}", "target", "--world-size", "2", "-q"),
    "reshard-checkpoint --target-layout": (
        "reshard-checkpoint", "{state}", "target", "--target-layout", "{file}", "-q",
    ),
    "trace": ("trace", "{file}", "-q", "-o", "traced.json"),
}
if HAS_EXECUTOR:
    READERS["run"] = ("run", "{file}", "--device", "virtual")
    READERS["run --report"] = ("run", "{plan}", "--report", "{file}")
# LibTorch loads slowly, Python starts slowly.
SLOW = {
    "run", "run --report", "trace", "torchtitan --cluster", "sweep", "sweep --cluster", "sweep --merge",
    "calibrate --base", "conformance",
}
# Commands that answer for each thing that they are asked, and say in the answer what is wrong: their exit codes.
ANSWERS = {"sweep": 1, "sweep --cluster": 1, "evaluate": 0}
# Commands that do not read the file from front to back, or not by themselves.
NO_PIPES = {"conformance", "sweep", "sweep --cluster", "evaluate", "reshard-checkpoint", "trace", "run --report"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    plan = folder / "plan.json"
    subprocess.run([program(), "plan", TRACE, *FLAGS, "-q", "-o", plan], check=True)
    subprocess.run([program(), "show", plan, "-o", folder / "plan.txt"], check=True)
    made = (
        "-o", folder / "best.json", "--report", folder / "report.json", "--certificate", folder / "certificate.json",
    )
    subprocess.run([program(), "optimize", TRACE, *OPTIMIZE, *made], check=True, capture_output=True)
    (folder / "table.csv").write_text(TABLE)
    (folder / "measured.json").write_text(MEASURED)
    (folder / "profile.json").write_text(PROFILE)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    (folder / "state.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "blank").write_text(" \n\t\n")
    (folder / "binary").write_bytes(bytes(range(256)) * 8)
    (folder / "words").write_text("these are words\nand no document\n")
    (folder / "list").write_text("[1, 2, 3]\n")
    (folder / "object").write_text('{"schema": "shardplan.nothing/1"}\n')
    (folder / "number").write_text("42")
    (folder / "half").write_text(plan.read_text()[: plan.stat().st_size // 2])
    (folder / "half text").write_text((folder / "plan.txt").read_text()[:2000])
    (folder / "deep").write_text("[" * 100_000)
    (folder / "bom").write_bytes(b"\xef\xbb\xbf" + plan.read_bytes()[:100])
    (folder / "nul").write_bytes(b"\0" * 1000)
    (folder / "no utf-8").write_bytes(plan.read_bytes().replace(b"layers", b"l\xe4yers"))
    return folder


STRANGE = [
    "nowhere", "loop", "loop/inside", "folder", "n" * 300, "plan.json/inside", "empty", "blank", "binary", "words",
    "list", "object", "number", "half", "half text", "deep", "bom", "nul", "no utf-8", "/dev/null", "",
]


def tried(name, path, folder, **options):
    made = {file.stem: file for file in folder.glob("*.*") if file.suffix in (".json", ".csv", ".safetensors")}
    words = [word.format(file=path, trace=TRACE, **made) for word in READERS[name]]
    asked = json.dumps([str(path), "--unit", "layers.*"]) + "\n" if name == "evaluate" else None
    return subprocess.run(
        [program(), *words],
        input=asked,
        capture_output=True,
        text=True,
        timeout=300,  # of `torchtitan` among other tests on two cores
        check=False,
        cwd=folder,
        env=environment(),
        **options,
    )


def what_was_said(done):
    """But for how long `optimize` has searched."""
    return "".join(line for line in done.stdout.splitlines(keepends=True) if not line.startswith("search "))


def test_every_command_is_given_strange_files():
    """A new command gets an entry above."""
    # A command that reads no file.
    assert {words[0] for words in READERS.values()} | ({"run"} - {"run" if HAS_EXECUTOR else ""}) == commands() - {
        "doctor"
    }


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_none_is_bad_input(name, files):
    there = everything_in(files)
    for strange in STRANGE if name not in SLOW else ("nowhere", "words", "deep"):
        done = tried(name, strange, files)
        assert everything_in(files) == there, (strange, "something is left")
        if name in ANSWERS and (strange or name == "evaluate"):
            assert done.returncode == ANSWERS[name] and not done.stderr, (strange, done.returncode, done.stderr)
            lines = [
                line
                for line in done.stdout.splitlines()
                if ("error" if name == "evaluate" else "not simulated: ") in line and "Traceback" not in line
            ]
            assert len(lines) == 1 and os.path.basename(strange)[:100] in lines[0], (strange, done.stdout)
            continue
        assert done.returncode == (
            2
            if not strange
            and ("--" in name or name.startswith(("sweep", "import")))
            and name != "validate --ranks-apart"
            else 3
        ), (strange, done.returncode, done.stdout[-300:], done.stderr)
        if not strange and done.returncode == 2:
            continue
        assert "Traceback" not in done.stderr, (strange, done.stderr)
        own = ("shardplan-run: ", "shardplan conformance: ", "shardplan trace: ", "shardplan torchtitan: ")
        lines = [line for line in done.stderr.splitlines() if "error: " in line or line.startswith(own)]
        assert len(lines) == 1, (strange, done.stderr)
        assert not strange or os.path.basename(strange) in lines[0], (strange, lines)


@pytest.mark.parametrize(
    "name",
    [
        "sweep", "sweep --cluster", "evaluate", "reshard-checkpoint", "trace", "calibrate --from", "calibrate --base",
        "sweep --merge", "cost", "explain",
    ],
)
def test_a_pipe_that_nobody_writes_to_ends_the_command(name, files, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    done = tried(name, tmp_path / "pipe", files)
    assert done.returncode == ANSWERS.get(name, 3), (done.returncode, done.stderr)
    assert "pipe" in (done.stdout if name in ANSWERS else done.stderr) and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [name for name in READERS if name not in NO_PIPES - {"run --report"}])
def test_a_pipe_is_read_once_and_one_that_nobody_writes_to_is_told(name, files, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if name in ("validate", "run --report"):  # one without a writer takes seconds, of any reader
        begin = time.monotonic()
        done = tried(name, pipe, files)
        assert done.returncode == 3 and time.monotonic() - begin < 30
        assert "no process writes to it" in done.stderr or "every rank reads it" in done.stderr
    good = {
        "plan": TRACE, "explain-memory --trace": TRACE, "allocator-replay": ALLOCATOR_LOG, "optimize": TRACE,
        "certify": files / "best.json", "certify certificate": files / "certificate.json", "certify --trace": TRACE,
        "explain --report": files / "report.json", "cost": files / "table.csv", "cost --fit": CLUSTER,
        "calibrate --from": files / "measured.json", "calibrate --base": CLUSTER,
        "import-profile": files / "profile.json",
    }.get(name, files / "plan.json")
    document = json.loads(good.read_text()) if good.suffix == ".json" else None
    if "--strategy" in name or "--cluster" in name:
        document = document["strategy" if "--strategy" in name else "cluster"]
        document["schema"] = f"shardplan.{'strategy' if '--strategy' in name else 'cluster'}/1"
        document.pop("mesh", None)
    if name == "run --report":
        return
    (tmp_path / "document").write_text(good.read_text() if document is None else json.dumps(document))
    plain = tried(name, tmp_path / "document", files)
    writer = subprocess.Popen(["sh", "-c", f"cat {tmp_path}/document > {pipe}"])
    done = tried(name, pipe, files)
    writer.wait(timeout=30)
    assert (done.returncode, what_was_said(done).replace("/pipe", "/document")) == (
        plain.returncode,
        what_was_said(plain),
    ), done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "validate", "validate --ranks-apart", "simulate", "simulate second", "memory", "explain-memory", "show", "diff",
        "run",
    ],
)
def test_the_text_form_of_a_plan_is_a_plan(name, files):
    if name not in READERS:
        pytest.skip("no executor in this build")
    as_json, as_text = (tried(name, files / f"plan.{form}", files) for form in ("json", "txt"))
    assert as_text.returncode == as_json.returncode == 0, as_text.stderr
    if "apart" not in name:  # which names equal files once
        assert as_text.stdout.replace("plan.txt", "plan.json") == as_json.stdout


def test_the_python_module_reads_the_text_form(files):
    torch_plan = pytest.importorskip("shardplan.torch._job.native").native.read_plan
    assert torch_plan(str(files / "plan.txt")).digest == torch_plan(str(files / "plan.json")).digest


NUMBERS = ("0", "-1", "1.5", "many", "", "99999999999999999999", "nan")


@pytest.mark.parametrize("words", [
    ("plan", TRACE, "-o", "/dev/null", "--ranks"), ("memory", TRACE, "--ranks"),
    ("plan", TRACE, "-o", "/dev/null", "--accumulate"),
    *([("run", "plan.json", "--ranks"), ("run", "plan.json", "--steps")] if HAS_EXECUTOR else []),
], ids=lambda words: f"{words[0]} {words[-1]}")  # fmt: skip
def test_numbers_that_are_none_are_usage_errors(words, files):
    for number in NUMBERS if words[0] != "run" else NUMBERS[:1]:
        done = subprocess.run(
            [program(), *map(str, words), number], capture_output=True, text=True, timeout=60, check=False, cwd=files
        )
        assert done.returncode == 2, (number, done.returncode, done.stderr)
        assert words[-1] in done.stderr, done.stderr


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_the_tracer(number, tmp_path):
    for flag in ("--batch", "--seq", "--steps"):
        done = subprocess.run(
            [*python(TRACER), str(TRACE), "-o", str(tmp_path / "t.json"), flag, number],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and flag in done.stderr and not re.search("Traceback", done.stderr)


def test_an_empty_name_of_an_output_is_refused(tmp_path):
    for words in (("show", "plan.json"), ("plan", TRACE)):
        done = subprocess.run(
            [program(), *map(str, words), "-o", ""], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 2 and "names no file" in done.stderr, done
        assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not HAS_EXECUTOR, reason="no executor in this build")
def test_a_device_that_there_is_not_is_told_with_those_that_there_are(files):
    done = subprocess.run(
        [program(), "run", "plan.json", "--device", "tpu"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=files,
    )
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("--device", "tpu", "cpu", "cuda", "virtual")), done.stderr

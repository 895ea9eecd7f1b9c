# SPDX-License-Identifier: Apache-2.0
"""Outputs are written whole or not at all: signals at any moment, full disks, links, outputs that are inputs. Real
processes, every command."""

import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import time

import pytest
from conftest import ROOT
from writers import (
    ALLOCATOR_LOG, CLUSTER, FLAGS, MEASURED, PROFILE, OPTIMIZE, TABLE, TRACE, WRITERS, command_line, commands,
    everything_in, program, python, run, small_files,
)

SEED = int(os.environ.get("SHARDPLAN_SEED", "20"))
OLD = "what was there before\n"
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
HEADER = b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
TENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(16)
each_writer = pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.name)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Inputs of commands, in a folder of their own."""
    folder = tmp_path_factory.mktemp("inputs")
    files = {
        "trace": folder / "trace.json", "plan": folder / "plan.json", "log": folder / "log.json", "null": "/dev/null",
    }
    files |= {"table": folder / "table.csv", "measured": folder / "measured.json", "profile": folder / "profile.json"}
    files |= {"base": folder / "base.json"}
    shutil.copy(CLUSTER, files["base"])
    files["table"].write_text(TABLE)
    files["measured"].write_text(MEASURED)
    files["profile"].write_text(PROFILE)
    shutil.copy(TRACE, files["trace"])
    shutil.copy(ALLOCATOR_LOG, files["log"])
    made = run([program(), "plan", files["trace"], *FLAGS, "-q", "-o", files["plan"]])
    assert made.returncode == 0, made.stderr
    simulated = run([program(), "simulate", files["plan"], "-q", "--report", "-"], stdout=subprocess.PIPE)
    files["step"] = folder / "step.json"
    files["step"].write_text(
        json.dumps(
            {**json.loads(simulated.stdout), "measured": {"device": "GPU", "rank": 0, "ranks": 1, "steps_ns": [1]}}
        )
    )
    files |= {"best": folder / "best.json", "report": folder / "report.json"}
    made = run([program(), "optimize", files["trace"], *OPTIMIZE, "-o", files["best"], "--report", files["report"]])
    assert made.returncode == 0, made.stderr
    return files


def test_every_output_of_every_command_is_tried():
    found = set()
    for command in sorted(commands()):
        text = subprocess.run([program(), command, "--help"], capture_output=True, text=True, check=True).stdout
        for line in text.splitlines():
            flag = re.match(r"\s+(?:-\w,\s*)?(?:-\w FILE, )?(--[\w-]+)", line)
            # argparse puts the help of a long flag on the next line.
            about = line + text[text.index(line) + len(line) :].lstrip("\n").split("\n")[0] * (len(line) < 40)
            if (
                flag
                and re.search(r"\b[Ww]rite\b|[Ww]here to write", about)
                and not re.search(r"[Ww]rites? .*GPU", about)
            ):
                found.add(f"{command} {flag.group(1)}")
    # Each run imports torch: tests/python/rehearse, tests/python/races, tests/python/titan.
    found -= {f"rehearse --{what}" for what in ("report", "html", "snapshot", "record", "kineto", "step-html")}
    found -= {"torchtitan --report"}
    # import-profile writes it (test_self_profile.py).
    assert found == {writer.name for writer in WRITERS} | ({"run --profile"} if "run --profile" in found else set())


def test_nothing_else_in_the_sources_writes_files():
    """One writer in C++, one in Python; and checkpoints, whose files are written piece by piece, beside their place
    until all are whole. A rehearsed process writes what it tells into the command's scratch folder, and has nothing of
    this package."""
    checkpoints = {"schemas/checkpoints/files/file_sink.cc", "schemas/checkpoints/files/journal.cc"}
    writes = {
        ".cc": (
            r"ofstream|\bfopen\(|\brename\(|\bmkstemp\(|O_CREAT",
            {"schemas/src/files/file_write.cc", "tools/cli/support.cc"} | checkpoints,
        ),
        ".py": (
            r"""\bopen\([^)]*["'][wax]b?\+?["']|(?<!files)\.write_(?:text|bytes)\(|json\.dump\(""",
            {"tools/python/shardplan/files.py", "tools/python/shardplan/command.py"},
        ),
    }
    for suffix, (pattern, writers) in writes.items():
        found = set()
        for folder in ("schemas/src", "simulator/src", "planner/src", "executor", "tools"):
            for path in (ROOT / folder).rglob(f"*{suffix}"):
                if "rehearse" not in path.parts and re.search(pattern, path.read_text()):
                    found.add(str(path.relative_to(ROOT)))
        assert found <= writers


@pytest.mark.parametrize(
    "out, why",
    [
        ("/dev/full", "No space left"),
        ("nowhere/out", "No such file"),
        ("folder", "Is a directory"),
        ("file/out", "Not a directory"),
    ],
)
@pytest.mark.parametrize("flag", ["-o", "--html", "reshard-checkpoint"])
def test_an_output_that_grows_or_is_a_folder_cannot_be_written(flag, out, why, tmp_path):
    """Commands whose outputs are no single file, written at once."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text(OLD)
    (tmp_path / "state.safetensors").write_bytes(TENSORS)
    sweep = ["sweep", TRACE, "-q", flag, out, "--", "--unit", "layers.*"]
    line = (
        ["reshard-checkpoint", "state.safetensors", out, "--world-size", "2"] if flag == "reshard-checkpoint" else sweep
    )
    done = run([program(), *line], cwd=tmp_path)
    there_already = flag == "reshard-checkpoint" and out in ("/dev/full", "folder")
    assert done.returncode == (2 if there_already else 4) and "Traceback" not in done.stderr, done
    assert len(done.stderr.splitlines()) == 1 and (why in done.stderr or flag == "reshard-checkpoint"), done.stderr
    assert everything_in(tmp_path) == {"folder", "file", "state.safetensors"} and not everything_in(tmp_path / "folder")
    assert (tmp_path / "file").read_text() == OLD


@each_writer
def test_a_full_disk_leaves_the_old_file(writer, inputs, tmp_path):
    out = tmp_path / "out"
    out.write_text(OLD)
    done = run(command_line(writer, {**inputs, "out": out}), preexec_fn=small_files)
    assert done.returncode == 4, (done.returncode, done.stderr)
    assert "out" in done.stderr and "File too large" in done.stderr
    assert out.read_text() == OLD and everything_in(tmp_path) == {"out"}
    done = run(command_line(writer, {**inputs, "out": "/dev/full"}))
    assert done.returncode == 4 and "No space left on device" in done.stderr


@each_writer
def test_what_a_link_points_to_keeps_owner_and_mode(writer, inputs, tmp_path):
    (tmp_path / "there").mkdir()
    target, link, again = tmp_path / "there" / "target", tmp_path / "link", tmp_path / "again"
    target.write_text(OLD)
    target.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(target, 1234, 4321)
    before = target.stat()
    link.symlink_to("there/target")
    again.symlink_to("link")
    done = run(command_line(writer, {**inputs, "out": again}))
    assert done.returncode == 0, done.stderr
    after = target.stat()
    assert target.read_text() != OLD and link.is_symlink() and again.is_symlink()
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o640, before.st_uid, before.st_gid)
    assert everything_in(tmp_path / "there") == {"target"}
    missing = tmp_path / "there" / "made"
    dangling = tmp_path / "dangling"
    dangling.symlink_to(missing)
    assert run(command_line(writer, {**inputs, "out": dangling})).returncode == 0
    assert dangling.is_symlink() and writer.says(missing.read_bytes()) == writer.says(target.read_bytes())


@each_writer
def test_an_output_that_is_an_input_is_refused(writer, inputs, tmp_path):
    read = tmp_path / "read"
    shutil.copy(str(writer.input).format_map(inputs), read)
    content = read.read_bytes()
    hard, soft, other = tmp_path / "hard", tmp_path / "soft", tmp_path / "other"
    os.link(read, hard)
    soft.symlink_to(hard)
    for out in (read, hard, soft, tmp_path / "." / "read"):
        done = run(command_line(writer, {**inputs, writer.input.strip("{}"): read, "out": out}))
        assert done.returncode == 2, (out, done.stderr)
        assert "would replace" in done.stderr and str(out) in done.stderr
    assert read.read_bytes() == content and everything_in(tmp_path) == {"read", "hard", "soft"}
    if not writer.other:
        return
    one, same = tmp_path / "one", tmp_path / "same"
    same.symlink_to("one")
    for second in (one, same):
        done = run(command_line(writer, {**inputs, "out": one, "other": second}, *writer.other))
        assert done.returncode == 2 and "two outputs are one file" in done.stderr, done.stderr
    assert not one.exists() and not other.exists()


@each_writer
def test_outputs_that_cannot_be_are_told_before_any_work(writer, inputs, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe")
    for out, says in (
        (loop, "Too many levels of symbolic links"),
        (folder, "Is a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
        (tmp_path / "no" / "folder" / "out", "No such file or directory"),
        (f"{tmp_path}/new/", "Is a directory|No such file or directory"),
        (tmp_path / "loop" / "out", "Too many levels of symbolic links"),
    ):
        done = run(command_line(writer, {**inputs, "out": out}))
        assert done.returncode == 4, (out, done.returncode, done.stderr)
        assert re.search(says, done.stderr), done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert everything_in(tmp_path) == {"loop", "folder", "pipe"}


def ended(line, out, delay, number, **options):
    """Whether the signal came in time. The file has the old bytes or all the new ones."""
    started = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    time.sleep(delay)
    started.send_signal(number)
    return started.wait(timeout=60) == -number


@each_writer
def test_signals_leave_the_old_file_or_the_new_one(writer, inputs, tmp_path):
    """At random moments of a run."""
    out = tmp_path / "out"
    line = command_line(writer, {**inputs, "out": out})
    begin = time.monotonic()
    assert run(line).returncode == 0
    duration, new = time.monotonic() - begin, out.read_bytes()
    choose = random.Random(f"{SEED} {writer.name}")
    print(f"SHARDPLAN_SEED={SEED}")
    for number in ENDS:
        out.write_text(OLD)
        ended(line, out, choose.uniform(0.2, 1.0) * duration, number)
        left = out.read_bytes()
        assert left == OLD.encode() or writer.says(left) == writer.says(new)
        if number != signal.SIGKILL:
            assert everything_in(tmp_path) == {"out"}
    assert run(line).returncode == 0  # and it removes what SIGKILL has left
    assert everything_in(tmp_path) == {"out"} and writer.says(out.read_bytes()) == writer.says(new)


SLOW_WRITER = """
import os, signal, time
from shardplan import command, files
real = os.link if sys.argv[2] == "linked" else os.fsync
def slowly(*arguments, **named):
    made = real(*arguments, **named)
    print("now", flush=True)
    time.sleep(0.3)
    return made
os.link = slowly if sys.argv[2] == "linked" else os.link
os.fsync = slowly if sys.argv[2] != "linked" else os.fsync
if sys.argv[2] == "named":
    os.O_TMPFILE = 1 << 31
    real_open = os.open
    def without(path, flags, *rest, **named):
        if flags & os.O_TMPFILE:
            raise OSError(95, "not supported")
        return real_open(path, flags, *rest, **named)
    os.open = without
def main():
    files.write_text(sys.argv[1], "new\\n" * 1000)
    return 0
command.run("writer", main)
"""


def test_the_python_writer_needs_no_proc(tmp_path):
    out = tmp_path / "out"
    for content in ("first", "second"):
        written = run(
            python(
                "from shardplan import files; files._OPEN_FILES = '/no/such/folder'; files.write_text(sys.argv[1], "
                "sys.argv[2])",
                out,
                content,
            )
        )
        assert written.returncode == 0, written.stderr
        assert out.read_text() == content and everything_in(tmp_path) == {"out"}


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
@pytest.mark.parametrize("where", ["flushed", "linked", "named"])
def test_the_python_writer_under_signals(where, number, tmp_path):
    """In the middle of its work: before the file has a name, when it has one, on a file system that has no files
    without a name."""
    out = tmp_path / "out"
    out.write_text(OLD)
    writer = subprocess.Popen(
        python(SLOW_WRITER, out, where), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "now\n", writer.stderr.read()
    writer.send_signal(number)
    assert writer.wait(timeout=30) == -number
    assert out.read_text() in (OLD, "new\n" * 1000)
    if number != signal.SIGKILL:
        assert everything_in(tmp_path) == {"out"}
    # The next writer in the folder, of either language, removes what is left.
    for line in (python("from shardplan import files; files.write_text(sys.argv[1], 'x')", tmp_path / "other"),):
        assert run(line).returncode == 0
    assert everything_in(tmp_path) == {"out", "other"}


def test_the_commands_remove_what_a_killed_writer_left_and_no_more(inputs, tmp_path):
    import fcntl

    left, used = tmp_path / ".shardplan-1-0.tmp", tmp_path / ".shardplan-2-0.tmp"
    left.write_text("left")
    show = command_line(
        next(writer for writer in WRITERS if writer.command == "show"), {**inputs, "out": tmp_path / "out"}
    )
    with open(used, "w") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert run(show).returncode == 0
        assert everything_in(tmp_path) == {"out", used.name}
        assert (
            run(python("from shardplan import files; files.write_text(sys.argv[1], 'x')", tmp_path / "out")).returncode
            == 0
        )
        assert everything_in(tmp_path) == {"out", used.name}
    assert run(show).returncode == 0
    assert everything_in(tmp_path) == {"out"}


def test_a_pipe_takes_the_bytes_and_a_pipe_without_a_reader_is_told(inputs, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    show = command_line(next(writer for writer in WRITERS if writer.command == "show"), {**inputs, "out": pipe})
    done = run(show)
    assert done.returncode == 4 and "no process reads it" in done.stderr
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    assert run(show).returncode == 0
    assert reader.communicate(timeout=30)[0] == inputs["plan"].read_bytes()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


SCRATCH = """
import pathlib, time
from shardplan import command, files
def main():
    with files.scratch_folder() as folder:
        (folder / "file").write_text("x")
        print(folder, flush=True)
        time.sleep(20)
    return 0
command.run("scratch", main)
"""


def test_scratch_folders_go(tmp_path):
    """With the process that a signal ends; of one that was killed with the next."""
    where = {**os.environ, "TMPDIR": str(tmp_path)}
    for number in ENDS:
        process = subprocess.Popen(python(SCRATCH), stdout=subprocess.PIPE, text=True, env=where)
        folder = process.stdout.readline().strip()
        assert everything_in(tmp_path) == {os.path.basename(folder)}
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
        assert bool(everything_in(tmp_path)) == (number == signal.SIGKILL)
    other = subprocess.Popen(python(SCRATCH), stdout=subprocess.PIPE, text=True, env=where)
    folder = other.stdout.readline().strip()
    assert everything_in(tmp_path) == {os.path.basename(folder)}
    other.terminate()
    other.wait(timeout=30)
    assert not everything_in(tmp_path)

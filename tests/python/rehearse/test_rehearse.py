# SPDX-License-Identifier: Apache-2.0
"""`shardplan rehearse`: other people's scripts as one rank of a large job, on the device in software."""

import json
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, build_folder

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
PHASES = ["setup"] + ["forward", "backward", "optimizer"] * 3
MEMORY_BYTES = 84_943_962_112  # of the shipped h100_sxm


def start(*arguments, **environment):
    """arguments: of the command, and behind -- what it rehearses."""
    library = os.environ.get("SHARDPLAN_DEVICE_LIBRARY_FOLDER", build_folder() / "device")
    if not (pathlib.Path(library) / "libshardplan_device.so").exists():
        pytest.skip(f"no libshardplan_device.so in {library}: torch has no CUDA, or the build has sanitizers")
    own = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tools" / "python"),
        "SHARDPLAN_PROGRAMS": str(build_folder() / "bin"),
        "SHARDPLAN_DEVICE_LIBRARY_FOLDER": str(library),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "shardplan.rehearse", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own,
    )


def rehearse(*arguments, **environment):
    process = start(*arguments, **environment)
    try:
        said = process.communicate(timeout=300)
    finally:
        process.terminate()
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def rows_of(text):
    """(step, phase) of the table. Steps that take the same are one row there."""
    rows = re.findall(r"^(\d*)(?:-(\d+))? +(setup|forward|backward|optimizer) ", text, re.MULTILINE)
    if not rows:
        return []
    first = [(int(first or 0), int(last or first or 0), phase) for first, last, phase in rows]
    return sorted(
        ((step, phase) for begin, end, phase in first for step in range(begin, end + 1)),
        key=lambda row: (row[0], PHASES.index(row[1])),
    )


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Rank 0 of 64: what it printed, its report, page and snapshot."""
    folder = tmp_path_factory.mktemp("everything")
    outputs = [word for name in ("report", "html", "snapshot") for word in (f"--{name}", folder / name)]
    done = rehearse("--gpus", 64, *outputs, "--", "torchrun", "--nproc_per_node", 8, SCRIPTS / "everything.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, folder


def test_what_a_script_does_beside_training_works(everything):
    printed = everything[0].stdout
    for line in (
        "mesh [('replicate', 0, 8), ('shard', 0, 8)]", "gloo [2.0, 2.0, 2.0] gloo 2", "gathered 64 True", "told from 0",
    ):
        assert line in printed
    assert "rank 0 of 64 on H100 SXM 80GB, 3 steps" in printed
    assert not (everything[1] / "checkpoint").exists()  # it was empty


def test_files_of_a_real_training_stay(tmp_path):
    (tmp_path / "large.pt").write_text("precious")
    (tmp_path / "small.pt").write_text("precious")
    done = rehearse(
        "--gpus=8", "--rank=3", "--steps=0", "--", "torchrun", "--nproc_per_node", 8, SCRIPTS / "keeps.py", tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded torch.Size([10])" in done.stdout and "part [3] profiled True" in done.stdout
    assert (tmp_path / "large.pt").read_text() == (tmp_path / "small.pt").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["large.pt", "new.pt", "small.pt"]


def test_ranks_that_a_script_starts_by_itself_are_refused():
    done = rehearse("--", sys.executable, SCRIPTS / "own_ranks.py")
    assert (
        done.returncode == 3
        and "the script starts its ranks as processes of its own, which cannot be rehearsed: start it by torchrun"
        in done.stderr
    )


def test_a_command_without_flags_and_a_device_that_is_too_small(shardplan):
    done = shardplan("rehearse", "--", "true")
    assert done.returncode == 3 and "no Python process of true imported torch" in done.stderr
    done = shardplan("rehearse", "--device-memory", "80", "--", "true")
    assert done.returncode == 3 and "a CUDA context alone takes 545259520 bytes (found 80, expected more" in done.stderr


def test_the_steps_have_their_phases_and_then_the_script_is_ended(everything):
    printed = everything[0].stdout
    assert [phase for _, phase in rows_of(printed)] == PHASES
    assert re.findall(r"^most (\d)", printed, re.MULTILINE) == ["0", "1", "2"]


def test_the_script_reads_the_peaks_that_it_would_read_without_us(everything):
    done, folder = everything
    most = {step: (int(a), int(b)) for step, a, b in re.findall(r"^most (\d) (\d+) (\d+)", done.stdout, re.MULTILINE)}
    phases = json.loads((folder / "report").read_text())["extensions"]["rehearse"]["phases"]

    def largest(steps):
        return max(row["allocated_bytes"] for row in phases if row["step"] in steps)

    assert most["0"] == (largest({0, 1}),) * 2
    assert most["2"] == (largest({2, 3}),) * 2  # the script reset its peaks before step 2


def test_categories_add_up_to_the_peak(everything):
    report = json.loads((everything[1] / "report").read_text())
    sizes = {one["category"]: one["size_bytes"] for one in report["memory"]["peak_by_category"]}
    of_nccl = sizes.pop("nccl_buffers")
    assert sum(sizes.values()) == report["memory"]["peak_bytes"]
    assert of_nccl % 154_140_672 == 0
    assert {"param_sharded", "optimizer_state", "param_unsharded", "saved"} <= sizes.keys()
    modules = report["extensions"]["rehearse"]["modules"]
    assert any(one["module"] == "2.up" for one in modules)


def test_outputs_are_a_valid_report_a_page_and_torchs_snapshot(everything, shardplan):
    _, folder = everything
    (folder / "report.json").write_text((folder / "report").read_text())
    assert shardplan("validate", folder / "report.json").returncode == 0
    page = (folder / "html").read_text()
    assert "<svg" in page and "optimizer_state" in page and "http" not in page
    assert pickle.loads((folder / "snapshot").read_bytes())["device_traces"][0]


def test_another_rank_receives_what_rank_0_sends(tmp_path):
    done = rehearse(
        "--gpus", 64, "--rank", 5, "--steps", 1, "--", "torchrun", SCRIPTS / "everything.py", tmp_path,
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 is rehearsed first: rank 5 receives an object of it" in done.stderr
    assert "mesh [('replicate', 0, 8), ('shard', 5, 8)]" in done.stdout
    assert "told from 0" in done.stdout
    assert "rank 5 of 64" in done.stdout


def test_a_later_pipeline_stage_gets_its_shapes_from_the_one_before():
    done = rehearse("--gpus", 2, "--rank", 1, "--", "torchrun", SCRIPTS / "pipeline.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stage 1 of 2" in done.stdout
    assert [phase for _, phase in rows_of(done.stdout)] == PHASES[:7]


def test_accelerate_launches_one_rank_with_fsdp2(tmp_path):
    words = [
        "accelerate", "launch", "--use_fsdp", "--fsdp_version", 2, "--fsdp_auto_wrap_policy", "NO_WRAP",
        SCRIPTS / "accelerated.py",
    ]
    done = rehearse("--gpus", 16, "--rank", 3, "--", *words, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process 3 of 16 DistributedType.FSDP" in done.stdout
    assert len(rows_of(done.stdout)) == len(PHASES)


def test_spawned_processes_are_the_one_rank_and_out_of_memory_names_the_line(tmp_path):
    done = rehearse(
        "--rank", 1, "--gpus-per-node", 4, "--device-memory", "24GiB", "--", sys.executable, SCRIPTS / "spawned.py",
        tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    printed = done.stdout
    assert "devices 4" in printed
    assert "store b'here' True" in printed
    assert "store rehearsal: rank 1 reads the key 'what nobody sets'" in printed
    assert (tmp_path / "big.pt").stat().st_size == 0 < (tmp_path / "small.pt").stat().st_size
    assert "rank 1 of 4" in printed
    assert [phase for _, phase in rows_of(printed)] == PHASES[:7] + ["forward"]
    assert re.search(r"fits +no: out of memory", printed)
    assert re.search(
        r"out of memory in forward of step 3: .*spawned.py:\d+, module [01]\n +model\(torch.randn", printed
    )
    assert "torch.OutOfMemoryError" in done.stderr


def test_a_script_that_ends_before_a_step_or_raises():
    done = rehearse("--", sys.executable, SCRIPTS / "ends.py")
    assert done.returncode == 3
    assert f"torch {MEMORY_BYTES}" in done.stdout
    assert "the script ended before a step (exit code 0): no backward ran" in done.stderr
    raised = rehearse("--", "bash", "-c", f"{sys.executable} {SCRIPTS / 'ends.py'} raise || exit 17")
    assert raised.returncode == 17
    assert re.search(r"the script raised ValueError in setup, .*ends.py:\d+: no data", raised.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--gpus", "4", "--"], 2, "what to rehearse is missing"),
        (["--gpus", "4"], 2, "what to rehearse is missing"),
        (["--gpus", "4", "--rank", "4", "--", "true"], 2, "of 4 ranks the last is 3"),
        (["--device-memory", "many", "--", "true"], 2, "expected bytes"),
        (["--", "no-such-program"], 3, "no-such-program: no such program"),
        (["--cluster", "z100", "--", "true"], 3, "nor a shipped cluster of that name"),
        (["--report", "/no/folder/r.json", "--", "true"], 4, "cannot write /no/folder/r.json"),
        (["--report", "same", "--html", "same", "--", "true"], 2, "two outputs are one file"),
        (["--", "true"], 3, "no Python process of true imported torch"),
    ],
)
def test_bad_input_says_what_to_do(arguments, code, said):
    done = rehearse(*arguments)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert done.stdout == ""


def test_what_the_command_started_ends_with_it(tmp_path):
    process = start("--", "bash", "-c", f"sleep 300 & echo $! > {tmp_path / 'pid'}; wait")
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    assert (
        not pathlib.Path(f"/proc/{pid}/cmdline").exists()
        or b"sleep" not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def test_an_interpreter_without_torch_is_named(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    done = rehearse("--", tmp_path / "venv" / "bin" / "python", "-c", "import torch")
    assert done.returncode == 4
    assert re.search(r"torch is not installed in .*venv/bin/python", done.stderr)


def test_a_rank_that_the_launcher_does_not_start_is_refused():
    done = rehearse("--rank", 9, "--", "torchrun", "--nnodes", 2, "--nproc_per_node", 4, SCRIPTS / "ends.py")
    assert done.returncode == 2
    assert "--rank 9: the job has 8 ranks (found 9, expected 0 to 7)" in done.stderr


def test_deepspeeds_launcher_starts_one_rank(tmp_path):
    """Its own parser reads its words; the one here has those of deepspeed/launcher/runner.py that count."""
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("import torch\n")
    flags = "".join(
        f"    parser.add_argument('--{flag}', action='store_true')\n"
        for flag in ("module", "no_python", "no_local_rank")
    )
    numbers = "".join(
        f"    parser.add_argument('--{flag}', type=int, default=-1)\n" for flag in ("num_gpus", "num_nodes")
    )
    rest = (
        "    parser.add_argument('user_script')\n    parser.add_argument('user_args', nargs=argparse.REMAINDER)\n    "
        "return parser.parse_args(args)\n\n\ndef main(args=None):\n    raise SystemExit('its own')\n"
    )
    (package / "runner.py").write_text(
        "import argparse\n\n\ndef parse_args(args=None):\n    parser = "
        f"argparse.ArgumentParser()\n{flags}{numbers}{rest}"
    )
    command = tmp_path / "deepspeed.py"
    command.write_text("from deepspeed.launcher.runner import main\nmain()\n")
    command.rename(tmp_path / "bin")
    (tmp_path / "bin").rename(tmp_path / "ds")
    (tmp_path / "train.py").write_text(
        "import os, sys, torch\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n"
    )
    words = [sys.executable, tmp_path / "ds", "--num_nodes", 2, tmp_path / "train.py", "--deepspeed", "config.json"]
    done = rehearse("--rank", 9, "--", *words, PYTHONPATH=f"{ROOT / 'tools' / 'python'}:{tmp_path}")
    assert "9 16 ['--local_rank=1', '--deepspeed', 'config.json']" in done.stdout, done.stderr
    assert done.returncode == 3


def test_a_killed_rank_leaves_the_steps_that_were_over(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, signal, torch\nmodel = torch.nn.Linear(64, 64).cuda()\noptimizer = "
        "torch.optim.SGD(model.parameters())\n"
        "for step in range(3):\n    model(torch.randn(8, 64, device='cuda')).sum().backward()\n    optimizer.step()\n "
        "   if step == 1:\n        model(torch.randn(8, 64, device='cuda'))\n        os.kill(os.getpid(), "
        "signal.SIGKILL)\n"
    )
    done = rehearse("--", sys.executable, tmp_path / "train.py")
    assert done.returncode == 128 + 9
    assert "ended behind step 2" in done.stderr
    assert [phase for _, phase in rows_of(done.stdout)] == PHASES[:7]


def test_a_device_for_another_torch_and_no_device(tmp_path):
    done = rehearse("--", "true", SHARDPLAN_DEVICE_LIBRARY_FOLDER=str(tmp_path))
    assert done.returncode == 4
    assert f"looked for libshardplan_device.so in {tmp_path}" in done.stderr
    library = pathlib.Path(os.environ.get("SHARDPLAN_DEVICE_LIBRARY_FOLDER", build_folder() / "device"))
    for path in library.iterdir():
        (tmp_path / path.name).symlink_to(path.resolve())
    (tmp_path / "torch_version").unlink(missing_ok=True)  # a link to the build's own
    (tmp_path / "torch_version").write_text("2.0.1")
    done = rehearse("--", sys.executable, SCRIPTS / "ends.py", SHARDPLAN_DEVICE_LIBRARY_FOLDER=str(tmp_path))
    assert done.returncode == 4
    assert "is built for another torch" in done.stderr and "expected 2.0.1" in done.stderr

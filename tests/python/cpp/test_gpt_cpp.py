# SPDX-License-Identifier: Apache-2.0
"""examples/gpt_cpp as a job: its ranks are killed at random moments and go on, and every mistake has its exit code."""

import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import build_folder, free_port
from cpp_training import GPT, TEXT, Plans, environment

PROGRAM = build_folder() / "tests" / "executor" / "gpt_cpp"
SEEDS = [int(seed) for seed in os.environ.get("SHARDPLAN_SEEDS", "1,2").split(",")]
STEPS = 30


@pytest.fixture(scope="session")
def plans(tmp_path_factory, shardplan):
    return Plans(tmp_path_factory.mktemp("plans"), shardplan, size="")


class Ranks:
    """A program as ranks of one job. Their output goes to files of `folder`."""

    def __init__(self, folder: pathlib.Path, ranks: int, command: list[object], **more: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        port = free_port()
        self.processes = []
        for rank in range(ranks):
            own = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            with open(self._file(rank, "out"), "w") as out, open(self._file(rank, "err"), "w") as err:
                self.processes.append(
                    subprocess.Popen([*map(str, command)], stdout=out, stderr=err, env={**environment(), **own, **more})
                )

    def _file(self, rank: int, kind: str) -> pathlib.Path:
        return self._folder / f"{rank}.{kind}"

    def said(self, rank: int) -> str:
        return self._file(rank, "err").read_text()

    def losses(self) -> dict[int, str]:
        """By step, as rank 0 prints them. A killed rank's last line may be a part of one."""
        return {
            int(step): loss
            for step, loss in re.findall(r"step (\d+) loss ([\d.]+)\n", self._file(0, "out").read_text())
        }

    def end(self, timeout: float = 120) -> list[int]:
        try:
            return [process.wait(timeout) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()


def in_cpp(plan: pathlib.Path, *flags: object) -> list[object]:
    return [PROGRAM, "--plan", plan, "--text", TEXT, *flags]


def kill_some(job: Ranks, choose: random.Random) -> tuple[list[int], list[int]]:
    """Kills one rank or all at a random moment. The ranks that were killed, and the exit codes of all."""
    steps = choose.randint(0, 12)
    deadline = time.monotonic() + 60
    while len(job.losses()) < steps and all(p.poll() is None for p in job.processes) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(choose.random() * 0.05)
    everybody = list(range(len(job.processes)))
    killed = everybody if choose.random() < 0.4 else [choose.choice(everybody)]
    for rank in killed:
        job.processes[rank].send_signal(signal.SIGKILL)
    return killed, job.end()


@pytest.mark.parametrize("ranks", [[2], [1, 2, 3]], ids=["2 ranks", "1 to 3 ranks"])
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_moments_it_goes_on_with_the_last_checkpoint(plans, tmp_path, seed, ranks):
    """On the same ranks losses are those of a training that nobody interrupts, bit for bit; on others nearly those."""
    choose = random.Random(seed)
    flags = ["--steps", STEPS, "--batch", 12]
    whole = Ranks(tmp_path / "whole", 2, in_cpp(plans.plan(2), *flags))
    assert whole.end() == [0, 0], whole.said(0) + whole.said(1)
    expected = whole.losses()
    assert sorted(expected) == list(range(1, STEPS + 1))
    flags += ["--checkpoints", tmp_path / "checkpoints", "--save-every", 3, "--resume"]
    seen: dict[int, str] = {}
    for life in range(5):
        count = choose.choice(ranks)
        job = Ranks(tmp_path / f"life{life}", count, in_cpp(plans.plan(count), *flags))
        killed, codes = kill_some(job, choose)
        for rank, code in enumerate(codes):
            if code in (0, -signal.SIGKILL):
                continue
            assert code == 4, f"rank {rank} of {count}, killed {killed}: {code}\n{job.said(rank)}"
            assert any(f"rank {dead}" in job.said(rank) for dead in killed), f"killed {killed}\n{job.said(rank)}"
        seen |= job.losses()
        check(expected, job.losses(), within=0.0 if ranks == [2] else 0.02)
    last = Ranks(tmp_path / "last", ranks[-1], in_cpp(plans.plan(ranks[-1]), *flags))
    assert last.end() == [0] * ranks[-1], last.said(0)
    check(expected, last.losses(), within=0.0 if ranks == [2] else 0.02)
    assert (seen | last.losses()).keys() >= expected.keys()
    assert (tmp_path / "checkpoints" / f"step_{STEPS:06}").is_dir()


def check(expected: dict[int, str], found: dict[int, str], within: float) -> None:
    for step, loss in found.items():
        assert abs(float(loss) - float(expected[step])) <= within, f"step {step}: {loss}, expected {expected[step]}"


def test_its_losses_are_those_of_the_twin_in_python(plans, tmp_path):
    ours = Ranks(tmp_path / "cpp", 2, in_cpp(plans.plan(2), "--steps", 8))
    assert ours.end() == [0, 0], ours.said(0)
    theirs = Ranks(tmp_path / "python", 2, [sys.executable, GPT / "twin.py", "--plan", plans.plan(2), "--steps", 8])
    assert theirs.end() == [0, 0], theirs.said(0)
    assert ours.losses() == theirs.losses() and len(ours.losses()) == 8


@pytest.mark.parametrize("mode", ["inline", "lazy:3"])
def test_on_gpus_and_nccl_as_on_the_cpu(plans, tmp_path, mode):
    """On the device in software, whose kernels are the CPU's but for attention, which is made of plain operators."""
    library = build_folder() / "device" / "libshardplan_device.so"
    if not library.exists():
        pytest.skip(f"{library} is not built")
    on_cpu = Ranks(tmp_path / "cpu", 2, in_cpp(plans.plan(2), "--steps", 5))
    assert on_cpu.end() == [0, 0], on_cpu.said(0)
    flags = ["--steps", 5, "--device", "cuda", "--checkpoints", tmp_path / "saved", "--save-every", 2]
    ours = Ranks(
        tmp_path / "gpu", 2, in_cpp(plans.plan(2), *flags), LD_PRELOAD=str(library), SHARDPLAN_DEVICE_MODE=mode
    )
    assert ours.end(300) == [0, 0], ours.said(0) + ours.said(1)
    assert len(ours.losses()) == 5
    check(on_cpu.losses(), ours.losses(), within=1e-5)
    assert re.search(r"memory: [1-9]\d* bytes at the peak", ours.said(0))
    on_cpu_again = Ranks(
        tmp_path / "on", 2, in_cpp(plans.plan(2), "--steps", 6, "--checkpoints", tmp_path / "saved", "--resume")
    )
    assert on_cpu_again.end() == [0, 0] and on_cpu_again.losses().keys() == {6}


def one_rank(tmp_path: pathlib.Path, *flags: object, ranks: str = "1") -> tuple[int, str]:
    done = subprocess.run(
        [PROGRAM, *map(str, flags)],
        env={**environment(), "RANK": "0", "WORLD_SIZE": ranks, "MASTER_PORT": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not re.search(r"terminate called|Exception raised from|frame #", done.stderr), done.stderr
    return done.returncode, done.stderr


def test_mistakes_have_exit_codes_of_the_commands(plans, tmp_path):
    plan = plans.plan(1)
    cut = tmp_path / "cut.json"
    cut.write_bytes(plan.read_bytes()[:5000])
    (tmp_path / "short.txt").write_text("to be")
    good = ("--plan", plan, "--text", TEXT)
    for flags, code, text in [
        (("--plan", plan), 2, "--plan and --text are needed"),
        ((*good, "--step", "3"), 2, "unknown option --step"),
        ((*good, "--steps"), 2, "--steps needs a value"),
        ((*good, "--steps", "many"), 2, "--steps: a positive number is expected, found many"),
        ((*good, "--resume"), 2, "--resume needs --checkpoints"),
        ((*good, "--device", "tpu"), 2, "--device: cpu or cuda, found tpu"),
        (("--plan", "no.json", "--text", TEXT), 3, "no.json"),
        (("--plan", cut, "--text", TEXT), 3, f"{cut}: "),
        (("--plan", plan, "--text", "no.txt"), 3, "no.txt: cannot be read"),
        (("--plan", plan, "--text", "short.txt"), 3, "short.txt: is shorter than one row of 32 bytes"),
        (
            ("--plan", plans.plan(2), "--text", TEXT),
            3,
            "/world_size: the plan is for another number of ranks (found 2, expected 1)",
        ),
        (("--plan", plans.plan(1, policy="fsdp1"), "--text", TEXT), 3, "flat"),
        ((*good, "--device", "cuda"), 4, "there is no GPU for this rank"),
        (
            ("--plan", plans.plan(1, "--accumulate", "2"), "--text", TEXT, "--steps", 2),
            1,
            "the model deviates from the plan",
        ),
    ]:
        found, said = one_rank(tmp_path, *flags)
        assert found == code and text in said, f"{flags}: {found}\n{said}"


def test_a_checkpoint_that_is_damaged_or_of_another_model_is_an_error(plans, tmp_path):
    saved = tmp_path / "saved"
    flags = ("--plan", plans.plan(1), "--text", TEXT, "--checkpoints", saved)
    assert one_rank(tmp_path, *flags, "--steps", 2)[0] == 0
    with open(next(saved.glob("step_*/*.distcp")), "r+b") as file:
        file.truncate(1000)
    code, said = one_rank(tmp_path, *flags, "--steps", 4, "--resume")
    assert code == 3 and ".distcp" in said, said
    shutil.rmtree(saved)
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch, torch.distributed.checkpoint as dcp, sys\n"
            "dcp.save({'model.wte.weight': torch.zeros(3, 3)}, checkpoint_id=sys.argv[1])",
            str(saved / "step_000002"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    code, said = one_rank(tmp_path, *flags, "--steps", 4, "--resume")
    assert code == 3 and "model.wte.weight is another tensor in the checkpoint (found float32 [3, 3]" in said, said


def test_an_environment_that_cannot_be_is_a_usage_error(plans, tmp_path):
    for name, value, expected in [
        ("WORLD_SIZE", "0", "1 to 1073741824"),
        ("WORLD_SIZE", "two", "1 to 1073741824"),
        ("RANK", "1", "0"),
        ("MASTER_PORT", "70000", "0 to 65535"),
        ("LOCAL_RANK", "", "0 to 1073741824"),
    ]:
        own = {**environment(), "RANK": "0", "WORLD_SIZE": "1", name: value}
        done = subprocess.run(
            [*map(str, in_cpp(plans.plan(1), "--steps", 1))], env=own, capture_output=True, text=True, timeout=60
        )
        assert (
            done.returncode == 2
            and f'the environment\'s {name} cannot be (found "{value}", expected {expected})' in done.stderr
        ), done.stderr


def test_a_rank_that_does_not_come_is_named(plans, tmp_path):
    job = subprocess.run(
        [*map(str, in_cpp(plans.plan(2), "--timeout", 3))],
        env={**environment(), "RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 4 and "rank 1 did not arrive" in job.stderr, job.stderr
    job = subprocess.run(
        [*map(str, in_cpp(plans.plan(2), "--timeout", 3))],
        env={**environment(), "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 4 and "rank 0 did not arrive: the store at" in job.stderr, job.stderr

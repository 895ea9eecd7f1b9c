# SPDX-License-Identifier: Apache-2.0
"""The command `python -m shardplan.rehearse` (`shardplan rehearse`)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys

from shardplan import files
from shardplan.clusters import BadCluster
from shardplan.command import EXIT_ENVIRONMENT, ArgumentParser, NoCommand, bytes_of, file_name, printable_name
from shardplan.terminal import complain

from . import page, recording, report, shown, text
from .device import DEFAULT_CLUSTER, Device, NoDevice, device_folder, device_of, with_links
from .launch import RECORDED, Asked, NeedsTooMuch, Outcome, Rehearsal
from .routing import BadRouting, shares_of
from .stages import Stages

_EXIT_DOES_NOT_FIT, _EXIT_USAGE, _EXIT_BAD_INPUT = 1, 2, 3
_KEPT_S = 900
_DESCRIPTION = """\
Run a training script, as it is, as one rank of a job of any size without a GPU, and print what torch.cuda says of \
its memory: by step and phase, and
the peak by category and module. Nothing is computed; torch's own allocator runs. The other ranks are played: each \
does what this one does."""
_EPILOG = """\
examples:
  shardplan rehearse --gpus 64 -- torchrun train.py --batch 4
  shardplan rehearse --gpus 64 --rank 5 --cluster h100 --html memory.html -- accelerate launch train.py
  shardplan rehearse --device-memory 40GB --snapshot rank0.pickle -- python train.py
  shardplan rehearse --gpus 256 --steps 0 --report measured.json -- bash run.sh

exit codes: 0 done, 1 out of memory or a race, 2 usage, 3 bad input (the script ended before a step), 4 environment \
(no torch, no device); another error of the script: its own exit code"""


def _count(words: str) -> int:
    if not words.isdecimal() or not 1 <= int(words) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{words}: expected a number from 1 to {1 << 20}")
    return int(words)


def _not_negative(words: str) -> int:
    if not words.isdecimal() or int(words) > 1 << 20:
        raise argparse.ArgumentTypeError(f"{words}: expected a number from 0 to {1 << 20}")
    return int(words)


def parser() -> argparse.ArgumentParser:
    result = ArgumentParser(
        prog="shardplan rehearse",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
    )
    result.add_argument(
        "--gpus", type=_count, metavar="N", help="ranks of the job (default: as many as the command starts)"
    )
    result.add_argument("--rank", type=_not_negative, default=0, metavar="R", help="the rank that is run (default: 0)")
    result.add_argument(
        "--gpus-per-node",
        type=_count,
        metavar="N",
        help="devices that the script sees, at most --gpus (default: 8; 1 for a script without a launcher and --gpus)",
    )
    result.add_argument(
        "--cluster",
        type=file_name,
        metavar="FILE|NAME",
        help=(
            "whose device it is: a file, a shipped one, or a device; the time of a step on it is printed, too "
            f"(default: the device of {DEFAULT_CLUSTER}, and no time)"
        ),
    )
    result.add_argument(
        "--device-memory",
        type=bytes_of,
        metavar="BYTES",
        help="what the device has, as 80GB or 40GiB, in place of the cluster's",
    )
    result.add_argument(
        "--steps",
        type=_not_negative,
        default=3,
        metavar="N",
        help="optimizer steps, then the script is ended; 0: it runs to its own end (default: 3)",
    )
    result.add_argument(
        "--routing",
        type=file_name,
        metavar="FILE",
        help="each expert's share of the tokens: numbers, one a line or separated by commas (default: all the same)",
    )
    result.add_argument("--report", type=file_name, metavar="FILE", help="write a report (shardplan.report/1)")
    result.add_argument(
        "--snapshot",
        type=file_name,
        metavar="FILE",
        help="write PyTorch's own memory snapshot (a pickle, for pytorch.org/memory_viz)",
    )
    result.add_argument(
        "--html",
        type=file_name,
        metavar="FILE",
        help="write a page: steps, the curve of allocated memory, the peak by category and module",
    )
    result.add_argument(
        "--record",
        type=file_name,
        metavar="FILE",
        help="write what the rank issued to its devices (shardplan.recording/1; FILE.gz: compressed)",
    )
    result.add_argument(
        "--kineto",
        type=file_name,
        metavar="FILE",
        help="with --cluster: write the step as torch.profiler would, for Perfetto (FILE.gz: compressed)",
    )
    result.add_argument(
        "--step-html",
        type=file_name,
        metavar="FILE",
        help="with --cluster: write a page with the timeline of the step, of all stages of a pipeline",
    )
    result.add_argument(
        "--tokens",
        type=_not_negative,
        default=0,
        metavar="N",
        help="with --cluster: tokens of one step of the whole job (default: what its embedding looks up)",
    )
    result.add_argument(
        "--races",
        action="store_true",
        help="prove that no two accesses to the same memory race, whatever the devices' schedule; exit code 1: some do",
    )
    result.add_argument(
        "--show",
        type=_count,
        nargs="?",
        const=1,
        default=0,
        metavar="RACE",
        help=(
            "with --races: run the command with numbers, all its ranks, in the host's order and in the order that the "
            "race allows, and print the lines of its output that differ (default: race 1)"
        ),
    )
    result.add_argument(
        "--keep",
        type=_count,
        nargs="?",
        const=_KEPT_S,
        default=0,
        metavar="SECONDS",
        help=(
            f"leave a process that has imported torch, until no run has come for so long (default: {_KEPT_S}): the "
            "next run with --keep starts from it"
        ),
    )
    result.add_argument(
        "--no-history",
        action="store_true",
        help="do not record the allocator's history: no categories and modules, less time",
    )
    result.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    return result


def main() -> int:
    words = sys.argv[1:]
    separator = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:separator])
    command = words[separator + 1 :]
    if not command:
        parser().error(
            "what to rehearse is missing: the command that starts the training goes behind --, as in shardplan "
            "rehearse --gpus 64 -- torchrun train.py"
        )
    if (options.kineto or options.step_html or options.tokens) and not options.cluster:
        parser().error("--kineto, --step-html and --tokens are of a step's time: give --cluster")
    if options.show and not options.races:
        parser().error("--show shows a race that is proved: give --races")
    if options.gpus is not None and options.rank >= options.gpus:
        parser().error(f"--rank {options.rank}: of {options.gpus} ranks the last is {options.gpus - 1}")
    try:
        _check_outputs(options, command)
        return _rehearse(options, command)
    except files.OutputIsInput as error:
        return _fail(_EXIT_USAGE, str(error))
    except (BadCluster, BadRouting, NeedsTooMuch) as error:
        return _fail(_EXIT_BAD_INPUT, str(error))
    except (NoCommand, NoDevice, files.CannotWrite) as error:
        return _fail(EXIT_ENVIRONMENT, str(error))


def _fail(code: int, message: str) -> int:
    complain("shardplan rehearse", f"error: {message}")
    return code


def _check_outputs(options: argparse.Namespace, command: list[str]) -> None:
    """Before any work: every output can be written, and is no input and no other output."""
    inputs = [word for word in [options.cluster, options.routing, *command] if word and os.path.isfile(word)]
    outputs = (options.report, options.snapshot, options.html, options.record, options.kineto, options.step_html)
    written = [path for path in outputs if path]
    for i, path in enumerate(written):
        files.check_output(path, inputs)
        if os.path.realpath(path) in map(os.path.realpath, written[:i]) and path != os.devnull:
            raise files.OutputIsInput(f"two outputs are one file (found {path} twice, expected another file)")


def _rehearse(options: argparse.Namespace, command: list[str]) -> int:
    device = device_of(options.cluster or DEFAULT_CLUSTER, options.gpus, options.device_memory)
    routing = None if options.routing is None else shares_of(options.routing)
    folder = device_folder()
    if shutil.which(command[0]) is None:
        return _fail(
            _EXIT_BAD_INPUT,
            f"{printable_name(command[0])}: no such program (expected one on the PATH, as torchrun, or a path to one)",
        )

    def say(line: str) -> None:
        if not options.quiet:
            print(f"shardplan rehearse: {printable_name(line)}", file=sys.stderr, flush=True)

    sys.stdout.flush()
    with files.scratch_folder() as scratch:
        snapshot = str(scratch / "snapshot.pickle") if options.snapshot else None
        history = not options.no_history or bool(options.report or options.html or snapshot)
        asked = Asked(
            command, device, with_links(folder, scratch), options.gpus, options.gpus_per_node, options.steps, history,
            snapshot, routing, bool(options.record or options.races or options.cluster), options.keep,
        )
        rehearsal = Rehearsal(asked, scratch, say)
        outcome = rehearsal.of_rank(options.rank)
        code = _tell(outcome, device, command, may_end_early=bool(options.record or options.races))
        result = outcome.told.get("result")
        if result is not None and result["stretches"]:
            timed = None
            if options.record or options.races or options.cluster:
                stages = Stages(rehearsal, device, command, say)
                refused, timed = _recorded(options, outcome, device, command, stages)
                code = code or refused
            if options.report:
                document = report.report_of(result, device, command, timed)
                files.write_text(options.report, json.dumps(document, indent=2) + "\n")
            if options.html:
                files.write_text(options.html, page.page(result, device, command))
            if snapshot and os.path.exists(snapshot):
                with files.replacing(options.snapshot) as file, open(snapshot, "rb") as dumped:
                    shutil.copyfileobj(dumped, file.buffer)
    return code


def _recorded(
    options: argparse.Namespace, outcome: Outcome, device: Device, command: list[str], stages: Stages
) -> tuple[int, dict | None]:
    """Writes the recording, times and proves it. The exit code of that, and the report of the time."""
    raw = outcome.folder / RECORDED
    if not raw.exists():
        if not (options.record or options.races):
            return 0, None
        return _fail(_EXIT_BAD_INPUT, "the rank has issued nothing to a device: there is no recording"), None
    path = options.record or str(outcome.folder / "recording.json.gz")
    recording.write(path, raw, outcome.told, device, command)
    timed = None
    if options.cluster:
        try:
            paths = [path, *stages.beside(options.rank, outcome)]
            pictures = {"--kineto": options.kineto, "--html": options.step_html}
            time = recording.time_of(paths, device, options.tokens, pictures, outcome.folder)
            print("\n" + time.text, flush=True)
            if stages.rows:
                print("\n" + text.stages_text([text.stage_row(outcome.told["result"]), *stages.rows]), flush=True)
            timed = time.report
        except recording.NoTime as error:
            complain("shardplan rehearse", f"no time: {printable_name(str(error))}")
            if options.kineto or options.step_html:  # which were asked for, and are not there
                return _EXIT_BAD_INPUT, None
    if not options.races:
        return 0, timed
    proof = recording.prove(path)
    print("\n" + proof.text, flush=True)
    if proof.wrong:
        complain("shardplan rehearse", proof.wrong)
    if options.show and proof.modes:
        return max(proof.code, _show(options, proof, device, command)), timed
    return proof.code, timed


def _show(options: argparse.Namespace, proof: recording.Proof, device: Device, command: list[str]) -> int:
    """Runs the command with numbers as the race allows. The exit code of what went wrong there."""
    if options.show > len(proof.modes):
        return _fail(_EXIT_USAGE, f"--show {options.show}: of {len(proof.modes)} races the last is {len(proof.modes)}")
    mode = proof.modes[options.show - 1]
    if mode == "?":
        return _fail(_EXIT_BAD_INPUT, f"race {options.show} cannot be shown: its first access is the host's")
    try:
        devices = options.gpus_per_node or options.gpus
        print("\n" + shown.shown(options.show, mode, device, devices, command), flush=True)
    except shown.CannotShow as error:
        return _fail(_EXIT_BAD_INPUT, str(error))
    return 0


def _tell(outcome: Outcome, device: Device, command: list[str], may_end_early: bool) -> int:
    """Prints what became of it. The exit code. may_end_early: without a step."""
    told = outcome.told
    if (refused := told.get("refused")) is not None:
        return _fail(refused["code"], printable_name(refused["message"]))
    result = told.get("result")
    if result is None:
        return _no_result(outcome, command)
    if result["backwards"] or result["allocated_bytes"]:
        print(text.text_of(result, device), flush=True)
    error = result["error"]
    if error is not None and error["out_of_memory"]:
        return _EXIT_DOES_NOT_FIT
    if error is not None:
        complain("shardplan rehearse", text.error_line(error))
        return outcome.code if outcome.code > 0 else _EXIT_BAD_INPUT
    if result["end"] == "killed":
        return _fail(
            _code_of(outcome) or _EXIT_BAD_INPUT,
            f"the rank's process ended behind step {result['steps']} without Python's exit (exit code {outcome.code})",
        )
    if result["steps"] == 0 and not (may_end_early and outcome.code == 0):
        hint = "a backward ran, and no optimizer of torch.optim stepped" if result["backwards"] else "no backward ran"
        return _fail(
            outcome.code if outcome.code > 0 else _EXIT_BAD_INPUT,
            f"the script ended before a step (exit code {outcome.code}): {hint}. Give it arguments with which it "
            "trains, and data for one step",
        )
    return 0 if result["end"] == "steps" or outcome.code == 0 else _code_of(outcome)


def _code_of(outcome: Outcome) -> int:
    return outcome.code if outcome.code >= 0 else 128 - outcome.code


def _no_result(outcome: Outcome, command: list[str]) -> int:
    told = outcome.told
    if "torch" not in told and "no_torch" in told:
        return _fail(
            EXIT_ENVIRONMENT,
            f"torch is not installed in {told['no_torch']['executable']}, the interpreter of the command: name one "
            "that has it",
        )
    if "torch" not in told:
        why = f"it ended with exit code {outcome.code}" if outcome.code else "it ended well"
        return _fail(
            _code_of(outcome) or _EXIT_BAD_INPUT,
            f"no Python process of {printable_name(command[0])} imported torch ({why}). Interpreters that ignore "
            "PYTHONPATH (-I, -E) cannot be rehearsed",
        )
    if outcome.code < 0:
        return _fail(_code_of(outcome), f"the script was ended by {signal.Signals(-outcome.code).name} before a step")
    return _fail(
        outcome.code or _EXIT_BAD_INPUT,
        f"the rank's process ended before a step, without Python's exit (exit code {outcome.code}): a launcher that "
        "is not known, or os._exit",
    )

# SPDX-License-Identifier: Apache-2.0
"""The command `python -m shardplan.import_profile` (`shardplan import-profile`)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from shardplan import files
from shardplan.command import (
    EXIT_ENVIRONMENT, ArgumentParser, NoCommand, built_command, file_name, printable, printable_name,
)

from . import kineto, ranks, recorded, snapshot
from .report import report_of

_DESCRIPTION = """\
A report of what a training did, from profiles of torch.profiler: in the same words as `shardplan simulate --report`, \
so that both can be laid
side by side. The job may run under FSDP2, FSDP1 or a plan; the plan says what it was meant to do."""
_EPILOG = """\
examples:
  shardplan import-profile rank*.json.gz --plan plan.json -o measured.json
  shardplan import-profile rank0.json.gz --snapshot rank0.pickle --plan plan.json -o measured.json

exit codes: 0 done, 2 usage, 3 bad input, 4 environment"""


def parser() -> argparse.ArgumentParser:
    result = ArgumentParser(
        prog="shardplan import-profile",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "profiles",
        nargs="+",
        type=file_name,
        metavar="RANK.json",
        help=(
            "trace of torch.profiler of a rank (export_chrome_trace), gzip or plain; or a recording of "
            "shardplan.torch.profile"
        ),
    )
    result.add_argument(
        "--plan",
        required=True,
        type=file_name,
        metavar="FILE",
        help="the plan of the job, or the one that stands for it (policy fsdp2, fsdp1)",
    )
    result.add_argument(
        "--snapshot",
        type=file_name,
        metavar="FILE",
        help="memory of the rank that is reported: a pickle of torch.cuda.memory._snapshot()",
    )
    result.add_argument(
        "--rank", type=int, metavar="R", help="whose report it is (default: the lowest that has a profile)"
    )
    result.add_argument(
        "--device", type=int, default=0, metavar="N", help="index of the rank's device in the snapshot (default: 0)"
    )
    result.add_argument(
        "-o", "--output", required=True, type=file_name, metavar="FILE", help="write the report; - for standard output"
    )
    result.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary on standard error")
    return result


def _say(text: str) -> None:
    print(f"shardplan import-profile: {printable_name(text)}", file=sys.stderr, flush=True)


_INPUT = "/dev/stdin"


class _Refused(Exception):
    """A command of this build did not take the plan, and said why: its exit code."""


def _answer(program: str, path: str, *arguments: str, text: str | None = None) -> str:
    """The command's output for the file, or for the text in its place. 1 is no refusal: a plan that does not fit a
    device is simulated all the same."""
    words = [program, *(_INPUT if text is not None and word == path else word for word in arguments)]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        print(printable(done.stderr.replace(_INPUT, path)), file=sys.stderr, end="")
        raise _Refused(done.returncode or EXIT_ENVIRONMENT)
    return done.stdout


def _plan_and_report(program: str, path: str) -> tuple[dict, dict]:
    """The plan, which may be in any form and is read once, and its simulated report."""
    text = _answer(program, path, "show", path, "--json", "-o", "-")
    report = _answer(program, path, "simulate", path, "--report", "-", "-q", "--no-verify", text=text)
    return json.loads(text), json.loads(report)


def main() -> int:
    options = parser().parse_args()
    inputs = [*options.profiles, options.plan, *([options.snapshot] if options.snapshot else [])]
    try:
        files.check_output(options.output, inputs)
        return _import(options, built_command("import-profile"))
    except files.OutputIsInput as error:
        _say(f"error: {error}")
        return 2
    except _Refused as refused:
        return refused.args[0]
    except kineto.BadProfile as error:
        _say(f"error: {error}")
        return 3
    except (NoCommand, files.CannotWrite) as error:
        _say(f"error: {error}")
        return EXIT_ENVIRONMENT


def _import(options: argparse.Namespace, program: str) -> int:
    plan, simulated = _plan_and_report(program, options.plan)
    profiles = []
    for number, path in enumerate(options.profiles, 1):
        if not options.quiet:
            _say(f"reading {path} ({number} of {len(options.profiles)})")
        data = kineto.data_of(path)
        if recorded.is_recording(data):
            document = recorded.document_of(path, data, simulated.get("plan_digest", ""))
            profiles.append(recorded.profile_of(path, document, plan))
        else:
            profiles.append(kineto.profile_of(path, data))
    ranks.check(profiles)
    profiles.sort(key=lambda profile: profile.rank)
    own = next((profile for profile in profiles if options.rank in (None, profile.rank)), None)
    if own is None:
        parser().error(
            f"--rank {options.rank}: no profile of that rank (found "
            f"{', '.join(str(profile.rank) for profile in profiles)})"
        )
    memory = snapshot.read(options.snapshot, options.device) if options.snapshot else snapshot.of_profile(own)
    report = report_of(own, [profile for profile in profiles if profile is not own], plan, simulated, memory)
    files.write_text(options.output, json.dumps(report, indent=2) + "\n")
    if not options.quiet:
        measured = report["measured"]
        _say(
            f"rank {own.rank} on {own.device}: step {report['step_ns'] / 1e6:.2f} ms (simulated "
            f"{simulated['step_ns'] / 1e6:.2f}), of {len(measured['steps_ns'])} steps; "
            f"{measured['unassigned_kernels']} kernels ({measured['unassigned_ns'] / 1e6:.2f} ms) in no unit, "
            f"{measured['collectives_beside_plan']} collectives beside the plan, "
            f"{measured['collectives_missing']} missing"
        )
    return 0

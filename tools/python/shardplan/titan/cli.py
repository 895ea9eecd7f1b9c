# SPDX-License-Identifier: Apache-2.0
"""The command `python -m shardplan.titan` (`shardplan torchtitan`)."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from shardplan import files
from shardplan.clusters import BadCluster, document_of
from shardplan.command import ArgumentParser, NoCommand, built_command, file_name, printable_name
from shardplan.installing import why_no_torch
from shardplan.terminal import complain
from shardplan.titan import table, variants
from shardplan.tracer.progress import Progress

_NAME = "shardplan torchtitan"
_DESCRIPTION = """\
Plan a torchtitan job by its own configuration: what memory it takes and how long a step is, made on one CPU. The model
is built, parallelized and checkpointed by torchtitan, its calls of fully_shard are the strategy."""
_EPILOG = """\
examples:
  shardplan torchtitan --module llama3 --config llama3_8b --cluster h100_sxm_64
  shardplan torchtitan --module llama3 --config llama3_8b --cluster h100_sxm_64 \
--parallelism.tensor_parallel_degree 8 -o job
  shardplan torchtitan --module deepseek_v3 --config deepseek_v3_16b --cluster h100_sxm_64 \
--vary parallelism.expert_parallel_degree=1,2,4,8

All other arguments are torchtitan's: --section.key VALUE. docs/reference/torchtitan.md says
what the plan has of a job.

exit codes: 0 done, 1 it does not fit, 2 usage, 3 bad input, 4 environment"""
_EXIT_USAGE, _EXIT_BAD_INPUT, _EXIT_ENVIRONMENT = 2, 3, 4


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value < 2**30:
        raise argparse.ArgumentTypeError(f"{text} is no positive integer of 30 bits")
    return value


def parser() -> argparse.ArgumentParser:
    result = ArgumentParser(
        prog=_NAME,
        usage="shardplan torchtitan --module NAME --config NAME [OPTIONS] [torchtitan's arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--module", metavar="NAME", help="torchtitan's: which models (llama3)")
    result.add_argument("--config", metavar="NAME", help="torchtitan's: a configuration of theirs (llama3_8b)")
    result.add_argument(
        "--cluster", default="h100_sxm_8", metavar="FILE|NAME",
        help="a cluster file, the name of a shipped one, or a device (h100) of whose clusters the one for --ranks is "
        "taken (default: h100_sxm_8)",
    )
    result.add_argument("--ranks", type=_count, metavar="N", help="ranks of the job (default: the cluster's)")
    result.add_argument(
        "--vary", type=variants.varied, action="append", default=[], metavar="KEY=A,B",
        help="values of a key of torchtitan's, each traced and planned: a table of all of them; repeat it for every "
        "combination. activation_checkpoint=full,none varies that",
    )
    result.add_argument(
        "--routing", default="balanced", metavar="balanced|FILE",
        help="how many tokens each expert gets, as of shardplan trace (default: balanced)",
    )
    result.add_argument(
        "-o", "--output", type=file_name, metavar="FOLDER",
        help="keep what is made: trace.json, strategy.json, plan.json, report.json; with --vary a folder of each "
        "variant",
    )
    result.add_argument(
        "--trace-only", action="store_true", help="end with trace.json and strategy.json in the folder of -o"
    )
    result.add_argument(
        "--report", type=file_name, metavar="FILE", help="write the report (JSON), with --vary the rows"
    )
    result.add_argument("--jobs", type=_count, metavar="N", help="--vary: so many at once (default: the cores)")
    result.add_argument(
        "--alloc-conf", default="expandable_segments:True", metavar="TEXT",
        help="settings of the caching allocator (default: expandable_segments:True, as torchtitan's run_train.sh)",
    )
    result.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    return result


class _Failed(Exception):
    """A command of shardplan that failed has said why. exit_code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _Progress(Progress):
    def __init__(self, quiet: bool) -> None:
        self._quiet, self._begin = quiet, time.monotonic()

    def __call__(self, text: str) -> None:
        if not self._quiet:
            seconds = time.monotonic() - self._begin
            print(f"torchtitan: {printable_name(text)} ({seconds:.1f} s)", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(f"torchtitan: note: {printable_name(text)}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    options, words = parser().parse_known_args(argv)
    for flag in ("module", "config"):
        if not getattr(options, flag):
            parser().error(f"--{flag} is required, as torchtitan's: --module llama3 --config llama3_debugmodel")
    if options.trace_only and (options.vary or not options.output):
        parser().error("--trace-only is with -o, and without --vary")
    _check_varied(options, words)
    words = ["--module", options.module, "--config", options.config, *words]
    try:
        if options.vary:
            return _vary(options, words)
        return _one(options, words)
    except _Failed as failed:
        return failed.exit_code
    except (BadCluster, files.CannotWrite, NoCommand) as error:
        complain(_NAME, printable_name(str(error)))
        return _EXIT_BAD_INPUT if isinstance(error, BadCluster) else _EXIT_ENVIRONMENT


def _check_varied(options: argparse.Namespace, words: list[str]) -> None:
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
    keys = [key for key, _ in options.vary]
    for key in keys:
        if key.replace("-", "_") in given:
            parser().error(f"--vary {key} and --{key} contradict each other")
        if keys.count(key) > 1:
            parser().error(f"--vary {key} is given twice")


def _one(options: argparse.Namespace, words: list[str]) -> int:
    progress = _Progress(options.quiet)
    if problem := why_no_torch():
        complain(_NAME, printable_name(problem))
        return _EXIT_ENVIRONMENT
    cluster, answer = document_of(options.cluster, options.ranks, "torchtitan")
    ranks = options.ranks or json.loads(answer["text"])["ranks"]
    with contextlib.ExitStack() as stack:
        folder = Path(options.output) if options.output else stack.enter_context(files.scratch_folder())
        _make_folder(folder)
        progress("loading torchtitan")
        from shardplan.titan import trace
        from shardplan.tracer.errors import TracerError

        try:
            heading = trace.write(words, ranks, options, folder, progress)
        except TracerError as error:
            complain(_NAME, printable_name(str(error)))
            return error.exit_code
        if options.trace_only:
            print(heading, flush=True)
            return 0
        if not os.path.isfile(cluster):  # a pipe, which is read once
            files.write_text(folder / "cluster.json", answer["text"])
            cluster = str(folder / "cluster.json")
        progress("planning")
        plan, report = str(folder / "plan.json"), str(folder / "report.json")
        _run(
            "plan", str(folder / "trace.json"), "--strategy", str(folder / "strategy.json"), "--cluster", cluster,
            "--ranks", str(ranks), "-q", "-o", plan,
        )
        progress("simulating")
        print(heading, flush=True)
        code = _run("simulate", plan, "-q", "--report", report, may_return=(0, 1))
        document = json.loads(files.read_text(report))
        print(f"tokens/s of the job: {variants.tokens_per_second(folder, document):,}")
        if options.report:
            files.write_text(options.report, json.dumps(document, indent=2) + "\n")
        return code


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.CannotWrite(f"{folder}: {error.strerror}") from error


def _run(*words: str, may_return: tuple[int, ...] = (0,)) -> int:
    done = subprocess.run([built_command("torchtitan"), *words], check=False)
    if done.returncode not in may_return:
        raise _Failed(done.returncode)
    return done.returncode


def _vary(options: argparse.Namespace, words: list[str]) -> int:
    keys = [key for key, _ in options.vary]
    chosen = list(itertools.product(*(values for _, values in options.vary)))
    progress = _Progress(options.quiet)

    with contextlib.ExitStack() as stack:
        folder = Path(options.output) if options.output else stack.enter_context(files.scratch_folder())
        _make_folder(folder)

        def row(values: tuple[str, ...]) -> table.Row:
            own = folder / ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in zip(keys, values))
            made = variants.make(words, zip(keys, values), _given(options), own)
            progress(" ".join(f"{key}={value}" for key, value in zip(keys, values)))
            if made.exit_code not in (0, 1) or not (own / "report.json").is_file():
                return table.Row(values, made)
            report = json.loads(files.read_text(own / "report.json"))
            return table.Row(values, made, report, variants.tokens_per_second(own, report))

        with concurrent.futures.ThreadPoolExecutor(options.jobs or os.cpu_count() or 1) as pool:
            rows = list(pool.map(row, chosen))
    print(table.text(keys, rows), end="")
    if options.report:
        files.write_text(options.report, json.dumps(table.document(keys, rows), indent=2) + "\n")
    return 0 if any(row.report for row in rows) else max(row.made.exit_code for row in rows)


def _given(options: argparse.Namespace) -> list[str]:
    ranks = ["--ranks", str(options.ranks)] if options.ranks else []
    return ["--cluster", options.cluster, *ranks, "--routing", options.routing, "--alloc-conf", options.alloc_conf]


# SPDX-License-Identifier: Apache-2.0
"""The command `python -m shardplan.sweep` (`shardplan sweep`)."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import re
import sys
import tempfile

from shardplan import files
from shardplan.command import (
    EXIT_ENVIRONMENT, ArgumentParser, NoCommand, built_command, bytes_of, file_name, printable_name,
)
from shardplan.sweep import configurations, page, parquet, rows
from shardplan.sweep.configurations import Configuration
from shardplan.sweep.evaluate import Evaluator
from shardplan.sweep.solve import QUESTIONS, solve
from shardplan.terminal import ProgressBar
from shardplan.titan import variants

_DESCRIPTION = (
    "Plan and simulate every combination of the given values, or find the largest batch or sequence, or the fewest "
    "ranks, that fits."
)
_EPILOG = """\
examples:
  shardplan sweep llama.json --batch 1,2,4 --seq 4096,8192 --ranks 8,16,64 --cluster h100_sxm_64,b200_64 -o sweep.csv
  shardplan sweep trace.json --policy fsdp1,fsdp2 --vary 'reshard-after-forward=true|false|-' -o sweep.csv -- \
--param-dtype bfloat16
  shardplan sweep torchtitan:deepseek_v3:deepseek_v3_16b --cluster h100_sxm_64 \
--vary parallelism.expert_parallel_degree=1,2,4,8 -o sweep.csv
  shardplan sweep llama.json --seq 8192 --solve max-batch --cluster h100_sxm_8 -- --checkpoint 'model.layers.*'
  shardplan sweep ... -o part3.csv --part 3/8          and then: shardplan sweep --merge part*.csv -o sweep.csv

What follows -- goes to every `shardplan plan`. A sweep that was killed goes on with the rows that its file lacks.
exit codes: 0 done, 1 nothing fits, 2 usage, 3 bad input, 4 environment"""


def _budget(text: str) -> str:
    """A budget in the form of `--memory-budget` of shardplan optimize."""
    if text == "device":
        return text
    return str(bytes_of(text))


def _list(text: str) -> list[str]:
    return [value for value in text.split(",") if value]


def _names(text: str) -> list[str]:
    values = _list(text)
    if not values:
        raise argparse.ArgumentTypeError("names nothing")
    return values


def _numbers(text: str) -> list[str]:
    values = _list(text)
    if not values or not all(re.fullmatch(r"[1-9]\d{0,9}", value) for value in values):
        raise argparse.ArgumentTypeError(f"{text}: expected positive integers, as 1,2,4")
    return values


def _varied(text: str) -> tuple[str, list[str]]:
    flag, equals, values = text.partition("=")
    if variants.is_key(flag):
        return variants.varied(text)
    if not flag or not equals or flag.startswith("-") or flag in (*configurations.AXES, "policy"):
        raise argparse.ArgumentTypeError(f"{text}: expected FLAG=VALUE|VALUE, a flag of shardplan plan without dashes")
    return flag, values.split("|")


def parser() -> argparse.ArgumentParser:
    result = ArgumentParser(
        prog="shardplan sweep",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="traces, models whose traces are shipped, or what shardplan trace takes: "
        "a config, package.module:callable; or torchtitan:MODULE:CONFIG, a job of torchtitan's",
    )
    result.add_argument("--batch", type=_numbers, metavar="N,N", help="samples per rank")
    result.add_argument("--seq", type=_numbers, metavar="N,N", help="tokens per sample")
    result.add_argument("--ranks", type=_numbers, metavar="N,N", help="default: those of the cluster")
    result.add_argument(
        "--cluster", type=_names, metavar="NAME,NAME", help="files or shipped clusters (default: h100_sxm_8)"
    )
    result.add_argument("--policy", type=_names, metavar="NAME,NAME", help="fsdp1, fsdp2 (default: fsdp2)")
    result.add_argument(
        "--vary", type=_varied, action="append", default=[], metavar="FLAG=A|B",
        help="values of a flag of shardplan plan; -: not given, +: given without a value; repeat it. For jobs of "
        "torchtitan's also SECTION.KEY=A,B, each traced anew",
    )
    result.add_argument(
        "--trace-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="for every shardplan trace (or torchtitan), as --trace-flag=--dtype=bfloat16; repeat it",
    )
    result.add_argument(
        "--memory-budget", "--budget", dest="budget", type=_budget, metavar="BYTES",
        help=(
            "what the caching allocator may reserve on a rank: 60GiB, or device: what the cluster's has beside "
            "context and NCCL's buffers (default)"
        ),
    )
    result.add_argument(
        "--allow",
        choices=["cache-release"],
        help="--solve: requests may release the allocator's cache, and synchronise",
    )
    result.add_argument("--solve", choices=sorted(QUESTIONS), help="answer this for every combination of the others")
    result.add_argument("--part", metavar="I/N", help="part I of N of the configurations, from 1")
    result.add_argument(
        "--merge", nargs="+", type=file_name, metavar="FILE", help="put the rows of these files into one"
    )
    result.add_argument("--jobs", type=int, metavar="N", help="configurations at once (default: the cores)")
    result.add_argument("-o", "--output", type=file_name, metavar="FILE", help="rows, as comma-separated values")
    result.add_argument(
        "--parquet",
        type=file_name,
        metavar="FILE",
        help="the rows as a Parquet file, numbers as numbers (needs pyarrow)",
    )
    result.add_argument(
        "--html",
        type=file_name,
        metavar="FILE",
        help="a page with the rows and what no other beats: memory against time and cost",
    )
    result.add_argument(
        "--price", type=float, metavar="N", help="of an hour of a device, for the page's cost of tokens"
    )
    result.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    return result


def _log(text: str) -> None:
    print(f"shardplan sweep: {printable_name(text)}", file=sys.stderr, flush=True)


def main() -> int:
    arguments = sys.argv[1:]
    plan_flags = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    options = parser().parse_args(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    try:
        _check_outputs(options)
        if options.merge:
            if not options.output:
                parser().error("--merge needs -o")
            files.write_text(options.output, rows.merged(options.merge))
            merged, axes = rows.read(options.output)
            _write_others(options, merged, axes)
            return 0
        return _sweep(options, plan_flags)
    except rows.BadRows as error:
        _log(f"error: {error}")
        return 3
    except files.OutputIsInput as error:
        _log(f"error: {error}")
        return 2
    except (files.CannotWrite, OSError, parquet.Missing) as error:
        _log(f"error: {error}")
        return EXIT_ENVIRONMENT


def _check_outputs(options: argparse.Namespace) -> None:
    """Before any work: no output is an input or another output, and what writes it is there."""
    read = [*options.sources, *(options.merge or [])]
    written = [path for path in (options.output, options.parquet, options.html) if path]
    for i, path in enumerate(written):
        files.check_output(path, read)
        if os.path.realpath(path) in map(os.path.realpath, written[:i]) and path != os.devnull:
            raise files.OutputIsInput(f"two outputs are one file (found {path} twice, expected another file)")
    if options.parquet:
        parquet.check()


def _axes(options: argparse.Namespace) -> dict[str, list[str]]:
    axes = {"source": options.sources}
    for name in ("batch", "seq", "ranks", "cluster", "policy"):
        if getattr(options, name):
            axes[name] = getattr(options, name)
    for flag, values in options.vary:
        if flag in axes:
            parser().error(f"--vary {flag} is given twice")
        axes[flag] = values
    keys = [flag for flag in axes if variants.is_key(flag)]
    others = [source for source in options.sources if not variants.is_job(source)]
    if keys and others:
        parser().error(
            f"--vary {keys[0]} is a key of torchtitan's (found the source {others[0]}, expected "
            "torchtitan:MODULE:CONFIG)"
        )
    if options.solve:
        axis = QUESTIONS[options.solve][0]
        if axis in axes:
            parser().error(f"--solve {options.solve} finds --{axis}: leave it out")
        axes[axis] = ["1"]
    return axes


def _sweep(options: argparse.Namespace, plan_flags: list[str]) -> int:
    if not options.sources:
        parser().error("a SOURCE is missing")
    try:
        program = built_command("sweep")
    except NoCommand as error:
        _log(f"error: {error}")
        return EXIT_ENVIRONMENT
    axes = _axes(options)
    todo = configurations.product(axes)
    if options.part:
        try:
            todo = configurations.part_of(todo, options.part)
        except ValueError:
            parser().error(f"--part {options.part}: expected I/N with 1 <= I <= N")
    with tempfile.TemporaryDirectory(prefix="shardplan-sweep-") as folder:
        path = options.output or os.path.join(folder, "rows.csv")
        kept = rows.Rows(path, list(axes))
        evaluate = Evaluator(program, folder, options.trace_flag, plan_flags, options.budget)
        answers, reasons = _run_all(options, todo, kept, evaluate)
        places = {answers.get(asked, asked): place for place, asked in enumerate(todo)}
        # Rows stand in the order in which they were asked for, not in which they ended.
        kept.close(sorted(kept.done, key=lambda c: places.get(c, len(places))))
        _write_others(options, list(kept.done.values()), list(axes))
        return _say(options, kept, answers, reasons, list(axes))


def _run_all(
    options: argparse.Namespace, todo: list[Configuration], kept: rows.Rows, evaluate: Evaluator
) -> tuple[dict[Configuration, Configuration], dict[Configuration, str]]:
    """Evaluates what is not done, and keeps each row. With --solve: the answer of each that has one, and why the others
    have none."""
    answers: dict[Configuration, Configuration] = {}
    reasons: dict[Configuration, str] = {}

    def work(group: list[Configuration]) -> list[tuple[Configuration, Configuration | None, dict]]:
        if not options.solve:
            return [(configuration, configuration, evaluate(configuration)) for configuration in group]
        releases = options.allow == "cache-release"
        return [(configuration, *solve(options.solve, configuration, evaluate, releases)) for configuration in group]

    left = [c for c in todo if options.solve or c not in kept.done]
    jobs = options.jobs or os.cpu_count() or 1
    count = len(todo) - len(left)
    with (
        contextlib.closing(evaluate), concurrent.futures.ThreadPoolExecutor(jobs) as pool,
        ProgressBar("sweep", _log, options.quiet, count) as bar,
    ):
        futures = [pool.submit(work, group) for group in configurations.groups_of(left, 1 if options.solve else jobs)]
        try:
            for future in concurrent.futures.as_completed(futures):
                done = future.result()
                answers |= {asked: answer for asked, answer, _ in done if answer is not None}
                reasons |= {
                    asked: results["why"] for asked, answer, results in done if answer is None and results.get("why")
                }
                kept.add([(answer or asked, results) for asked, answer, results in done])
                count += len(done)
                bar.update(count, len(todo))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple({asked: found[asked] for asked in todo if asked in found} for found in (answers, reasons))


def _write_others(options: argparse.Namespace, done: list[dict[str, str]], axes: list[str]) -> None:
    if options.parquet:
        parquet.write(options.parquet, done, axes)
    if options.html:
        files.write_text(options.html, page.page(done, axes, options.price))


def _place(asked: Configuration, axes: list[str], options: argparse.Namespace) -> str:
    """Which of the answers, where there are several."""
    solved = QUESTIONS[options.solve][0]
    values = _axes(options)
    several = [axis for axis in axes if axis != solved and len(values[axis]) > 1]
    return " (" + ", ".join(f"{axis} {printable_name(asked[axis])}" for axis in several) + ")" if several else ""


def _say(
    options: argparse.Namespace, kept: rows.Rows, answers: dict, reasons: dict[Configuration, str], axes: list[str]
) -> int:
    """The rows as a table, the best that fits marked; a table on standard output where -o names no file. `reasons`: why
    a question has no answer."""
    chosen = [kept.done[a] for a in answers.values()] if options.solve else list(kept.done.values())
    if options.solve:
        chosen += [values for values in kept.done.values() if values not in chosen and values["fits"] != "yes"]
    fitting = [row for row in chosen if row["fits"] == "yes"]
    best = page.best_of(chosen)
    shown = [axis for axis in axes if axis == "source" or len({row[axis] for row in chosen}) > 1 or options.solve] + [
        name for name in rows.RESULTS if name != "error"
    ]
    table = [
        shown,
        *(
            [printable_name(row[column]) for column in shown]
            for row in sorted(chosen, key=lambda row: -float(row["tokens_per_second"] or 0))
        ),
    ]
    widths = [max(len(line[i]) for line in table) for i in range(len(shown))]
    for line in table:
        mark = "*" if best is not None and line == [printable_name(best[column]) for column in shown] else " "
        print(mark, "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for error in sorted({row["error"] for row in chosen if row["error"]}):
        print("not simulated:", printable_name(error))
    for asked, why in reasons.items():
        print(f"nothing fits{_place(asked, axes, options)}: {printable_name(why)}")
    return 0 if fitting else 1

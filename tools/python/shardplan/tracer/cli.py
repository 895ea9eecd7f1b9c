# SPDX-License-Identifier: Apache-2.0
"""The command `python -m shardplan.tracer` (`shardplan trace`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time

from shardplan import files
from shardplan.command import printable_name
from shardplan.installing import how_to_install, why_no_torch
from shardplan.terminal import ProgressBar, complain
from shardplan.tracer import muon_options
from shardplan.tracer.errors import EXIT_ENVIRONMENT, EnvironmentProblem, TracerError, UsageProblem
from shardplan.tracer.progress import Progress

_DESCRIPTION = """\
Record what one training step of a model does: modules, parameters, operators with FLOPs and bytes, and every \
allocation and free, forward
and backward. Needs no GPU and no weights."""

_EPILOG = """\
examples:
  shardplan trace examples/models/llama-3.1-8b.json --seq 8192 -o llama.trace.json
  shardplan trace mypackage.models:build_gpt --batch 4 --seq 1024 --dtype bfloat16 -o gpt.trace.json

SOURCE is a Hugging Face model config (a JSON file with "model_type" and "architectures"), or \
package.module:callable. The callable
returns a torch.nn.Module, or (module, inputs), or (module, inputs, loss): inputs a tensor, a tuple of positional or \
a dict of keyword
arguments; loss a function of the module's output. It is given batch= and seq= if it has such parameters. \
docs/internals/tracer.md says more.

exit codes: 0 done, 2 usage, 3 bad input, 4 environment"""


def _positive(text: str) -> int:
    value = int(text)
    if not 1 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer of 31 bits")
    return value


_WORDS = {"true": 1.0, "false": 0.0}


def _answer(text: str) -> tuple[str, list[float]]:
    fqn, equals, values = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return ("" if fqn == "(root)" else fqn), [
            _WORDS[v.lower()] if v.lower() in _WORDS else float(v) for v in values.split(",")
        ]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected FQN=VALUE, numbers or true or false") from None


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="shardplan trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("source", metavar="SOURCE", help="config.json or package.module:callable")
    result.add_argument(
        "-o",
        "--output",
        default="trace.json",
        metavar="FILE",
        help="where to write the trace; - for standard output (default: trace.json)",
    )
    result.add_argument(
        "--strategy",
        default="",
        metavar="FILE",
        help="write what a callable tells FSDP as a strategy for shardplan plan: its calls of fully_shard and of the "
        "setters of modules, and activation checkpoints, without which the trace is then",
    )
    result.add_argument(
        "--batch", type=_positive, default=1, metavar="N", help="samples per rank and step (default: 1)"
    )
    result.add_argument("--seq", type=_positive, default=2048, metavar="N", help="tokens per sample (default: 2048)")
    result.add_argument(
        "--images",
        type=_positive,
        default=0,
        metavar="N",
        help="images per sample of a multimodal config, which is traced whole then (default: its text model)",
    )
    dtypes = ("float32", "bfloat16", "float16", "float64")
    result.add_argument(
        "--dtype", choices=dtypes, help="dtype of the computation (default: bfloat16 for a config, a module's own)"
    )
    result.add_argument(
        "--param-dtype",
        choices=dtypes,
        help="dtype the parameters are kept in between steps (default: float32 for a config, a module's own)",
    )
    losses = ("default", "cross_entropy", "cross_entropy_no_upcast", "model", "sum", "none")
    result.add_argument(
        "--loss",
        choices=losses,
        default="default",
        help="what is minimised (default: cross entropy of the float32 logits for a config; a callable's own)",
    )
    result.add_argument("--no-loss", action="store_const", const="none", dest="loss", help="trace the forward alone")
    result.add_argument("--no-grad", action="store_true", help="trace the forward alone, without recording gradients")
    result.add_argument("--eval", action="store_true", help="put the module in evaluation mode (no dropout)")
    result.add_argument(
        "--sdpa",
        choices=("auto", "cudnn", "flash", "efficient", "cpu", "math"),
        default="auto",
        help="first choice of attention kernel (default: auto, flash where it can be used); cpu: what CPU ranks have",
    )
    result.add_argument(
        "--experts",
        choices=("grouped_mm", "batched_mm"),
        default="grouped_mm",
        help="how a mixture of experts of transformers multiplies (default: grouped_mm)",
    )
    result.add_argument(
        "--steps",
        type=_positive,
        default=1,
        metavar="N",
        help="forward-backward pairs to record, gradients cleared in between (default: 1)",
    )
    result.add_argument(
        "--keep-output",
        action="store_true",
        help="keep the model's output (logits) alive until the backward is over, as a loop that keeps a name for it",
    )
    result.add_argument(
        "--compile",
        action="append",
        default=[],
        metavar="PATTERN",
        help="compile these modules by themselves, as module.compile() does: an FQN in which * and ? do not cross a "
             "dot, or class:NAME. Repeat it "
        "for others",
    )
    result.add_argument(
        "--compile-backend",
        choices=("inductor", "aot_eager"),
        default="inductor",
        help="what --compile compiles with (default: inductor)",
    )
    result.add_argument(
        "--ignore-compile", action="store_true", help="trace modules that the model compiles as they are written"
    )
    result.add_argument(
        "--answer",
        action="append",
        type=_answer,
        default=[],
        metavar="FQN=VALUE[,VALUE...]",
        help="what the module reads where it reads values of tensors (.item(), if): numbers, true or false, in order; "
             "how many elements a mask "
        "finds. Repeat it for other modules; (loss) is the code outside of all of them",
    )
    result.add_argument(
        "--routing",
        default="",
        metavar="balanced|FILE",
        help="how many tokens each expert gets, where a model reads that: balanced, or by a CSV file with the columns "
        "expert, share and, where layers differ, layer. The trace is of the rank whose experts get most",
    )
    result.add_argument(
        "--stand-in",
        action="append",
        default=[],
        metavar="NAME=FILE:CALLABLE",
        help="what runs in place of package.module.function, or of a method, whose kernel cannot be traced: it says "
             "the kernel's outputs, FLOPs, bytes and what it keeps "
        "for the backward (docs/reference/stand-ins.md). Those of causal_conv1d, mamba_ssm and fla are shipped; "
        "NAME=none takes one away. Repeat it for others",
    )
    result.add_argument(
        "--same-batch",
        action="append",
        default=[],
        metavar="DIM",
        help="a mesh dimension along which all ranks work on the same batch, as in tensor parallelism; for names that "
        "are not known (tp, dp, ep and others are). Repeat it for others",
    )
    result.add_argument(
        "--own-batch",
        action="append",
        default=[],
        metavar="DIM",
        help="likewise, one along which each rank has its own batch or part of it, as in data parallelism",
    )
    muon_options.add_arguments(result)
    result.add_argument("--name", default="", help="the model's name in the trace")
    result.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    return result


class _Told(Progress):
    """A line for each stage, and at a terminal a bar for what has parts. Notes are no progress: quiet does not silence
    them."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._started, self._bar = quiet, time.monotonic(), None

    def __call__(self, text: str) -> None:
        self.end()
        if not self._quiet:
            print(f"trace: {text} ({time.monotonic() - self._started:.1f} s)", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        self.end()
        print(f"trace: note: {printable_name(text)}", file=sys.stderr, flush=True)

    def part(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = ProgressBar("trace", lambda text: None, self._quiet)
        self._bar.update(done, total)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.end()
            self._bar = None


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    progress = _Told(arguments.quiet)
    try:
        return _run(arguments, progress)
    except TracerError as error:
        progress.end()
        complain("shardplan trace", printable_name(str(error)))
        return error.exit_code


def _run(arguments: argparse.Namespace, progress) -> int:
    _check_arguments(arguments)
    progress("loading torch")
    if problem := why_no_torch():
        progress.end()
        complain("shardplan trace", printable_name(problem))
        return EXIT_ENVIRONMENT
    try:
        from shardplan.tracer import document, session, stand_ins
    except ImportError as error:
        complain(
            "shardplan trace",
            printable_name(f"cannot import {error.name}: {error} ({how_to_install('torch')} installs what is needed)"),
        )
        return EXIT_ENVIRONMENT
    options = session.Options(
        stand_ins=stand_ins.load(arguments.stand_in),
        batch=arguments.batch,
        seq=arguments.seq,
        images=arguments.images,
        dtype=arguments.dtype,
        param_dtype=arguments.param_dtype,
        loss=arguments.loss,
        grad=not arguments.no_grad,
        sdpa=arguments.sdpa,
        experts=arguments.experts,
        steps=arguments.steps,
        evaluation=arguments.eval,
        answers=dict(arguments.answer),
        routing=arguments.routing,
        keep_output=arguments.keep_output,
        same_batch=arguments.same_batch,
        own_batch=arguments.own_batch,
        compile=arguments.compile,
        compile_backend=arguments.compile_backend,
        ignore_compile=arguments.ignore_compile,
        name=arguments.name,
    )
    # The model's own prints are no part of a trace on standard output.
    with contextlib.redirect_stdout(sys.stderr) if arguments.output == "-" else contextlib.nullcontext():
        if arguments.strategy:
            trace, strategy = session.strategy_of_source(arguments.source, options, progress)
        else:
            trace = session.trace_source(arguments.source, options, progress)
        if arguments.muon:
            from shardplan.tracer import muon_steps

            muon_steps.add_optimizer_steps(trace, muon_options.options_of(arguments), progress)
    progress("writing")
    try:
        if arguments.strategy:
            files.write_text(arguments.strategy, json.dumps(strategy, indent=2) + "\n")
        if arguments.output == "-":
            document.write(trace, sys.stdout)
        else:
            with files.replacing(arguments.output) as file:
                document.write(trace, file)
    except files.CannotWrite as error:
        raise EnvironmentProblem(str(error)) from error
    except UnicodeEncodeError as error:
        raise TracerError(
            f"a name of the model is no text that UTF-8 can hold: {error.object[error.start : error.end]!r}"
        ) from error
    progress(_summary(trace, arguments.output))
    return 0


def _check_arguments(arguments: argparse.Namespace) -> None:
    muon_options.check(arguments)
    for name, value in (("SOURCE", arguments.source), ("--name", arguments.name)):
        if not value.isprintable() and any("\ud800" <= character <= "\udfff" for character in value):
            raise UsageProblem(f"{name} is no UTF-8: {value!r}")
    if arguments.strategy and os.path.realpath(arguments.strategy) == os.path.realpath(arguments.output):
        raise UsageProblem(f"-o and --strategy are one file (found {arguments.output} twice, expected another file)")
    try:
        for output in (arguments.output, arguments.strategy):
            if output not in ("-", ""):
                files.check_output(output, _read_by(arguments.source))
    except files.CannotWrite as error:
        raise EnvironmentProblem(str(error)) from error
    except files.OutputIsInput as error:
        raise UsageProblem(str(error)) from error


def _read_by(source: str) -> list[str]:
    """The files that a SOURCE names: a config, or the code of a module in the current folder."""
    module = source.partition(":")[0].replace(".", os.sep)
    return [source, f"{module}.py", os.path.join(module, "__init__.py")]


def _summary(trace: dict, output: str) -> str:
    events = [
        event for passes in (trace["forwards"], trace["backwards"]) for entry in passes for event in entry["events"]
    ]
    count = sum(_numel(parameter["shape"]) for parameter in trace["parameters"])
    flops = sum(event[4] for event in events if event[0] == "op")
    return (
        f"{output}: {trace['model']}, {count / 1e9:.3f} billion parameters, {len(trace['modules'])} modules, "
        f"{len(events)} events, {flops / 1e12:.1f} TFLOP"
    )


def _numel(shape: list[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result

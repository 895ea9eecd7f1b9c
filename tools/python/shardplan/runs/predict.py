# SPDX-License-Identifier: Apache-2.0
"""Simulation of a run: its model is traced, planned and simulated on a cluster.

[Note: few layers] A model whose builder reads `n_layers` is a stack of equal blocks. A step is then linear in the
number of blocks once the pipeline of gathers and reductions is full, so two short stacks say what a long one takes.

    step(n) = step(short) + (n - short) x (step(long) - step(short)) / (long - short)
"""

from __future__ import annotations

import collections
import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardplan import files
from shardplan.command import NoCommand, built_command
from shardplan.runs.table import Asked, BadTable, Run

# Blocks of the two stacks that stand for a longer one.
SHORT, LONG = 4, 8
_LAYERS = "n_layers"
# Flags of `shardplan plan` for a builder without an attribute `plan_flags`: FSDP1 in mixed precision, as Composer sets
# it up.
PLAN_FLAGS = (
    "--policy", "fsdp1", "--param-dtype", "bfloat16", "--reduce-dtype", "float32", "--backward-prefetch", "post",
    "--limit-all-gathers", "true", "--optimizer", "adamw",
)
_OF_FSDP2 = {"full_shard": "true", "shard_grad_op": "false", "no_shard": "false"}


@dataclass
class Stack:
    """A trace: how many of the model's blocks it has (None: the builder does not ask), the rule that names them, its
    parameters."""

    path: str
    layers: int | None
    blocks: str
    parameters: int
    tokens: float  # of a micro-batch that are the rank's alone


@dataclass
class Model:
    """The traces that are simulated for a run: one of the whole model, or two of short stacks."""

    stacks: list[Stack]
    layers: int | None
    parameters: int


@dataclass
class Traces:
    """Traces by what the builder asked of the row."""

    source: str
    folder: Path
    made: list[tuple[dict[str, object], Stack]] = field(default_factory=list)
    _builder: Callable | None = None

    def builder(self) -> Callable:
        """Imports torch, and the builder."""
        if self._builder is None:
            from shardplan.tracer import source
            from shardplan.tracer.errors import TracerError

            try:
                self._builder = source.find_callable(self.source)
            except TracerError as error:
                raise BadTable(f"--builder: {error}") from error
        return self._builder

    def plan_flags(self, run: Run) -> list[str]:
        flags = getattr(self.builder(), "plan_flags", PLAN_FLAGS)
        if callable(flags):
            flags = flags(run.cells)
        if not isinstance(flags, (list, tuple)) or not all(isinstance(flag, str) for flag in flags):
            raise BadTable(
                f"--builder: plan_flags of {self.source} is no list of arguments (found {flags!r}, expected strings)"
            )
        return list(flags)

    def model(self, run: Run) -> Model:
        layers = run.cells.get(_LAYERS)
        if type(layers) is not int or layers <= LONG:
            stack = self._stack(run, run.cells)
            return Model([stack], None, stack.parameters)
        short = self._stack(run, run.cells | {_LAYERS: SHORT})
        if short.layers is None:
            return Model([short], None, short.parameters)
        long = self._stack(run, run.cells | {_LAYERS: LONG})
        return Model(
            [short, long],
            layers,
            short.parameters + (layers - SHORT) * (long.parameters - short.parameters) // (LONG - SHORT),
        )

    def _stack(self, run: Run, cells: dict[str, object]) -> Stack:
        for answers, stack in self.made:
            if all(cells.get(column) == answer for column, answer in answers.items()):
                return stack
        from shardplan.tracer import document, session
        from shardplan.tracer.errors import TracerError

        builder, asked = self.builder(), Asked(cells)
        options = session.Options(
            batch=cells["micro_batch"], seq=cells["sequence"], dtype="bfloat16", param_dtype="float32"
        )
        try:
            trace = session.trace_callable(lambda: builder(asked), self.source, options)
        except TracerError as error:
            raise BadTable(f"{run.path}: /line/{run.line}: the builder's model cannot be traced: {error}") from error
        path = self.folder / f"{len(self.made)}.trace.json"
        with files.replacing(path) as file:
            document.write(trace, file)
        # The tracer itself makes the input of that shape.
        answers = {"sequence": cells["sequence"], "micro_batch": cells["micro_batch"]} | asked.answers
        blocks = getattr(builder, "blocks", None) or _blocks([module["fqn"] for module in trace["modules"]])
        stack = Stack(
            str(path),
            cells[_LAYERS] if _LAYERS in asked.answers else None,
            blocks,
            sum(math.prod(parameter["shape"]) for parameter in trace["parameters"]),
            trace["tokens_per_batch"] / _ranks_per_batch(trace),
        )
        self.made.append((answers, stack))
        return stack


def _ranks_per_batch(trace: dict) -> int:
    shared = trace.get("same_batch", [])
    return math.prod(group["size"] for group in trace.get("communicators", []) if group["name"] in shared)


def _blocks(fqns: list[str]) -> str:
    """The rule of the outermost list of modules, of the longest where there are several: "blocks.*"; "" without one."""
    lists = collections.Counter(fqn.rpartition(".")[0] for fqn in fqns if fqn.rpartition(".")[2].isdigit())
    outermost = {name: count for name, count in lists.items() if not any(part.isdigit() for part in name.split("."))}
    return f"{max(outermost, key=lambda name: outermost[name])}.*" if outermost else ""


class Simulator:
    """Asks `shardplan evaluate` for steps of runs."""

    def __init__(self, traces: Traces):
        self._program = built_command("cost")
        self._traces = traces
        self._known: dict[tuple, float] = {}
        self._process: subprocess.Popen | None = None

    def step_ns(self, run: Run, cluster: str) -> float:
        model = self._traces.model(run)
        steps = [self._ask(run, stack, cluster) for stack in model.stacks]
        if model.layers is None:
            return steps[0]
        return steps[0] + (model.layers - SHORT) * (steps[1] - steps[0]) / (LONG - SHORT)

    def tokens_per_second(self, run: Run, cluster: str) -> float:
        step_ns = self.step_ns(run, cluster)
        if step_ns <= 0:
            raise run.wrong("the step takes no time", f"0 ns on {cluster}", "a cluster that costs something")
        tokens = self._traces.model(run).stacks[0].tokens * run.cells["micro_batches"]
        return tokens * 1e9 / step_ns

    def cluster_path(self, name: str, ranks: int) -> tuple[str, str]:
        """The file of a cluster for so many ranks; why there is none, else ""."""
        answer = self._answer({"cluster": name, "ranks": ranks})
        return answer.get("path", ""), str(answer.get("error", ""))

    def canonical(self, path: str) -> str:
        """The document of a file, as the commands write it."""
        answer = self._answer({"document": path})
        if "error" in answer:
            raise BadTable(" ".join(str(answer["error"]).split()))
        return answer["text"]

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()

    def _ask(self, run: Run, stack: Stack, cluster: str) -> float:
        question = (stack.path, "--cluster", cluster, *_flags(run, stack, self._traces.plan_flags(run)))
        if question not in self._known:
            answer = self._answer(list(question))
            if "error" in answer:
                raise run.wrong(
                    "the run cannot be planned and simulated",
                    " ".join(str(answer["error"]).split())[:400],
                    "a run that `shardplan plan` plans",
                )
            self._known[question] = float(answer["step_ns"])
        return self._known[question]

    def _answer(self, question: list[str] | dict) -> dict:
        try:
            if self._process is None:
                self._process = subprocess.Popen(
                    [self._program, "evaluate"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            raise NoCommand(f"cannot run {self._program}: {error}") from error
        if not line:
            raise NoCommand(f"{self._program} evaluate ended (exit code {self._process.wait()})")
        return json.loads(line)


def _flags(run: Run, stack: Stack, others: list[str]) -> list[str]:
    """Flags that the row gives for the plan, and the others."""
    cells = run.cells
    flags = ["--ranks", str(cells["gpus"]), "--accumulate", str(cells["micro_batches"])]
    if "fsdp1" in others:
        flags += ["--sharding", cells["sharding"]]
    else:
        flags += ["--reshard-after-forward", _OF_FSDP2[cells["sharding"]]]
    if stack.blocks:
        flags += ["--unit", stack.blocks]
    if cells["activation_checkpointing"]:
        flags += ["--checkpoint", stack.blocks]
    return flags + others

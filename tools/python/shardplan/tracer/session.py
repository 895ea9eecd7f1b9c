# SPDX-License-Identifier: Apache-2.0
"""From a source to a trace document: `trace_source`, and `trace_module` for use from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import unittest.mock
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from shardplan.tracer import checkpoint_calls, compiled, document, record, sharding_calls, sharding_strategy
from shardplan.tracer import source as sources, stand_ins
from shardplan.tracer.attention import device_attention
from shardplan.tracer.batch_dimensions import BatchDimensions
from shardplan.tracer.collectives import CollectiveProblem
from shardplan.tracer.errors import EnvironmentProblem, TracerError, UsageProblem
from shardplan.tracer.fake_cuda import ENGINE_WITHOUT_DEVICE, fake_cuda
from shardplan.tracer.fake_meshes import fake_meshes
from shardplan.tracer.flex_attention import device_flex_attention
from shardplan.tracer.grouped import device_grouped_mm
from shardplan.tracer.module_tree import ModuleTree, move_to_fake_cuda
from shardplan.tracer.operators import dtype_name
from shardplan.tracer.places import one_line, place
from shardplan.tracer.progress import Progress
from shardplan.tracer.recorder import ANSWERED, CANNOT_FAKE, Answers
from shardplan.tracer.recurrent import device_recurrent
from shardplan.tracer.routing import Routing
from shardplan.tracer.transformers_masks import as_in_a_step
from shardplan.tracer.user_code import on_a_gpu

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass
class Options:
    """Options of the command line."""

    batch: int = 1
    seq: int = 2048
    images: int = 0  # in each sample of a multimodal config; 0: its text model
    dtype: str | None = None  # the passes' dtype; None: bfloat16 for a config, a module's own otherwise
    param_dtype: str | None = (
        None  # the document's parameter dtype; None: float32 for a config, a module's own otherwise
    )
    loss: str = "default"  # "default", "none", or one of huggingface.LOSSES
    grad: bool = True
    sdpa: str = "auto"
    experts: str = "grouped_mm"
    steps: int = 1
    evaluation: bool = False
    compile: list[str] = field(default_factory=list)  # patterns of modules that are compiled by themselves
    compile_backend: str = "inductor"
    ignore_compile: bool = False  # modules that the model compiles are traced as they are written
    name: str = ""
    mark_inputs: bool = True
    # Values that a module reads, by its FQN (docs/internals/tracer.md).
    answers: dict[str, list[float]] = field(default_factory=dict)
    routing: str = ""  # "balanced" or a file of shares (routing.py); "": not known
    # Functions by dotted name; None: no shipped one (stand_ins.load).
    stand_ins: dict[str, Callable | None] = field(default_factory=dict)
    keep_output: bool = False  # the training loop keeps a name for the model's output until the backward is over
    same_batch: list[str] = field(default_factory=list)  # mesh dimensions (batch_dimensions.py)
    own_batch: list[str] = field(default_factory=list)
    # The release whose kernels leave tensors on the host; "": the installed one, "fake": none, as with fake tensors.
    kernels_of: str = ""


_READS_VALUE = "the model reads a value of a tensor to decide what to do, and a traced tensor has no values"
_ANSWER = (
    'say what it reads with --answer FQN=VALUE, or put a stand-in of the same name in its place '
    '(docs/internals/tracer.md, "Values")'
)
_ROUTING = "where it follows from the experts of tokens: --routing balanced, or --routing FILE.csv"
_STAND_IN = 'put a stand-in of the same name in its place (docs/internals/tracer.md, "Values")'


@contextlib.contextmanager
def _recording(options: Options):
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # torch logs what a fake tensor cannot do with a stack; the error says it.
        stack.enter_context(
            unittest.mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
        )
        stack.enter_context(stand_ins.standing_in(options.stand_ins))
        stack.enter_context(fake_cuda())
        stack.enter_context(device_attention(options.sdpa))
        stack.enter_context(device_flex_attention())
        stack.enter_context(device_recurrent())
        stack.enter_context(device_grouped_mm())
        stack.enter_context(record.fake_mode())
        stack.enter_context(fake_meshes())
        stack.enter_context(torch.set_grad_enabled(options.grad))
        yield


def trace_source(source: str, options: Options, progress: Progress = Progress()) -> dict:
    """The trace of `package.module:callable` or of a Hugging Face config file. Raises TracerError."""
    path = Path(source)
    if source.endswith(".json") or path.is_file():
        try:
            return _trace_config(path, options, progress)
        except TracerError as error:
            if type(error) is TracerError and str(path) not in str(error):
                raise TracerError(f"{path}: {error}") from error
            raise
    if ":" not in source:
        raise TracerError(f'"{source}" is neither a file nor package.module:callable')
    if options.images:
        raise UsageProblem("--images is for Hugging Face configs; a callable returns its own inputs: (module, inputs)")
    with stand_ins.standing_in(options.stand_ins):  # imported, too
        return trace_callable(sources.find_callable(source), source, options, progress)


def strategy_of_source(source: str, options: Options, progress: Progress = Progress()) -> tuple[dict, dict]:
    """The trace of a callable, and the strategy document of its calls of fully_shard."""
    if source.endswith(".json") or Path(source).is_file():
        raise UsageProblem("--strategy is for a callable, which calls fully_shard; a config does not")
    if ":" not in source:
        raise TracerError(f'"{source}" is neither a file nor package.module:callable')
    with stand_ins.standing_in(options.stand_ins):
        return trace_and_strategy(sources.find_callable(source), source, options, progress)


def trace_callable(
    function: Callable, source: str, options: Options, progress: Progress = Progress()
) -> dict:
    """The trace of what `function` returns (see docs/internals/tracer.md); `source` names it. It is called inside the
    recorder's fake mode."""
    return trace_and_strategy(function, source, options, progress, wanted=False)[0]


def trace_and_strategy(
    function: Callable, source: str, options: Options, progress: Progress = Progress(), wanted: bool = True
) -> tuple[dict, dict | None]:
    """The trace, and the strategy document of the calls of fully_shard that `function` and the step make. With it the
    trace is without the checkpoints that the strategy has. wanted: False: there is none."""
    with _recording(options), on_a_gpu(), sharding_calls.recording() as sharding:
        progress("building the module")
        with torch.enable_grad():
            example = sources.build(function, source, options.batch, options.seq)
        names = sharding_calls.Names(example.module)
        checkpoint = None
        if wanted:
            checkpoint = checkpoint_calls.take_away(example.module, names, options.ignore_compile)
        if sharding.units and not wanted:
            progress.note("the model calls fully_shard, and the trace is of the model before: --strategy FILE has them")
        try:
            trace = _trace_example(example, source, options, progress)
        finally:
            for module in example.module.modules():
                sharding_calls.as_before(module)
        return trace, sharding_strategy.document(sharding, names, trace, checkpoint) if wanted else None


def trace_module(
    module: nn.Module,
    args: tuple = (),
    kwargs: dict | None = None,
    loss: Callable | None = None,
    options: Options | None = None,
) -> dict:
    """The trace of a module that exists; its parameters and buffers are replaced by fake CUDA ones."""
    options = options or Options()
    with _recording(options):
        example = sources.Example(module, args, kwargs or {}, loss)
        return _trace_example(example, type(module).__name__, options, Progress())


def trace_groups(
    module: nn.Module,
    groups: list[record.Group],
    loss: Callable | None = None,
    options: Options | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> dict:
    """The trace of a module that exists, with a forward or backward pass for each that `groups` asks for, in their
    order. `prepare` changes the module before, when it is on fake CUDA tensors: makes its parameters distributed ones,
    say.
    """
    options = options or Options()
    with _recording(options):
        if prepare is not None:
            move_to_fake_cuda(module, None)
            prepare(module)
        return _trace_groups(module, groups, loss, type(module).__name__, options, Progress())


_SHARDED = {"FSDPModule": "fully_shard", "FullyShardedDataParallel": "FullyShardedDataParallel"}  # torch's classes


def _compute_dtype(module: nn.Module, wanted: str | None) -> torch.dtype:
    if wanted is not None:
        return DTYPES[wanted]
    floating = [p.dtype for p in module.parameters() if p.dtype.is_floating_point]
    return floating[0] if floating else torch.float32


def _tree(module: nn.Module, dtype: torch.dtype, options: Options) -> ModuleTree:
    """The module tree after the move to fake CUDA tensors of the compute dtype; the document keeps the parameters' own
    dtype."""
    in_graphs = compiled.prepare(module, options.compile, options.compile_backend, options.ignore_compile)
    own = {fqn: p.dtype for fqn, p in module.named_parameters()}
    move_to_fake_cuda(module, dtype)
    tree = ModuleTree.of(module, in_graphs)
    for entry in tree.parameters:
        floating = own[entry["fqn"]].is_floating_point
        entry["dtype"] = options.param_dtype if options.param_dtype and floating else dtype_name(own[entry["fqn"]])
    return tree


def _trace_example(example: sources.Example, source: str, options: Options, progress: Progress) -> dict:
    if options.loss not in ("default", "none", "sum"):
        raise UsageProblem(
            f"--loss {options.loss} is for Hugging Face configs; a callable returns its own loss: (module, inputs, "
            "loss)"
        )
    groups = [record.Group([record.Call(example.args, example.kwargs)])] * options.steps
    return _trace_groups(example.module, groups, example.loss, source, options, progress)


def _refuse_sharded(module: nn.Module) -> None:
    """A trace is of the model that a plan shards."""
    for fqn, inner in module.named_modules():
        for kind in () if sharding_calls.is_noted(inner) else type(inner).__mro__:
            if kind.__name__ in _SHARDED and kind.__module__.startswith("torch.distributed.fsdp"):
                raise TracerError(
                    f"{fqn or 'the model'} is under {_SHARDED[kind.__name__]} already: trace the model without it "
                    "(`shardplan plan` shards it)"
                )


def _trace_groups(
    module: nn.Module,
    groups: list[record.Group],
    own_loss: Callable | None,
    source: str,
    options: Options,
    progress: Progress,
) -> dict:
    _refuse_sharded(module)
    dtype = _compute_dtype(module, options.dtype)
    tree = _tree(module, dtype, options)
    if options.evaluation:
        module.eval()
    moved: dict[int, record.Call] = {}
    inputs: list[tuple[str, torch.Tensor]] = []
    for call in (call for group in groups for call in group.calls):
        if id(call) in moved:
            continue
        args, kwargs = (sources.move_inputs(v, dtype) for v in (call.args, call.kwargs))
        prefix = f"call{len(moved)}." if moved else ""
        inputs += [(prefix + name, tensor) for name, tensor in _named_inputs(args, kwargs)]
        moved[id(call)] = dataclasses.replace(call, args=args, kwargs=kwargs)
    loss = (
        None
        if options.loss == "none" or not options.grad
        else own_loss if options.loss == "default" and own_loss else record.default_loss
    )
    there = [record.Group([moved[id(call)] for call in group.calls], group.backward) for group in groups]
    step = record.Step(module, tree, there, loss, inputs, options.keep_output, options.kernels_of)
    tokens = _tokens([tensor for _, tensor in inputs])
    return _document(
        step,
        options,
        Answers(options.answers, Routing.of(options.routing)),
        progress,
        options.name or source.rpartition(":")[2],
        source,
        dtype,
        tokens,
        [],
    )


def _named_inputs(args: tuple, kwargs: dict) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []

    def walk(name: str, value) -> None:
        if isinstance(value, torch.Tensor):
            if all(value is not other for _, other in found):
                found.append((name, value))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                walk(f"{name}.{index}", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{name}.{key}", item)

    for index, value in enumerate(args):
        walk(f"args.{index}", value)
    for key, value in kwargs.items():
        walk(key, value)
    return found


def _tokens(inputs: list[torch.Tensor]) -> int:
    """Tokens of a (batch, sequence) input of ids; otherwise samples."""
    if not inputs or inputs[0].dim() == 0:
        return 0
    first = inputs[0]
    return first.numel() if first.dim() == 2 and not first.dtype.is_floating_point else first.size(0)


def _trace_config(path: Path, options: Options, progress: Progress) -> dict:
    from shardplan.tracer import huggingface

    model = huggingface.HuggingFaceModel(path, options.images)
    dtype = DTYPES[options.dtype or "bfloat16"]
    answers = Answers(options.answers, Routing.of(options.routing))
    with _recording(options):
        progress("building the module")
        with torch.device("cuda"):
            module = model.build(options.experts)
        for note in model.notes:
            progress.note(note)
        if options.evaluation:
            module.eval()
        tree = _tree(module, dtype, options)
        wanted = "cross_entropy" if options.loss in ("default", "none") else options.loss
        batch = model.batch(options.batch, options.seq, dtype, wanted)
        loss, inputs = batch.loss, batch.inputs
        if options.loss == "none" or not options.grad:
            loss, inputs = None, [(name, tensor) for name, tensor in batch.inputs if name != "labels"]
        groups = [record.Group([record.Call((), batch.kwargs)])] * options.steps
        step = record.Step(module, tree, groups, loss, inputs, options.keep_output)
        return _document(
            step,
            options,
            answers,
            progress,
            options.name or model.name,
            path.name,
            dtype,
            batch.tokens,
            [*model.facts, *model.notes],
        )


def _silent_dimensions(fields: dict) -> list[str]:
    """Along these parameters are cut and nothing communicates."""
    used = {
        fields["communicators"][event[11]["communicator"]]["name"]
        for entry in (*fields["forwards"], *fields["backwards"])
        for event in entry["events"]
        if event[0] == "op" and len(event) > 11
    }
    placed = (p for entry in fields["parameters"] for p in entry.get("placements", ()))
    return sorted({p["mesh_dim"] for p in placed if p.get("dim", -1) >= 0 and p["size"] > 1} - used)


def _document(
    step: record.Step,
    options: Options,
    answers: Answers,
    progress: Progress,
    name: str,
    source: str,
    dtype: torch.dtype,
    tokens: int,
    notes: list[str],
) -> dict:
    batches = step.batches = BatchDimensions(options.same_batch, options.own_batch)
    if both := sorted(set(batches.same) & set(batches.own)):
        raise UsageProblem(f"--same-batch {both[0]} and --own-batch {both[0]} contradict each other")
    try:
        with as_in_a_step(answers):
            fields = record.record(step, options.mark_inputs, answers, progress)
    except TracerError:
        raise
    except CollectiveProblem as error:
        raise TracerError(f"{error}{place(error, step.module)}") from error
    except CANNOT_FAKE as error:
        answered = any(str(operator) in str(error) for operator in ANSWERED)
        way_out = _ANSWER if answered else _STAND_IN
        if answers.routing.choosers and not answers.routing.is_known:
            way_out = f"{_ROUTING}. Else {way_out}"
        raise TracerError(f"{_READS_VALUE}{place(error, step.module)}: {one_line(error)}; {way_out}") from error
    except Exception as error:
        if ENGINE_WITHOUT_DEVICE in str(error):
            raise EnvironmentProblem(
                "a backward ran in this process before shardplan.tracer was imported; import it first, or use the "
                "command"
            ) from error
        where = place(error, step.module)
        if ".numpy() is not supported" in str(error):
            raise TracerError(f"{_READS_VALUE}{where}: numpy(); {_STAND_IN}") from error
        if isinstance(error, torch.AcceleratorError) or "NVIDIA driver" in str(error):
            raise TracerError(
                f"an operator asks the CUDA driver before it runs, which a trace cannot answer{where}: "
                f"{one_line(error)}"
            ) from error
        raise TracerError(f"the model failed with its own {type(error).__name__}: {one_line(error)}{where}") from error
    if uncalled := sorted(
        name for name, function in options.stand_ins.items() if function is not None and name not in stand_ins.called()
    ):
        raise UsageProblem(f"--stand-in {uncalled[0]}=...: nothing calls this function")
    for flag, names in (("--same-batch", batches.same), ("--own-batch", batches.own)):
        if unused := sorted(set(names) - batches.used):
            raise UsageProblem(f"{flag} {unused[0]}: the model communicates along no dimension of that name")
    if unused := sorted(answers.by_module.keys() - answers.used):
        raise UsageProblem(f"--answer {unused[0]}=...: no value is read there")
    if options.routing:
        if not answers.routing.choosers:
            raise UsageProblem(f"--routing {options.routing}: the model chooses no experts (by a top-k)")
        notes = [*notes, f"routing {answers.routing.name}"]
    if stood_in := stand_ins.called():
        notes = [*notes, f"stand-ins {', '.join(stood_in)}"]
    recorded_with = "; ".join([f"torch {torch.__version__.split('+')[0]}", f"attention {options.sdpa}", *notes])
    head = {
        "schema": document.SCHEMA,
        "model": name,
        "source": source,
        "recorded_with": recorded_with,
        "compute_dtype": dtype_name(dtype),
        "tokens_per_batch": tokens,
    }
    for dimension in _silent_dimensions(fields):
        progress.note(
            f"parameters are cut along {dimension}, and no collective is along it: is the model called as in a "
            "training (torchtitan's spmd_types: within set_current_spmd_mesh)?"
        )
    if fields["world_size"] == 1:
        del fields["world_size"]
    for name in ("same_batch", "communicators"):
        if not fields[name]:
            del fields[name]
    return {**head, **fields}

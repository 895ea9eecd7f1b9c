# SPDX-License-Identifier: Apache-2.0
"""Records a training step of a model: `trace_module`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from shardplan.tracer import frozen, placement, releases, sharding_calls
from shardplan.tracer.batch_dimensions import BatchDimensions
from shardplan.tracer.calls import Calls, LossRunsBackwards
from shardplan.tracer.communicators import Communicators
from shardplan.tracer.errors import TracerError
from shardplan.tracer.module_hooks import ModuleHooks
from shardplan.tracer.module_tree import ModuleTree
from shardplan.tracer.operators import dtype_name
from shardplan.tracer.progress import Progress
from shardplan.tracer.raising import Raised, raising
from shardplan.tracer.recorder import Answers, Recorder, StorageRecord
from shardplan.tracer.routing import RanksOfExperts
from shardplan.tracer.shape_propagation import unrecorded_shapes

Loss = Callable[[object], torch.Tensor]


@dataclass
class Call:
    """One forward: its inputs, whether autograd records it, and the FQN of the module that is called in place of the
    root. raises_in,
    raises_in_backward: FQNs of modules in which it, or its backward, raises (raising.py)."""

    args: tuple
    kwargs: dict
    grad: bool = True
    module: str = ""
    raises_in: str = ""
    raises_in_backward: str = ""


@dataclass
class Group:
    """Forwards in the order of their calls and, unless `backward` is false, one backward of the sum of their losses."""

    calls: list[Call]
    backward: bool = True


@dataclass
class Step:
    """A model in front of the recorder: everything on fake CUDA tensors, in the compute dtype."""

    module: nn.Module
    tree: ModuleTree
    groups: list[Group]
    loss: Loss | None  # of the module's output; None: forward only
    inputs: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # named batch tensors, labels included
    keep_output: bool = False  # until the backward is over
    kernels_of: str = ""  # Recorder's
    loss_apart: bool = False  # Calls'; a recording finds out
    batches: BatchDimensions = field(default_factory=BatchDimensions)


def default_loss(output) -> torch.Tensor:
    """A scalar output is the loss; an output with a `loss` gives that; else the sum of every floating output that needs
    a gradient."""
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    given = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(given, torch.Tensor):
        return given
    terms = [t.float().sum() for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not terms:
        raise TracerError(
            "the model's output holds no tensor that needs a gradient, so there is no loss to go backward from "
            "(--no-loss traces the forward alone)"
        )
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def record(
    step: Step,
    mark_inputs: bool = True,
    answers: Answers | None = None,
    progress: Progress | None = None,
) -> dict:
    """The document's fields from `modules` on. Call inside FakeTensorMode and fake_cuda."""
    progress = progress or Progress()
    try:
        return _record_as_compiled(step, mark_inputs, answers, progress)
    except RanksOfExperts:
        for parameter in step.module.parameters():
            parameter.grad = None
        progress("once more, now that the ranks of the experts are known")
        return _record_as_compiled(step, mark_inputs, answers, progress)


def _record_as_compiled(step: Step, mark_inputs: bool, answers: Answers | None, progress: Progress) -> dict:
    if not step.tree.compiled:
        return _record(step, mark_inputs, answers, progress)
    with torch.compiler.set_stance("force_eager"):  # but for the modules
        progress("compiling")
        # Compilers may leave tensors behind of the step that they see.
        _record_once(step, mark_inputs, answers, progress)
        return _record(step, mark_inputs, answers, progress)


def _record(step: Step, mark_inputs: bool, answers: Answers | None, progress: Progress) -> dict:
    fields = _record_placed(step, mark_inputs, answers, progress)
    if fields["backwards"]:
        progress("the forward once more, with nothing kept for the backward")
        with contextlib.suppress(TracerError, RuntimeError):
            unkept, _ = _record_once(step, False, answers, progress, keep_nothing=True)
            releases.mark(fields["forwards"], unkept["forwards"])
    if frozen.has_frozen_parameters(step.module):
        progress("once more, as if all parameters trained")
        with frozen.everything_trains(step.module), contextlib.suppress(TracerError, RuntimeError):
            trained, _ = _record_once(step, False, answers, progress)
            frozen.mark_tensors(fields, trained)
    return fields


def _record_placed(step: Step, mark_inputs: bool, answers: Answers | None, progress: Progress) -> dict:
    """See [Note: two recordings] in placement.py."""
    marked, regrouped = _record_once(step, mark_inputs, answers, progress)
    if not regrouped:
        return marked
    progress("once more, without marks on inputs")
    plain, _ = _record_once(step, False, answers, progress)
    for entry, other in zip(plain["backwards"], marked["backwards"]):
        merged = placement.with_inputs_done(entry["events"], other["events"])
        if merged is None:
            return marked
        entry["events"] = merged
    return plain


def _record_once(
    step: Step, mark_inputs: bool, answers: Answers | None, progress: Progress, keep_nothing: bool = False
) -> tuple[dict, bool]:
    """The fields, and whether the marks on inputs changed how gradients are summed. `keep_nothing`: forwards alone, for
    which autograd keeps no tensor."""
    try:
        return _record_passes(step, mark_inputs, answers, progress, keep_nothing)
    except LossRunsBackwards:
        if [len(group.calls) for group in step.groups] != [1]:
            raise TracerError(
                "a loss that runs backwards of its own is traced alone: one forward of the model, in one step"
            ) from None
        step.loss_apart = True
        for parameter in step.module.parameters():
            parameter.grad = None
        return _record_passes(step, mark_inputs, answers, progress, keep_nothing)


def _record_passes(
    step: Step, mark_inputs: bool, answers: Answers | None, progress: Progress, keep_nothing: bool
) -> tuple[dict, bool]:
    tree = step.tree
    fqns = [entry["fqn"] for entry in tree.modules]
    placed = frozenset(p["mesh_dim"] for entry in tree.parameters for p in entry.get("placements", ()))
    communicators = Communicators(step.batches, placed)
    recorder = Recorder(answers, fqns, step.kernels_of, bool(tree.compiled), communicators)
    owners = _owners(tree)
    for parameter, parameter_id in tree.parameter_ids.items():
        recorder.add_parameter(parameter, parameter_id, owners[parameter_id])
    inputs = [_input(recorder, name, tensor) for name, tensor in step.inputs]
    buffers = []
    for entry, buffer in zip(tree.buffers, tree.buffer_tensors):
        storage = recorder.record_of(buffer)
        buffers.append({**entry, "storage": storage.id if storage is not None else recorder.add_resident(buffer)})
    hooks = ModuleHooks(recorder, tree, mark_inputs)
    calls = Calls(step.module, recorder, hooks, fqns, keep_nothing, step.loss_apart)
    sharding_calls.begin_step(calls.order, counts=not keep_nothing)
    with no_garbage_collection(), unrecorded_shapes(recorder.unrecorded), recorder.watching_collectives(), recorder:
        try:
            for group in step.groups:
                _record_group(step, group, recorder, hooks, calls, progress, keep_nothing)
        finally:
            recorder.phase = "off"
            hooks.remove()
    for storage in recorder.storages:
        _assign_role(storage)
    for position, (shape, dtype, storage_id) in enumerate(recorder.captured):
        inputs.append(
            {"name": f"captured.{position}", "shape": list(shape), "dtype": dtype_name(dtype), "storage": storage_id}
        )
    _name_only_what_is_there(calls.forwards, recorder)
    recorder.exchanges.end()
    communicators.add_placements(list(zip(tree.parameters, tree.parameter_ids)))
    fields = {
        "world_size": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        "same_batch": communicators.same_batch(),
        "communicators": communicators.entries,
        "modules": tree.modules,
        "parameters": tree.parameters,
        "buffers": buffers,
        "inputs": inputs,
        "forwards": calls.forwards,
        "backwards": calls.backwards,
        "calls": calls.order if step.loss_apart else [],
    }
    return fields, calls.regrouped and mark_inputs


@contextlib.contextmanager
def no_garbage_collection():
    """Frees must follow from references alone."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _owners(tree: ModuleTree) -> dict[int, int]:
    owners: dict[int, int] = {}
    for module_id, entry in enumerate(tree.modules):
        for named in entry.get("parameters", ()):
            owners.setdefault(named["parameter"], module_id)
    return owners


def _input(recorder: Recorder, name: str, tensor: torch.Tensor) -> dict:
    known = recorder.record_of(tensor)
    storage = known.id if known is not None else recorder.add_resident(tensor)
    return {"name": name, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "storage": storage}


def _record_group(
    step: Step,
    group: Group,
    recorder: Recorder,
    hooks: ModuleHooks,
    calls: Calls,
    progress: Progress,
    keep_nothing: bool,
) -> None:
    backward = group.backward and step.loss is not None
    first, outputs, losses = len(calls.forwards), [], []
    for position, call in enumerate(group.calls):
        last = position + 1 == len(group.calls)
        with torch.set_grad_enabled(torch.is_grad_enabled() and call.grad), releases.kept_by_autograd(not keep_nothing):
            _forward(step, call, recorder, hooks, calls, outputs, losses if backward else None, last, progress)
    # The loss has run all of its backwards.
    is_over = step.loss_apart and not getattr(losses[0], "requires_grad", False)
    if not backward or keep_nothing or is_over:
        recorder.phase = "off"
        return
    _check_loss(losses[0])
    progress("backward")
    covered = None if step.loss_apart else list(range(first, len(calls.forwards)))
    calls.backward([losses[0]], lambda: _backward(losses, outputs, step.inputs), covered)
    recorder.phase = "off"


def _forward(
    step: Step,
    call: Call,
    recorder: Recorder,
    hooks: ModuleHooks,
    calls: Calls,
    outputs: list,
    losses: list | None,
    last: bool,
    progress: Progress,
) -> None:
    """Adds the loss to `losses` (None: there is none); behind the last forward that list holds their sum alone."""
    progress("forward")
    modules = sum(1 for _ in step.module.modules())
    hooks.entered = lambda count: progress.part(min(count, modules), modules)
    calls.begin_forward()
    recorder.phase = "forward"
    recorder.mark_nodes()
    with calls.own_backwards(), raising(step.module, call.raises_in, call.raises_in_backward):
        try:
            output = step.module.get_submodule(call.module)(*call.args, **call.kwargs)
        except Raised:
            return calls.end_forward(abandoned=True)
        recorder.mark_nodes()
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                storage = recorder.record_of(leaf)
                if storage is not None:
                    storage.is_output = True
            del leaf
        if step.loss_apart:
            calls.end_forward()
            calls.begin_forward()
        recorder.phase = "loss"
        if losses is not None:
            with recorder.labels_on_device:
                losses.append(step.loss(output))
    if step.keep_output:
        outputs.append(output)
    output = None  # as a training loop that keeps no name for it
    while losses and last and len(losses) > 1:
        losses[:2] = [losses[0] + losses[1]]
    calls.end_forward()


def _backward(losses: list, outputs: list, inputs: list[tuple[str, torch.Tensor]]) -> None:
    loss = losses.pop()
    loss.backward()
    del loss
    outputs.clear()
    for _, tensor in inputs:
        if tensor.is_leaf:
            tensor.grad = None  # goes with the batch


def _check_loss(loss) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        raise TracerError(f"the loss must be one number to go backward from; found {found}")
    if not loss.requires_grad:
        raise TracerError(
            "the loss needs no gradient: no parameter that requires one takes part in it (--no-loss traces the "
            "forward alone)"
        )


def _assign_role(storage: StorageRecord) -> None:
    """Gives a storage its role, by where it was born and died."""
    if storage.event is None:
        return
    if storage.phase == "forward":
        if storage.died == "forward":
            role = "forward_temp"
        elif storage.died == "loss" or (storage.is_output and storage.died in (None, "off")):
            role = "output"
        else:
            role = "saved"
    elif storage.phase == "loss":
        role = "loss_temp" if storage.died == "loss" else "loss_saved"
    elif storage.gradient_of >= 0:
        role = "parameter_grad"
        storage.event.append(storage.gradient_of)
    else:
        role = "recompute" if storage.recomputed else "backward_temp"
    storage.event[3] = role


def _name_only_what_is_there(forwards: list[dict], recorder: Recorder) -> None:
    """A tensor whose storage had no event (it came with the model) keeps its storage unnamed."""
    named = {s.id for s in recorder.storages if s.event is not None or s.phase == "before"}
    for forward in forwards:
        for tensor in forward["tensors"]:
            if tensor.get("storage", -1) not in named:
                tensor.pop("storage", None)


class _DevicelessMode(FakeTensorMode):
    """Asks no device even while torch.cuda says that there is one (user_code.py).

    Every fake tensor refers to its mode, so a copied module would come with a mode of its own. That has copies of the
    references to storages that the mode remembers, and each reference frees its storage once: twice is a corrupted
    heap. A copy of a fake tensor is one of the same mode.
    """

    def __deepcopy__(self, memo: dict) -> _DevicelessMode:
        return self

    @property
    def avoid_device_init(self) -> bool:
        return True


@contextlib.contextmanager
def fake_mode():
    """FakeTensorMode as the tracer uses it."""
    with _DevicelessMode(allow_non_fake_inputs=True) as mode:
        yield mode

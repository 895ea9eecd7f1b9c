# SPDX-License-Identifier: Apache-2.0
"""Hooks on every module: enter, exit, gradients of outputs ready, gradients of inputs done, parameter gradients.

They sit where FSDP2's sit. Before the forward an identity function is put around all inputs that need a gradient (as
one autograd node, args and kwargs flattened): its backward runs when the module's backward is done. On every output
that needs a gradient there is a tensor hook: it fires when that output's gradient is complete. Modules without
parameters below them can never be sharded and get no identity.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import nn

from shardplan.tracer.compiled import inside
from shardplan.tracer.containers import tensors_in, with_grad_tensors
from shardplan.tracer.local_tensors import note_partial_gradient
from shardplan.tracer.module_tree import ModuleTree
from shardplan.tracer.operators import dtype_name
from shardplan.tracer.recorder import Recorder

_ID_ATTRIBUTE = "_shardplan_tensor_id"


class _Identity(torch.autograd.Function):
    """Passes tensors through; calls `done` when their gradients have come back."""

    @staticmethod
    def forward(ctx, done, *tensors):
        ctx.done = done
        # Not x.detach(): that is a view in autograd's sense, which the module could not change in place.
        return tuple(t.data for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.done()
        return (None, *gradients)


IDENTITY_NODE = "_IdentityBackward"  # as autograd names it


class ModuleHooks:
    """Installs the hooks; keeps the tensors of the current forward."""

    def __init__(self, recorder: Recorder, tree: ModuleTree, mark_inputs: bool = True):
        self._recorder, self._tree = recorder, tree
        self._mark_inputs = mark_inputs
        self._handles: list = []
        self._calls: dict[int, list[int]] = {}  # module id -> occurrences entered and not yet left
        self._counts: dict[int, int] = {}
        self._scope = object()  # of tensor ids: a forward of this recording
        self._number = 0
        self._recomputed: list[int] = []
        self.tensors: list[dict] = []
        self._entered = 0  # modules, as often as they were
        self.entered: Callable[[int], None] = lambda count: None
        with_parameters = {m for m in tree.module_ids if any(True for _ in m.parameters())}
        in_graphs = inside(tree.compiled)
        for module, module_id in tree.module_ids.items():
            if module in in_graphs:
                continue
            before = functools.partial(self._before, module_id, module in with_parameters)
            after = functools.partial(self._after, module_id)
            if module in tree.compiled:
                before, after = torch.compiler.disable(before), torch.compiler.disable(after)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))
        for parameter, parameter_id in tree.parameter_ids.items():
            if parameter.requires_grad:
                hook = functools.partial(self._parameter_gradient, parameter_id)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_forward(self, number: int) -> None:
        """`number`: of the forward, by which events of backwards name it."""
        self._scope, self._number = object(), number
        self._calls, self._counts, self.tensors = {}, {}, []
        self._entered = 0

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """The id of a tensor object within the current forward."""
        known = getattr(tensor, _ID_ATTRIBUTE, None)
        if known is not None and known[0] is self._scope:
            return known[1]
        return self._name(tensor, len(self.tensors))

    def _name(self, tensor: torch.Tensor, tensor_id: int) -> int:
        if tensor_id == len(self.tensors):
            entry = {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
            if tensor.requires_grad:
                entry["requires_grad"] = True
            storage = self._recorder.storage_id(tensor)
            if storage >= 0:
                entry["storage"] = storage
            self.tensors.append(entry)
        setattr(tensor, _ID_ATTRIBUTE, (self._scope, tensor_id))
        return tensor_id

    # ---- forward ----

    def _before(self, module_id: int, has_parameters: bool, _module: nn.Module, args, kwargs):
        recorder = self._recorder
        if recorder.in_backward():
            self._enter_recomputation(module_id)
            return None
        found = tensors_in((args, kwargs))
        recorder.emit(["enter", module_id, [self.tensor_id(t) for t in found]])
        self._entered += 1
        self.entered(self._entered)
        occurrence = self._counts.get(module_id, 0)
        self._counts[module_id] = occurrence + 1
        self._calls.setdefault(module_id, []).append(occurrence)
        recorder.module_stack.append(module_id)
        recorder.mark_nodes()
        needing = [tensor for tensor in found if tensor.requires_grad]
        if not (needing and has_parameters and self._mark_inputs and torch.is_grad_enabled()):
            return None
        done = functools.partial(self._inputs_done, module_id, occurrence, self._number)
        marked = _Identity.apply(done, *needing)
        for tensor, before in zip(marked, needing):
            self._name(tensor, self.tensor_id(before))
        return with_grad_tensors((args, kwargs), list(marked))

    def _after(self, module_id: int, _module: nn.Module, _args, output):
        recorder = self._recorder
        if recorder.in_backward():
            self._leave_recomputation(stopped=output is None and sys.exc_info()[0] is not None)
            return
        occurrence = self._calls[module_id].pop()
        if output is None and sys.exc_info()[0] is not None:  # it is not left
            recorder.module_stack.pop()
            return
        found = tensors_in(output)
        recorder.emit(["exit", module_id, [self.tensor_id(t) for t in found]])
        recorder.module_stack.pop()
        recorder.mark_nodes()
        if torch.is_grad_enabled():
            for index, tensor in enumerate(found):
                if tensor.requires_grad:
                    where = (module_id, index, occurrence, self._number)
                    tensor.register_hook(functools.partial(self._output_gradient, where))

    # ---- backward ----

    def _enter_recomputation(self, module_id: int) -> None:
        recorder = self._recorder
        recorder.emit(["recompute_enter", module_id])
        self._recomputed.append(module_id)
        recorder.recompute_depth += 1
        recorder.module_stack.append(module_id)

    def _leave_recomputation(self, stopped: bool) -> None:
        """`stopped`: early, which leaves the modules inside without running their hooks."""
        recorder = self._recorder
        recorder.module_stack.pop()
        recorder.recompute_depth -= 1
        module_id = self._recomputed.pop()
        if not (self._recomputed and stopped):
            recorder.emit(["recompute_exit", module_id, *([True] if stopped else [])])

    def _output_gradient(self, where: tuple[int, int, int, int], _gradient) -> None:
        self._recorder.emit(["grad_ready", *where])

    def _inputs_done(self, module_id: int, occurrence: int, position: int) -> None:
        self._recorder.emit(["inputs_done", module_id, occurrence, position])

    def _parameter_gradient(self, parameter_id: int, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return  # an undefined gradient has come: of an operator that autograd does not differentiate
        record = self._recorder.record_of(parameter.grad)
        if record is not None:
            record.gradient_of = parameter_id
        note_partial_gradient(self._tree.parameters[parameter_id], parameter)
        event = ["param_grad", parameter_id, record.id if record is not None else -1]
        if parameter.grad.dtype != parameter.dtype:  # see move_to_fake_cuda
            event.append(dtype_name(parameter.grad.dtype))
        self._recorder.emit(event)

# SPDX-License-Identifier: Apache-2.0
"""The dispatch mode that writes down operators and storages in host order.

A storage is followed by a weak reference to its Python object, which torch keeps alive exactly as long as the storage
itself: the callback is the moment of the free. Ids are given in order of birth.

[Note: in place on real tensors] Two things a backward does in place on real tensors, and out of place on fake ones
(tensor subclasses). The autograd engine adds the gradients of a value that is used several times. It adds into the
first one, if it holds the only reference to it and to its storage. (A view keeps the tensor it was made from, a second
reference: a gradient that went through a reshape is not added into.) And some formulas fill zeros of their own (the
gradient of indexing, of a gather, of a top-k). A trace shows what real tensors do. A target that dies at once was held
by nobody else, so the result is written into its storage. Neither the birth of the result nor the death of the target
is an event then.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
import types
import weakref

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from shardplan.tracer import collectives, operators
from shardplan.tracer.communicators import Communicators
from shardplan.tracer.exchanges import Exchanges, functional_collectives, watched
from shardplan.tracer.fused import Kernel, View, is_generated
from shardplan.tracer.local_tensors import is_wrapper, local
from shardplan.tracer.operators import Operator, tensors_in
from shardplan.tracer.routing import CHOICES, Routing
from shardplan.tracer.user_code import LabelsOnDevice

aten = torch.ops.aten
_NONE = -1
_ZEROS = frozenset(("zeros", "new_zeros", "zeros_like"))
_FILL_ZEROS = frozenset(("index_put", "scatter", "scatter_add", "index_add"))


class StorageRecord:
    """One storage: its id, and where it was born."""

    __slots__ = ("id", "size_bytes", "phase", "died", "event", "is_output", "gradient_of", "recomputed")

    def __init__(self, storage_id: int, size_bytes: int, phase: str):
        self.id, self.size_bytes, self.phase = storage_id, size_bytes, phase
        self.died: str | None = None  # the phase it died in
        self.event: list | None = None  # its "+" event, whose role is filled in at the end
        self.is_output = False
        self.gradient_of = _NONE
        self.recomputed = False


LOSS = "(loss)"  # what --answer calls the code outside of all modules


class Answers:
    """Answers to a model that reads a tensor's value. `scalar`: the value of any tensor asked for while it is not
    None. `by_module`: by FQN what is read in that module or below it, in order, the last one ever after; of what finds
    elements, how many it finds."""

    scalar = None

    def __init__(self, by_module: dict[str, list[float]] | None = None, routing: Routing | None = None):
        self.by_module = by_module or {}
        self.routing = routing or Routing()
        self.used: set[str] = set()
        self._given: dict[str, int] = {}

    def restart(self) -> None:
        """A recording begins."""
        self._given = {}

    def next(self, fqn: str | None) -> float | None:
        """The next answer in that module (None: outside of all); None: there is none."""
        name = self._named(fqn)
        if name is None:
            return None
        self.used.add(name)
        values, position = self.by_module[name], self._given.get(name, 0)
        self._given[name] = position + 1
        return values[min(position, len(values) - 1)]

    def _named(self, fqn: str | None) -> str | None:
        if not self.by_module or fqn is None:
            return LOSS if LOSS in self.by_module else None
        while fqn and fqn not in self.by_module:
            fqn = fqn.rpartition(".")[0]
        return fqn if fqn in self.by_module else None


class Recorder(TorchDispatchMode):
    """Records while `phase` is one of "forward", "loss", "backward"; with `phase` "off" it only learns storages."""

    def __init__(
        self,
        answers: Answers | None = None,
        fqns: list[str] | None = None,
        kernels_of: str = "",
        compiles: bool = False,
        communicators: Communicators | None = None,
    ):
        """compiles: torch.compile works in front of it. Else it runs what is compiled as written."""
        super().__init__()
        self.exchanges = Exchanges(communicators or Communicators())
        self._compiles = compiles
        if compiles:  # Dynamo would compile what records, wherever it breaks a graph
            self.__torch_dispatch__ = types.MethodType(torch._disable_dynamo(Recorder.__torch_dispatch__), self)
        self._random_state = _place_of_random_state(kernels_of)
        self.answers = answers or Answers()
        self.answers.restart()
        self._fqns = fqns or []  # of the modules
        self.phase = "off"
        self.events: list[list] = []
        self.storages: list[StorageRecord] = []
        self.captured: list[tuple[torch.Size, torch.dtype, int]] = []  # tensors first seen as an argument
        self.module_stack: list[int] = []
        self.recompute_depth = 0
        self._live: dict[int, StorageRecord] = {}  # by storage address
        self._references: dict[int, weakref.ref] = {}  # by record id
        self._parameters: dict[int, int] = {}  # storage address -> parameter id
        self._operators: dict[object, Operator] = {}
        self._node_marks: tuple[list[int], list[int]] = ([], [])
        self._owners: dict[int, int] = {}  # parameter id -> module id
        self._last_module = _NONE
        self._pending: tuple | None = None  # an operator that may turn out to be in place
        self._last_zeros: StorageRecord | None = None
        self._generates_code = False  # the compiler of the graph that runs
        self._kernel: Kernel | None = None  # see fused.py
        self.labels_on_device = LabelsOnDevice(self.unrecorded)  # around the loss; it keeps what it moves

    @contextlib.contextmanager
    def unrecorded(self):
        """Inside, nothing is recorded: a tensor that is made was there before the step."""
        phase, self.phase = self.phase, "off"
        try:
            yield
        finally:
            self.phase = phase

    @contextlib.contextmanager
    def generated_code(self):
        """Around a graph for which a compiler generates code."""
        self._generates_code = True
        try:
            yield
        finally:
            self._end_kernel()
            self._generates_code = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see __init__; the wrapper would cost two frames per operator

    def ignore_compile_internals(self) -> bool:
        return self._compiles

    # ---- what is alive before the step ----

    def add_parameter(self, tensor: torch.Tensor, parameter: int, module: int) -> None:
        self._parameters[local(tensor).untyped_storage()._cdata] = parameter
        self._owners[parameter] = module

    def add_resident(self, tensor: torch.Tensor) -> int:
        """A buffer or input: it gets an id, and no events."""
        return self._birth(local(tensor).untyped_storage(), resident=True).id

    # ---- questions ----

    def storage_id(self, tensor: torch.Tensor) -> int:
        record = self.record_of(tensor)
        return record.id if record is not None else _NONE

    def record_of(self, tensor: torch.Tensor) -> StorageRecord | None:
        return self._live.get(local(tensor).untyped_storage()._cdata)

    def in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    # ---- modules ----

    def mark_nodes(self) -> None:
        """Autograd nodes made from here on belong to the module now on top."""
        sequences, modules = self._node_marks
        sequences.append(torch.autograd._get_sequence_nr())
        modules.append(self.module_stack[-1] if self.module_stack else _NONE)

    def current_module(self) -> int:
        """The innermost module; in a backward that of the forward which made the node that runs."""
        if self.module_stack:
            return self.module_stack[-1]
        if self.phase != "backward":
            return _NONE
        node = torch._C._current_autograd_node()
        if node is None:
            return self._last_module
        sequences, modules = self._node_marks
        sequence = node._sequence_nr()
        if sequence >= 2**63:  # an accumulation into a leaf: it has no place in the forward
            return self._owners.get(self._leaf(node), self._last_module)
        index = bisect.bisect_right(sequences, sequence) - 1
        self._last_module = modules[index] if index >= 0 else _NONE
        return self._last_module

    def _leaf(self, node) -> int:
        variable = getattr(node, "variable", None)
        return _NONE if variable is None else self._parameters.get(local(variable).untyped_storage()._cdata, _NONE)

    # ---- events ----

    def emit(self, event: list) -> None:
        if self._pending is not None:
            self._settle(in_place=False)
        if self.phase != "off":
            self.events.append(event)

    def take_events(self) -> list[list]:
        if self._pending is not None:
            self._settle(in_place=False)
        events, self.events = self.events, []
        return events

    # ---- storages ----

    def _birth(self, storage, resident: bool = False) -> StorageRecord:
        record = StorageRecord(len(self.storages), storage.nbytes(), "before" if resident else self.phase)
        self.storages.append(record)
        self._follow(storage, record)
        return record

    def _follow(self, storage, record: StorageRecord) -> None:
        address = storage._cdata
        self._live[address] = record
        holder = [record]
        self._references[address] = (weakref.ref(storage, lambda _, a=address, h=holder: self._death(a, h[0])), holder)

    def _death(self, address: int, record: StorageRecord) -> None:
        if self._live.get(address) is record:
            del self._live[address]
            self.exchanges.forget(address)
            self._references.pop(address, None)
        if self._pending is not None and self._pending[0] is record:
            self._settle(in_place=True)
            return
        record.died = self.phase
        if record.phase not in ("before", "off"):
            self.emit(["-", record.id])

    def _announce(self, record: StorageRecord, module: int) -> None:
        record.event = ["+", record.id, record.size_bytes, "", module]
        record.recomputed = self.recompute_depth > 0
        self.emit(record.event)

    # ---- operators ----

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented  # it calls operators on this rank's part
        if func in _WAITS:
            for tensor in tensors_in(args[0], []):
                self.waited(self.exchanges.of_tensor(tensor))
            return args[0]  # a copy on fake tensors alone
        if func.namespace == "_c10d_functional" and func._overloadpacket.__name__ == _WRAP:
            return functional_collectives().AsyncCollectiveTensor(args[0])  # a copy on fake tensors alone
        if self.phase != "off" and (code := self._code_that_communicates(func, args)) is not None:
            with self:
                return code(*args, **kwargs)
        if func is aten._local_scalar_dense.default and self.answers.scalar is not None:
            return self.answers.scalar
        out = None
        if self.answers.by_module and func in ANSWERED:
            args, out = self._with_answer(func, args)
            if func is aten._local_scalar_dense.default and out is not None:
                return out
        if out is None:
            out = collectives.done_at_once(func, args)
        routing = self.answers.routing
        if out is None and routing.is_known:
            args, out = self._by_routing(func, args, kwargs)
            if func is aten._local_scalar_dense.default and out is not None:
                return out
        elif func in CHOICES:
            routing.choosers.add(self._current_fqn())
        if out is None:
            out = collectives.of_its_own(func, func(*args, **kwargs))
            out = _on_the_host(func, out) if self._random_state == "host" else out
        if self.phase != "off" and func is not torch.ops.prim.device.default:
            self._observe(func, args, kwargs, out)
        return out

    def _current_fqn(self) -> str:
        module = self.current_module()
        return self._fqns[module] if module >= 0 else ""

    def _by_routing(self, func, args: tuple, kwargs: dict) -> tuple[tuple, object]:
        """The arguments and the result of an operator; None: nothing that it reads is known from the routing."""
        routing = self.answers.routing
        if func is aten.index.Tensor and any(_is_mask(i) and routing.values(i) is not None for i in args[1]):
            args = (args[0], self._expanded(args[1]))
        real = routing.run(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return args, real
        try:
            out = func(*args, **kwargs)
        except CANNOT_FAKE:
            if real is None:
                raise
            out = routing.made_of(real, args)
        routing.note(func, args, kwargs, out, real, self._current_fqn())
        return args, _on_the_host(func, out) if self._random_state == "host" else out

    def _with_answer(self, func, args: tuple) -> tuple:
        """The arguments and the result of an operator that depends on values, by the user's answer for them; None:
        there is none."""
        if func is aten.index.Tensor:
            return (args[0], self._expanded(args[1])), None
        module = self.current_module()
        answer = self.answers.next(self._fqns[module] if module >= 0 else None)
        if answer is None:
            return args, None
        if func is aten._local_scalar_dense.default:
            return args, _as_scalar(answer, args[0].dtype)
        if func is aten.nonzero.default:
            return args, args[0].new_empty((int(answer), args[0].dim()), dtype=torch.long)
        return args, args[0].new_empty((int(answer),))

    def _expanded(self, indices: list) -> list:
        """Masks among the indices become what they find, as they do on a device."""
        result = []
        for index in indices:
            if _is_mask(index):
                result += self.__torch_dispatch__(aten.nonzero.default, (), (index,)).unbind(1)
            else:
                result.append(index)
        return result

    def _observe(self, func, args: tuple, kwargs: dict, out) -> None:
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = operators.describe(func)
        if self._pending is not None:  # its target would be gone by now
            self._settle(in_place=False)
        allocated = _state_first(func, out) if self._random_state == "device" else out
        outputs = [t for t in tensors_in(allocated, []) if t.device.type == "cuda"]
        fresh = []
        for tensor in outputs:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address in self._live or address in self._parameters or storage.nbytes() == 0:
                continue
            if any(argument.untyped_storage()._cdata == address for argument in tensors_in((args, kwargs), [])):
                self._known(tensor)  # a view of something made before the step
            else:
                fresh.append((tensor, self._birth(storage)))
        if not fresh and not operator.mutable:
            return  # a view
        module = self.current_module()
        if not self._generates_code or not is_generated(func, operator):
            self._end_kernel()
        elif self._kernel is None:
            self._kernel = Kernel(len(self.events))
        if self._in_place_on_real_tensors(operator, func, args, fresh):
            self._hold(operator, args, fresh[0], module)
            return
        self._last_zeros = fresh[0][1] if operator.base in _ZEROS and fresh else None
        for _, record in fresh:
            self._announce(record, module)
        if not operator.allocate_only:
            self._operator_event(func, operator, args, kwargs, out, outputs, module)

    def _operator_event(self, func, operator: Operator, args, kwargs, out, outputs: list, module: int) -> None:
        written = operators.written_arguments(operator, args, kwargs) if operator.mutable else outputs
        reads, writes, parameters = [], [], []
        inputs, views, seen = [], [], set()
        for tensor, count in operators.read_tensors(operator, args, kwargs, outputs):
            if tensor.device.type != "cuda":
                continue
            inputs.append(tensor)
            address = tensor.untyped_storage()._cdata
            parameter = self._parameters.get(address, _NONE)
            storage = self._known(tensor).id if parameter == _NONE else _NONE
            place = (tensor.storage_offset(), tensor.shape, tensor.stride())
            if (address, *place) in seen:
                continue
            seen.add((address, *place))
            views.append(View((storage, parameter), place, count, tensor.untyped_storage().nbytes()))
            if parameter != _NONE:
                _append_new(parameters, parameter)
            else:
                _append_new(reads, storage)
        made = []  # (storage, bytes)
        for tensor in written:
            if tensor.device.type != "cuda" or tensor.untyped_storage().nbytes() == 0:
                continue
            in_parameter = tensor.untyped_storage()._cdata in self._parameters
            made.append((_NONE if in_parameter else self._known(tensor).id, operators.touched_bytes(tensor)))
            if not in_parameter:
                _append_new(writes, made[-1][0])
        if not inputs and not writes:
            return  # nothing on the device
        dtype = operators.dtype_of(operator, args, inputs, outputs or written)
        count = operators.flops(operator, args, kwargs, out)
        by_tensors = sum(view.bytes_read for view in views), sum(size for _, size in made)
        bytes_read, bytes_written = operators.bytes_moved(operator, args, *by_tensors)
        event = ["op", operator.name, module, dtype, count, bytes_read, bytes_written, -1, reads, writes, parameters]
        if operator.kind:
            self._collective_event(func, operator, event, args, kwargs, out)
        elif self._kernel is not None:
            self._kernel.add(event, views, made)
        else:
            self.emit(event)

    # ---- collectives ----

    def watching_collectives(self) -> contextlib.AbstractContextManager:
        return watched(self.exchanges, self.waited)

    def _code_that_communicates(self, func, args: tuple):
        if func.namespace in _OF_TORCH:
            return None
        return (collectives.composed if collectives.is_collective(func) else collectives.hidden)(func, args)

    def waited(self, issued: list) -> None:
        """Collectives are waited for."""
        if self.phase == "off" or not issued:
            return
        if self._pending is not None:
            self._settle(in_place=False)
        self._end_kernel()
        for one in issued:
            if (event := self.exchanges.wait(one, self.events)) is not None:
                self.emit(event)

    def _collective_event(self, func, operator: Operator, event: list, args: tuple, kwargs: dict, out) -> None:
        if operator.base == collectives.BATCH:
            self._events_of_batch(func, event, args, kwargs, out)
            return
        details = self.exchanges.details(func, operator.kind, args, kwargs, out)
        self.emit(event if details is None else [*event, details])
        if details is not None:
            self.exchanges.issued(func, self.events[-1], args, kwargs, out)

    def _events_of_batch(self, func, event: list, args: tuple, kwargs: dict, out) -> None:
        """One for each transfer, as torch.distributed has them."""
        for (tensor, details), result in zip(self.exchanges.parts_of_batch(func, args, kwargs), out):
            moved, storage = operators.touched_bytes(tensor), [self._known(tensor).id]
            is_sent = details is None or details["kind"] == "send"
            dtype = operators.dtype_name(tensor.dtype)
            touched = [moved, 0, -1, storage, []] if is_sent else [0, moved, -1, [], storage]
            self.emit([*event[:3], dtype, 0, *touched, [], *([details] if details is not None else [])])
            if details is not None:
                self.exchanges.issued(func, self.events[-1], args, kwargs, result)

    def _end_kernel(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            self.events[kernel.begin :] = kernel.events(self.events[kernel.begin :])

    def _known(self, tensor: torch.Tensor) -> StorageRecord:
        """The storage of an argument; one never seen was made before the step, so it is an input."""
        storage = tensor.untyped_storage()
        record = self._live.get(storage._cdata)
        if record is None:
            record = self._birth(storage, resident=True)
            self.captured.append((tensor.shape, tensor.dtype, record.id))
        return record

    # ---- see [Note: in place on real tensors] ----

    def _in_place_on_real_tensors(self, operator: Operator, func, args: tuple, fresh: list) -> bool:
        if self.phase != "backward" or self.recompute_depth or len(fresh) != 1 or not self.in_backward():
            return False
        target = args[0] if args else None
        if not isinstance(target, torch.Tensor) or not operators.is_dense(target):
            return False
        record, result = self.record_of(target), fresh[0][0]
        if record is None or record.phase != "backward" or target.dtype != result.dtype or target.shape != result.shape:
            return False
        if func is aten.add.Tensor:
            addend = args[1]
            if not isinstance(addend, torch.Tensor) or addend.shape != target.shape or target._is_view():
                return False
        elif operator.base not in _FILL_ZEROS or self._last_zeros is not record:
            return False
        # The engine and its formulas call straight from a thread of theirs; code in Python has frames below this one's
        # caller.
        return sys._getframe(2).f_back is None

    def _hold(self, operator: Operator, args: tuple, fresh: tuple, module: int) -> None:
        target = self.record_of(args[0])
        reads: list[int] = []
        bytes_read = 0
        tensors = tensors_in(args, [])
        for tensor in tensors:
            _append_new(reads, self._known(tensor).id)
            bytes_read += operators.touched_bytes(tensor)
        result, record = fresh
        dtype = operators.arithmetic_dtype(tensors, [result])
        rest = [module, dtype, 0, bytes_read, operators.dense_bytes(result), -1, reads]
        self._pending = (target, record, operator.name, rest, result.untyped_storage()._cdata)

    def _settle(self, in_place: bool) -> None:
        target, record, name, rest, address = self._pending
        self._pending = None
        if in_place:
            # The result lives on under the target's id; its own, the last one given, is free again.
            assert self.storages.pop() is record
            self._live[address] = target
            self._references[address][1][0] = target
            self.events.append(["op", name + "_", *rest, [target.id], []])
            return
        self._announce(record, rest[0])
        self.events.append(["op", name, *rest, [record.id], []])


_OF_TORCH = frozenset(("aten", "prim", "prims"))
CANNOT_FAKE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_WRAP = "_wrap_tensor_autograd"  # what a functional collective's result goes through; older releases have none
_WAITS = frozenset((torch.ops._c10d_functional.wait_tensor.default, torch.ops._c10d_functional.wait_tensors.default))
ANSWERED = frozenset(
    (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.index.Tensor)
)


def _is_mask(index) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _as_scalar(value: float, dtype: torch.dtype):
    if dtype == torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)


def _place_of_random_state(kernels_of: str) -> str:
    """The random state of efficient attention (attention.cu). Real CUDA kernels up to 2.11 leave it on the host outside
    of a graph's capture; 2.15 allocates it before the output. Fake ones have it on the device, behind."""
    if kernels_of == "fake":
        return "fake"
    release = tuple(int(number) for number in (kernels_of or torch.__version__).split(".")[:2])
    return "device" if release >= (2, 15) else "host"


def _on_the_host(func, out):
    if func is not aten._scaled_dot_product_efficient_attention.default:
        return out
    attended, log_sum_exp, *state = out
    return attended, log_sum_exp, *(torch.empty_like(tensor, device="cpu") for tensor in state)


def _state_first(func, out):
    """The outputs in the order in which a real CUDA kernel allocates them."""
    if func is not aten._scaled_dot_product_efficient_attention.default:
        return out
    attended, log_sum_exp, *state = out
    return *state, attended, log_sum_exp


def _append_new(values: list[int], value: int) -> None:
    if value not in values:
        values.append(value)

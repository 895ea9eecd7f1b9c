# SPDX-License-Identifier: Apache-2.0
"""Records what FullyShardedDataParallel issues: hooks on torch.distributed.fsdp's runtime and flat parameters.

The lines are those of the recordings in tests/conformance/fsdp1 that are compared: no waits between streams but
wait_unshard, no views.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    _flat_param,
    _limiter_utils,
    _runtime_utils,
    _unshard_param_utils,
    fully_sharded_data_parallel,
)

from shardplan_conformance import installed_fsdp
from shardplan_conformance.events import EventLog, size_bytes
from shardplan_conformance.patches import Patches


class Fsdp1Events(EventLog):
    """Use `patches()` around the program."""

    def __init__(self, names: dict[torch.nn.Module, str]):
        super().__init__(names)
        self._units: list[str] = []  # whose unshard, wait or reduction runs, innermost last
        self._prefetching = False
        self._unshard_stream = None

    def unit(self, handle, module=None) -> str:
        """A unit without parameters has no handle: then `module` is the wrapper or what is in it."""
        inner = handle._fully_sharded_module if handle is not None else getattr(module, "_fsdp_wrapped_module", module)
        return self.names[inner]

    def patches(self) -> Patches:
        hooks = Patches()
        runtime, handle = _runtime_utils, _flat_param.FlatParamHandle
        for place in (runtime, fully_sharded_data_parallel):
            hooks.before(place, "_pre_forward", lambda s, h, _f, m, *_a: self._forward_hook("pre_forward", s, h, m))
            hooks.before(place, "_post_forward", lambda s, h, _f, m, *_a: self._forward_hook("post_forward", s, h, m))
            hooks.wrap(place, "_pre_forward_unshard", self._waiting)
        hooks.before(runtime, "_pre_backward_hook", self._pre_backward)
        hooks.wrap(runtime, "_pre_backward_hook", lambda f: self._waiting(f, lambda s, m, h, *_a: h))
        hooks.wrap(runtime, "_post_backward_hook", self._post_backward)
        hooks.before(
            runtime,
            "_post_backward_reshard_only_hook",
            lambda s, h, *_a: self.add("post_backward_reshard_only", self.unit(h)),
        )
        hooks.before(runtime, "_post_backward_final_callback", lambda s, m: self.add("finalize", ""))
        for place in (runtime, _unshard_param_utils):
            hooks.wrap(place, "_unshard", self._unshard)
            hooks.wrap(place, "_reshard", self._reshard)
        hooks.wrap(_unshard_param_utils, "_unshard_grads", lambda f: self._waiting(f, lambda h: h))
        hooks.wrap(runtime, "_prefetch_handle", self._prefetch)
        hooks.before(runtime, "_accumulate_sharded_grad", self._accumulate_sharded)
        hooks.before(runtime, "_offload_grad", self._offload)
        hooks.wrap(runtime, "_reduce_grad", lambda f: self._waiting(f, lambda s, h: h))
        hooks.wrap(runtime, "_reduce_grad_no_shard", lambda f: self._waiting(f, lambda s, h: h))
        hooks.before(handle, "unshard", self._unshard_handle)
        hooks.before(handle, "_all_gather_flat_param", self._all_gather)
        hooks.wrap(handle, "_use_low_precision_shard", self._low_precision_shard)
        hooks.before(handle, "_free_low_precision_sharded_param", self._free_low_precision_shard)
        hooks.wrap(_limiter_utils._FreeEventQueue, "dequeue_if_needed", self._rate_limit)
        for name in installed_fsdp.existing(dist, installed_fsdp.REDUCE_SCATTERS_OF_FSDP1):
            hooks.before(dist, name, lambda out, inp, *a, **k: self._reduce("reduce_scatter", inp, k))
        hooks.before(dist, "all_reduce", lambda tensor, *a, **k: self._reduce("all_reduce", tensor, k))
        # On the CPU parameters are gathered by `all_gather`; this is the execution order's check, or a gradient.
        for name in installed_fsdp.existing(dist, installed_fsdp.ALL_GATHERS_OF_FSDP1):
            hooks.before(dist, name, self._all_gather_tensor)
        hooks.before(torch.cpu.Stream, "wait_stream", self._wait_stream)
        hooks.before(torch.cpu.Stream, "synchronize", lambda stream: self.add("stream_synchronize", ""))
        return hooks

    # ---- hooks of the runtime ----

    def _forward_hook(self, op: str, state, handle, module) -> None:
        self._unshard_stream = state._unshard_stream
        if handle is not None:
            again = handle._training_state == _flat_param.HandleTrainingState.BACKWARD_PRE
            self.add(op, self.unit(handle), skipped="recompute" if again else None)
        else:
            self.add(op, self.unit(None, module), handle="none")

    def _pre_backward(self, state, module, handle, *_unused) -> None:
        if handle is None:
            self.add("pre_backward", self.unit(None, module), handle="none")
            return
        again = getattr(handle, "_ran_pre_backward_hook", False)
        self.add("pre_backward", self.unit(handle), skipped="already_ran" if again else None)

    def _waiting(self, original: Callable, handle_of: Callable = lambda s, h: h) -> Callable:
        """Inside the call, waits and reductions are of its handle's unit."""

        def replaced(*args, **kwargs):
            handle = handle_of(*args)
            if handle is None:
                return original(*args, **kwargs)
            with self._of(handle):
                return original(*args, **kwargs)

        return replaced

    @contextlib.contextmanager
    def _of(self, handle) -> Iterator[None]:
        self._units.append(self.unit(handle))
        try:
            yield
        finally:
            self._units.pop()

    def _post_backward(self, original: Callable) -> Callable:
        def replaced(state, handle, *args):
            empty = handle.flat_param.grad is None
            self.add("post_backward", self.unit(handle), skipped="grad_none" if empty else None)
            result = original(state, handle, *args)
            if not empty and not state._sync_gradients:
                self.add_tensor("accumulate", self.unit(handle), handle.flat_param.grad)
            return result

        return replaced

    def _prefetch(self, original: Callable) -> Callable:
        def replaced(*args, **kwargs):
            self._prefetching = True
            try:
                return original(*args, **kwargs)
            finally:
                self._prefetching = False

        return replaced

    def _prefetch_key(self) -> dict:
        return {"prefetch": True if self._prefetching else None}

    # ---- unshard ----

    def _unshard(self, original: Callable) -> Callable:
        def replaced(state, handle, *args, **kwargs):
            if not handle:
                return original(state, handle, *args, **kwargs)
            with self._of(handle):
                return original(state, handle, *args, **kwargs)

        return replaced

    def _rate_limit(self, original: Callable) -> Callable:
        def replaced(queue):
            length = len(queue._queue)
            event = original(queue)
            if event:
                self.add("rate_limit_wait", self._units[-1], queue=length, **self._prefetch_key())
            return event

        return replaced

    def _unshard_handle(self, handle) -> None:
        if not handle.needs_unshard():
            self.add("unshard_noop", self.unit(handle), **self._prefetch_key())

    def _all_gather(self, handle, padded) -> None:
        self.add_tensor(
            "all_gather", self.unit(handle), padded, group="shard", ranks=handle.world_size, **self._prefetch_key()
        )

    def _all_gather_tensor(self, gathered, _own, group=None, **_options) -> None:
        op, unit = (
            ("all_gather", self._units[-1]) if self._units and gathered.is_floating_point() else ("order_check", "")
        )
        self.add_tensor(op, unit, gathered, group="shard", ranks=dist.get_world_size(group))

    def steps_in_backward(self, root: torch.nn.Module) -> None:
        """Notes every step of an optimizer of a parameter's own."""
        for state in fully_sharded_data_parallel.FullyShardedDataParallel.fsdp_modules(root):
            handle = state._handle
            if not handle:
                continue
            unit = self.unit(handle)
            for fqn, parameter in zip(handle.flat_param._fqns, handle.flat_param._params or ()):
                name = f"{unit}.{fqn}" if unit else fqn
                for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
                    optimizer.register_step_pre_hook(
                        lambda *_a, unit=unit, name=name: self.add("optim_in_backward", unit, param=name)
                    )

    def _low_precision_shard(self, original: Callable) -> Callable:
        def replaced(handle):
            original(handle)
            self.add_tensor("mp_shard_alloc", self.unit(handle), handle.flat_param._mp_shard)

        return replaced

    def _free_low_precision_shard(self, handle) -> None:
        shard = handle.flat_param._mp_shard
        gone = shard.untyped_storage().size() == 0
        self.add_tensor("mp_shard_free", self.unit(handle), shard, free=False if gone else None)

    def _wait_stream(self, _waiter, on) -> None:
        if self._units and on is self._unshard_stream:
            self.add("wait_unshard", self._units[-1])

    # ---- reshard and reduce ----

    def _reshard(self, original: Callable) -> Callable:
        def replaced(state, handle, free_unsharded_flat_param, *args):
            at = len(self.lines)
            self.add("reshard", self.unit(handle))
            before = _unsharded_bytes(handle)
            original(state, handle, free_unsharded_flat_param, *args)
            freed = before - _unsharded_bytes(handle)
            self.lines[at] += f" free=true freed_bytes={freed}" if freed > 0 else " free=false"

        return replaced

    def _accumulate_sharded(self, _state, handle, _grad) -> None:
        if hasattr(handle.flat_param, "_saved_grad_shard"):
            self.add_tensor("accumulate_sharded", self.unit(handle), handle.flat_param._saved_grad_shard)

    def _offload(self, _state, handle, grad) -> None:
        if handle._offload_params:
            self.add_tensor("offload_grad", self.unit(handle), grad)

    def _reduce(self, op: str, tensor, options: dict) -> None:
        if not self._units:
            return
        group = options.get("group")
        ranks = dist.get_world_size(group)
        self.add_tensor(
            op, self._units[-1], tensor, group="shard" if op == "reduce_scatter" else "replicate", ranks=ranks
        )


def _unsharded_bytes(handle) -> int:
    names = ("_full_param_padded", "_full_prec_full_param_padded")
    tensors = [getattr(handle.flat_param, name, None) for name in names]
    return sum(t.untyped_storage().size() for t in tensors if t is not None)

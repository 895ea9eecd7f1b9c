"""Records what fully_shard issues: hooks on the classes of torch.distributed.fsdp._fully_shard.

The lines are those of the recordings in tests/conformance/fsdp2. A unit is named by the FQNs of its modules.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard import _fsdp_state as states

from shardplan.conformance.events import EventLog, dtype_name, size_bytes
from shardplan.conformance.patches import Patches


class Fsdp2Events(EventLog):
    """Use `patches()` around the program."""

    def __init__(self, names: dict[torch.nn.Module, str]):
        super().__init__(names)
        self._active: list = []  # parameter groups whose unshard or post_backward runs, innermost last
        self._final = False  # inside the root's final callback
        self._reduced_by: dict[object, str] = {}  # by communication context: the unit whose reduce-scatter input it keeps
        self._reduced = False  # in the post_backward that runs

    def unit(self, group) -> str:
        return ",".join(self.names[module] for module in group.modules)

    def patches(self) -> Patches:
        hooks = Patches()
        group = groups.FSDPParamGroup
        hooks.before(group, "pre_forward", lambda g, *_a, **_k: self.add("pre_forward", self.unit(g)))
        hooks.before(group, "post_forward", lambda g, *_a, **_k: self.add("post_forward", self.unit(g)))
        hooks.before(group, "pre_backward", self._pre_backward)
        hooks.before(group, "wait_for_unshard", self._wait_for_unshard)
        hooks.before(group, "finalize_backward", self._finalize_group)
        hooks.before(group, "_to_sharded", lambda g: self._reshard(g, g.is_sharded, "sharded"))
        hooks.before(
            group, "_to_sharded_post_forward", lambda g: self._reshard(g, g.is_sharded_post_forward, "post_forward")
        )
        hooks.wrap(group, "unshard", self._within)
        hooks.before(groups, "foreach_reduce", self._foreach_reduce)
        hooks.wrap(group, "post_backward", self._post_backward)
        for name in ("DefaultAllGather", "ProcessGroupAllocAllGather"):
            hooks.before(getattr(collectives, name), "__call__", self._all_gather)
        for name in ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter"):
            hooks.before(getattr(collectives, name), "__call__", self._reduce_scatter)
        hooks.before(groups.FSDPCommContext, "__setattr__", self._set_communication_state)
        hooks.before(dist, "all_reduce", self._all_reduce)
        hooks.wrap(states.FSDPState, "_root_post_backward_final_callback", self._final_callback)
        return hooks

    def steps_in_backward(self, model: torch.nn.Module) -> None:
        """Notes where the sharded parameters' hooks step them. Call before these are registered."""
        names = {p: name.replace("_checkpoint_wrapped_module.", "") for name, p in model.named_parameters()}
        units = [m._get_fsdp_state()._fsdp_param_group for m in self.names if isinstance(m, FSDPModule)]
        for group in {group: None for group in units if group is not None}:
            for parameter in (p.sharded_param for p in group.fsdp_params):
                unit, name = self.unit(group), names[parameter]
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        lambda _p, unit=unit, name=name: self.add("optim_in_backward", unit, param=name)
                    )

    def _pre_backward(self, group, *_args, **_kwargs) -> None:
        again = group._training_state == groups.TrainingState.PRE_BACKWARD
        self.add("pre_backward", self.unit(group), noop=1 if again else None)

    def _wait_for_unshard(self, group) -> None:
        if group._all_gather_result:
            self.add("wait_all_gather", self.unit(group))

    def _finalize_group(self, group) -> None:
        pending = group._all_gather_result
        if pending is not None and pending.param_all_gather_input_numels:  # one rank alone gathers nothing
            self.add("discard_all_gather", self.unit(group))

    def _reshard(self, group, already: bool, to: str) -> None:
        if already:
            return
        freed = sum(size_bytes(tensor) for p in group.fsdp_params for tensor in p.all_gather_outputs)
        self.add("reshard", self.unit(group), to=to, bytes=freed)

    def _within(self, original):
        def replaced(group, *args, **kwargs):
            self._active.append(group)
            try:
                return original(group, *args, **kwargs)
            finally:
                self._active.pop()

        return replaced

    def _post_backward(self, original):
        inside = self._within(original)

        def replaced(group, *args, **kwargs):
            self.add("post_backward", self.unit(group), via="final" if self._final else "autograd")
            self._reduced = False
            result = inside(group, *args, **kwargs)
            self._accumulated(group)
            return result

        return replaced

    def _accumulated(self, group) -> None:
        """Gradients that stay behind because they are not, or not wholly, reduced."""
        unit = self.unit(group)
        if not group.reduce_grads:
            held = [tensor for p in group.fsdp_params if (tensor := _unsharded_gradient(p)) is not None]
            if held:
                total = sum(size_bytes(tensor) for tensor in held)
                self.add("accumulate", unit, bytes=total, dtype=dtype_name(held[0].dtype), kind="unsharded")
        elif self._reduced and group._partial_reduce_output is not None:
            self.add_tensor("accumulate", unit, group._partial_reduce_output, kind="partial")

    def _all_gather(self, _comm, output_tensor, input_tensor, group, async_op=False) -> None:
        self.add_tensor("all_gather", self.unit(self._active[-1]), output_tensor, group="shard", ranks=group.size())

    def _reduce_scatter(self, _comm, output_tensor, input_tensor, group, op, async_op=False) -> None:
        self.add_tensor("reduce_scatter", self.unit(self._active[-1]), input_tensor, group="shard", ranks=group.size())

    def _foreach_reduce(self, *_args, **_kwargs) -> None:
        self._reduced = True

    def _all_reduce(self, tensor, op=None, group=None, async_op=False) -> None:
        if self._active:
            ranks = group.size() if group is not None else dist.get_world_size()
            self.add_tensor("all_reduce", self.unit(self._active[-1]), tensor, group="replicate", ranks=ranks)

    def _set_communication_state(self, context, name: str, value) -> None:
        if name != "reduce_scatter_state":
            return
        if value is not None:
            self._reduced_by[context] = self.unit(self._active[-1])
        elif getattr(context, name, None) is not None:
            self.add("wait_reduce_scatter", self._reduced_by[context])

    def _final_callback(self, original):
        def replaced(state, *args, **kwargs):
            self.add("finalize", "")
            self._final = True
            try:
                return original(state, *args, **kwargs)
            finally:
                self._final = False

        return replaced


def _unsharded_gradient(parameter) -> torch.Tensor | None:
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    unsharded = getattr(parameter, "_unsharded_param", None)
    return unsharded.grad if unsharded is not None else None

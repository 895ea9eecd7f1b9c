# SPDX-License-Identifier: Apache-2.0
"""Records what fully_shard issues: hooks on the classes of torch.distributed.fsdp._fully_shard.

The lines are those of the recordings in tests/conformance/fsdp2. A unit is named by the FQNs of its modules, each of
its parameter groups by an index behind them where it has several.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard import _fsdp_state as states

from shardplan_conformance import installed_fsdp
from shardplan_conformance.events import EventLog, dtype_name, size_bytes
from shardplan_conformance.patches import Patches


class Fsdp2Events(EventLog):
    """Use `patches()` around the program."""

    def __init__(self, names: dict[torch.nn.Module, str]):
        super().__init__(names)
        self._active: list = []  # parameter groups whose unshard or post_backward runs, innermost last
        # Who calls post_backward: also the root's final callback, and a backward that is finalized by hand.
        self._via = "autograd"
        # By communication context: the unit whose reduce-scatter input it keeps.
        self._reduced_by: dict[object, str] = {}
        self._reduced = False  # in the post_backward that runs

    def unit(self, group) -> str:
        suffix = installed_fsdp.group_suffix(group)
        name = ",".join(self.names[module] for module in group.modules)
        return (name or "(root)") + suffix if suffix else name

    def patches(self) -> Patches:
        hooks = Patches()
        group = groups.FSDPParamGroup
        hooks.before(group, "pre_forward", lambda g, *_a, **_k: self.add("pre_forward", self.unit(g)))
        hooks.before(group, "post_forward", lambda g, *_a, **_k: self.add("post_forward", self.unit(g)))
        hooks.before(group, "pre_backward", self._pre_backward)
        hooks.before(group, "wait_for_unshard", self._wait_for_unshard)
        hooks.before(group, "finalize_backward", self._discard)
        hooks.before(group, "_to_sharded", lambda g: self._reshard(g, g.is_sharded, "sharded"))
        hooks.before(
            group, "_to_sharded_post_forward", lambda g: self._reshard(g, g.is_sharded_post_forward, "post_forward")
        )
        hooks.wrap(group, "unshard", self._within)
        hooks.before(groups, "foreach_reduce", self._foreach_reduce)
        hooks.wrap(group, "post_backward", self._post_backward)
        for name in installed_fsdp.existing(collectives, installed_fsdp.ALL_GATHERS):
            hooks.before(getattr(collectives, name), "__call__", self._all_gather)
        for name in installed_fsdp.existing(collectives, installed_fsdp.REDUCE_SCATTERS):
            hooks.before(getattr(collectives, name), "__call__", self._reduce_scatter)
        hooks.wrap(groups.FSDPCommContext, "__setattr__", self._set_communication_state)
        hooks.before(dist, "all_reduce", self._all_reduce)
        hooks.wrap(states.FSDPState, "_root_post_backward_final_callback", self._final_callback)
        if installed_fsdp.FINALIZES_ON_CALL:
            hooks.wrap(states.FSDPState, "finalize_backward", self._manual_finalization)
            hooks.before(states.FSDPState, "wait_for_gradient_reduction", self._wait_for_gradients)
        if installed_fsdp.RECOVERS:
            hooks.before(states.FSDPState, "_reset_iter_state", lambda _state: self.add("reset_iter_state", ""))
            hooks.before(group, "_reset_iter_state", lambda g: self._discard(g, by="reset"))
        return hooks

    def steps_in_backward(self, model: torch.nn.Module) -> None:
        """Notes where the sharded parameters' hooks step them. Call before these are registered."""
        names = {p: name.replace("_checkpoint_wrapped_module.", "") for name, p in model.named_parameters()}
        units = [m for m in self.names if isinstance(m, FSDPModule)]
        for group in dict.fromkeys(group for unit in units for group in installed_fsdp.parameter_groups(unit)):
            for parameter in (p.sharded_param for p in group.fsdp_params):
                name = names[parameter]
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        lambda _p, group=group, name=name: self.add("optim_in_backward", self.unit(group), param=name)
                    )

    def _pre_backward(self, group, *_args, **_kwargs) -> None:
        again = group._training_state == groups.TrainingState.PRE_BACKWARD
        self.add("pre_backward", self.unit(group), noop=1 if again else None)

    def _wait_for_unshard(self, group) -> None:
        if group._all_gather_result:
            self.add("wait_all_gather", self.unit(group))

    def _discard(self, group, by: str | None = None) -> None:
        pending = group._all_gather_result
        if pending is not None and pending.param_all_gather_input_numels:  # one rank alone gathers nothing
            self.add("discard_all_gather", self.unit(group), by=by)

    def _reshard(self, group, already: bool, to: str) -> None:
        if already:
            return
        size = {True: 0, False: 0}  # by whether it stays allocated
        for p in group.fsdp_params:
            size[getattr(p, "keep_unsharded_storage", False)] += sum(
                size_bytes(tensor) for tensor in p.all_gather_outputs
            )
        self.add("reshard", self.unit(group), to=to, bytes=size[False], kept=size[True] or None)

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
            # A forward ran a part of the group only; releases that complete groups then wait for the reduction at once.
            partly = (
                installed_fsdp.COMPLETES_GROUPS
                and len(group.modules) > 1
                and group._training_state == groups.TrainingState.FORWARD
            )
            self.add("post_backward", self.unit(group), via=self._via)
            self._reduced = False
            result = inside(group, *args, **kwargs)
            if partly and self._reduced:
                self.add("wait_post_reduce", self.unit(group))
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
        by = self._active[-1]
        separate = getattr(by.mesh_info, "reduce_scatter_process_group", None) is not None
        self.add_tensor(
            "reduce_scatter", self.unit(by), input_tensor, group="shard", ranks=group.size(),
            pg="separate" if separate else None,
        )

    def _foreach_reduce(self, *_args, **_kwargs) -> None:
        self._reduced = True

    def _all_reduce(self, tensor, op=None, group=None, async_op=False) -> None:
        if self._active:
            ranks = group.size() if group is not None else dist.get_world_size()
            self.add_tensor("all_reduce", self.unit(self._active[-1]), tensor, group="replicate", ranks=ranks)

    def _set_communication_state(self, original):
        def replaced(context, name: str, value) -> None:
            if name == "reduce_scatter_states":
                reducing, left = lambda: self.unit(self._active[-1]), functools.partial(self.add, "wait_reduce_scatter")
                value = installed_fsdp.InFlight(value, reducing, left)
            elif name == "reduce_scatter_state" and value is not None:
                self._reduced_by[context] = self.unit(self._active[-1])
            elif name == "reduce_scatter_state" and getattr(context, name, None) is not None:
                self.add("wait_reduce_scatter", self._reduced_by[context])
            original(context, name, value)

        return replaced

    def _final_callback(self, original):
        def replaced(state, *args, **kwargs):
            manual = getattr(state._state_ctx, "manual_backward_finalization_active", None)
            self.add("finalize", "", manual=1 if manual else None)
            return self._called_by("final", original, state, *args, **kwargs)

        return replaced

    def _manual_finalization(self, original):
        def replaced(state, *args, **kwargs):
            self.add("finalize_backward", "")
            return self._called_by("manual", original, state, *args, **kwargs)

        return replaced

    def _called_by(self, via: str, original, *args, **kwargs):
        self._via = via
        try:
            return original(*args, **kwargs)
        finally:
            self._via = "autograd"

    def _wait_for_gradients(self, _state, *_args) -> None:
        if self._via != "final":
            self.add("wait_gradient_reduction", "")


def _unsharded_gradient(parameter) -> torch.Tensor | None:
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    unsharded = getattr(parameter, "_unsharded_param", None)
    return unsharded.grad if unsharded is not None else None

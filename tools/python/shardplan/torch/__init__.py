# SPDX-License-Identifier: Apache-2.0
"""Trains a PyTorch model by replaying a shardplan plan.

    import shardplan.torch as sp

    model = sp.apply(model, "plan.json", mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in data:
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

from shardplan.installing import why_no_torch

if problem := why_no_torch():  # before anything asks for it
    raise ImportError(f"shardplan.torch: {problem}")

from ._api.apply import apply, remove
from ._api.auto import auto
from ._calls.calls import (
    GradientReduction,
    abandon_step,
    finalize_backward,
    no_sync,
    reshard,
    set_all_reduce_hook,
    set_custom_all_gather,
    set_custom_reduce_scatter,
    set_is_last_backward,
    set_requires_gradient_sync,
    unshard,
)
from ._calls.clip import clip_grad_norm_
from ._calls.summon import summon_full_params
from ._checkpoints.flat_state_dict import state_dict_type
from ._checkpoints.optim_state import (
    OptimStateKeyType,
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from ._checkpoints.save import Saving, load, save
from ._job.arguments import PlanError
from ._job.stop import stop_on_signal
from ._model.forwards import register_forward_method
from ._model.units import unit
from ._muon.muon import Muon
from ._plans.documents import load_plan
from ._replay.memory import Forecast, forecast
from ._replay.profile import Profile, count_cpu_memory, profile

__all__ = [
    "Forecast",
    "GradientReduction",
    "Muon",
    "OptimStateKeyType",
    "PlanError",
    "Profile",
    "Saving",
    "abandon_step",
    "apply",
    "auto",
    "clip_grad_norm_",
    "count_cpu_memory",
    "finalize_backward",
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "forecast",
    "load",
    "load_plan",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "profile",
    "register_forward_method",
    "rekey_optim_state_dict",
    "remove",
    "reshard",
    "save",
    "scatter_full_optim_state_dict",
    "set_all_reduce_hook",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_is_last_backward",
    "set_requires_gradient_sync",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "state_dict_type",
    "stop_on_signal",
    "summon_full_params",
    "unit",
    "unshard",
]

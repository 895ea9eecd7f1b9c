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

from ._apply import apply, load_plan
from ._calls import reshard, set_all_reduce_hook, set_custom_all_gather, set_custom_reduce_scatter, unshard
from ._clip import clip_grad_norm_
from ._errors import PlanError
from ._flat_state_dict import state_dict_type
from ._forward_method import register_forward_method
from ._summon import summon_full_params

__all__ = [
    "PlanError",
    "apply",
    "clip_grad_norm_",
    "load_plan",
    "register_forward_method",
    "reshard",
    "set_all_reduce_hook",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "state_dict_type",
    "summon_full_params",
    "unshard",
]

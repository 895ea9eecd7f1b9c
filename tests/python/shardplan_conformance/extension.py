# SPDX-License-Identifier: Apache-2.0
"""A parameter with an all-gather extension, as a strategy's rules describe one: other tensors are gathered in place of
its shard."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardplan_conformance.units import matches_any

_KEEP = {
    torch.ops.aten.detach.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.narrow.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}


def _numel(tensor: dict, numel: int) -> int:
    return tensor["numel"] if "numel" in tensor else -(-numel // tensor.get("per_elements", 1))


def _made(tensors: list[dict], numel: int) -> list[torch.Tensor]:
    return [torch.zeros(_numel(tensor, numel), dtype=getattr(torch, tensor["dtype"])) for tensor in tensors]


class Extended(torch.Tensor):
    """Wraps the data; what FSDP cuts from it is extended, too."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, rule: dict):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, rule: dict):
        self.data_, self.rule = data, rule

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        rules = [arg.rule for arg in args if isinstance(arg, cls)]
        plain = [tree_map(lambda x: x.data_ if isinstance(x, cls) else x, part) for part in (args, kwargs or {})]
        result = func(*plain[0], **plain[1])
        if func._schema.is_mutable:
            return args[0]
        if func not in _KEEP:
            return result
        return tree_map(lambda x: cls(x, rules[0]) if isinstance(x, torch.Tensor) else x, result)

    def fsdp_pre_all_gather(self, mesh):
        return tuple(_made(self.rule["gathered"], self.data_.numel())), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype: torch.dtype, *, out: torch.Tensor | None = None):
        """The parameter is the first floating tensor that is as large as it."""
        if out is not None:
            return None
        numel = self.unsharded_numel
        made = _made(self.rule.get("unsharded", []), numel)
        whole = next(t for t in [*outputs, *made] if t.dtype.is_floating_point and t.numel() >= numel)
        return whole.view(-1), tuple(made)

    @property
    def unsharded_numel(self) -> int:
        return self.rule["parameter_numel"]


def extend_parameters(named: dict[str, nn.Parameter], rules: list[dict]) -> None:
    """Puts extended data into the parameters that a rule names; the first one that does counts."""
    for name, parameter in named.items():
        rule = next((rule for rule in rules if matches_any(rule["parameters"], name)), None)
        if rule is not None and not isinstance(parameter.data, Extended):
            extended = Extended(parameter.data.clone(), {**rule, "parameter_numel": parameter.numel()})
            torch.utils.swap_tensors(parameter, nn.Parameter(extended, requires_grad=parameter.requires_grad))

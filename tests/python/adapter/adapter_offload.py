# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_adapter_offload.py: activations in host memory, next to real FSDP2."""

from __future__ import annotations

import gc
import warnings

import torch
import torch.nn as nn
from adapter_features import parameters_of
from equivalence import largest_difference, local, make_mesh, make_model, with_fsdp2, with_plan
from equivalence_models import inputs_of, loss_of
from equivalence_settings import case

import shardplan.torch as sp
from shardplan.torch._parameters.offload import Offloader

OFFLOADING = case("offloading", activation_offload={"modules": ["layers.*"], "min_bytes": 0})


def _offloader() -> Offloader:
    (found,) = [other for other in gc.get_objects() if isinstance(other, Offloader)]
    return found


def _gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def goes_and_comes_back(plan: str, mesh) -> str:
    model = with_plan(OFFLOADING, make_model(OFFLOADING), mesh, plan)
    offloader = _offloader()
    (x,), _ = inputs_of("mlp", 0)
    loss = loss_of(model(x))
    storages = [reference() for of_unit in offloader.taken.values() for reference in of_unit]
    if len(storages) < 9 or any(found is None or found.storage is not None or found.host is None for found in storages):
        return f"of {len(storages)} storages some are on the device behind the forward"
    seen = []
    model.layers[0].register_full_backward_pre_hook(
        lambda *_: seen.append([found.back is not None for found in storages])
    )
    del storages
    loss.backward()
    if offloader.taken or offloader.warned:
        return f"left over: {offloader.taken}, warned: {offloader.warned}"
    return ""


def deviates_while_they_are_away(plan: str, mesh) -> str:
    """A loss of the second block's output: the plan has a backward that begins at the model's."""
    models = (
        sp.apply(make_model(OFFLOADING), plan, mesh, on_deviation="replan"),
        with_fsdp2(OFFLOADING, make_model(OFFLOADING), mesh),
    )
    for step in range(3):
        gradients = []
        for model in models:
            kept = []
            hook = model.layers[1].register_forward_hook(lambda module, args, output: kept.append(output))  # noqa: B023
            (x,), _ = inputs_of("mlp", step)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = model(x)
                (loss_of(output) if step == 0 else kept[0].square().sum()).backward()
            hook.remove()
            gradients.append(_gradients_of(model))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
        distance, where = largest_difference(*gradients)
        if distance > 1e-6:
            return f"step {step}: {distance} {where}"
    distance, where = largest_difference(*map(parameters_of, models))
    return "" if distance <= 1e-6 else f"{distance} {where}"


FEATURES = (goes_and_comes_back, deviates_while_they_are_away)


def run(plan: str) -> dict[str, str]:
    import traceback

    mesh = make_mesh(OFFLOADING)
    results = {}
    for feature in FEATURES:
        try:
            results[feature.__name__] = feature(plan, mesh)
        except Exception as error:
            results[feature.__name__] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        gc.collect()
    return results

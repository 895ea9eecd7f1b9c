# SPDX-License-Identifier: Apache-2.0
"""Shared by the tracer's tests: cases, walks over a trace, and the order that hooks see on real tensors."""

import functools
import sys

import torch
import tracer_models as models
from conftest import ROOT
from inputs_done import InputsDone
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

sys.path.insert(0, str(ROOT / "tools" / "python"))

from shardplan.tracer import record  # noqa: E402
from shardplan.tracer.session import Options, trace_module  # noqa: E402


def tokens(batch=2, seq=32):
    return torch.zeros(batch, seq, dtype=torch.long)


def floats(*shape):
    return torch.zeros(*shape)


# name -> (module, positional inputs, loss of the output)
CASES = {
    "mlp": lambda: (models.MLP(), (floats(4, 16),), None),
    "llama": lambda: (models.Llama(), (tokens(),), None),
    "llama_tied": lambda: (models.Llama(tied=True), (tokens(),), None),
    # fused on CPU and CUDA alike: the same operators backward
    "decoder": lambda: (models.Llama(tied=True, kv_heads=models.HEADS, norm=nn.LayerNorm), (tokens(),), None),
    "reused": lambda: (models.Reused(), (floats(4, 8),), None),
    "frozen": lambda: (models.Frozen(), (floats(4, 8),), None),
    "branchy": lambda: (models.Branchy(), (floats(4, 8),), None),
    "twice_inside": lambda: (models.TwiceInside(), (floats(4, 2, 8),), None),
    "in_place": lambda: (models.InPlace(), (floats(4, 8),), None),
    "indexed": lambda: (models.Indexed(), (floats(4, 8), torch.zeros(5, dtype=torch.long)), None),
    "input_needs_gradient": lambda: (models.MLP(), (floats(4, 16).requires_grad_(),), None),
}


@functools.cache
def trace_case(name, **options):
    """The trace of a case: shared among tests, not to be changed."""
    module, args, loss = CASES[name]()
    return trace_module(module, args, loss=loss, options=Options(**options))


def passes(trace):
    return [*trace["forwards"], *trace["backwards"]]


def events_of(trace):
    return [event for entry in passes(trace) for event in entry["events"]]


def fqn_of(trace, module):
    return trace["modules"][module]["fqn"] if module >= 0 else None


def saved_in(trace, prefix):
    return sum(
        e[2]
        for e in events_of(trace)
        if e[0] == "+" and e[3] == "saved" and (fqn_of(trace, e[4]) or "").startswith(prefix)
    )


def order_on_real_tensors(module, args, loss):
    """The order that hooks on the unsharded model see on the CPU, at the places of FSDP2's."""
    names, log, calls, open_calls = {}, [], {}, {}
    for fqn, child in module.named_modules():
        names[child] = fqn

    def before(child, inputs, keywords):
        name = names[child]
        log.append(("enter", name))
        call = calls[name] = calls.get(name, -1) + 1
        open_calls.setdefault(name, []).append(call)
        leaves, spec = tree_flatten((inputs, keywords))
        chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not chosen or not any(True for _ in child.parameters()) or not torch.is_grad_enabled():
            return None
        passed = InputsDone.apply(lambda: log.append(("inputs_done", name, call)), *(leaves[i] for i in chosen))
        for i, tensor in zip(chosen, passed):
            leaves[i] = tensor
        return tree_unflatten(leaves, spec)

    def after(child, _inputs, output):
        name = names[child]
        log.append(("exit", name))
        call = open_calls[name].pop()
        for index, leaf in enumerate(t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)):
            if leaf.requires_grad and torch.is_grad_enabled():
                leaf.register_hook(lambda _, index=index: log.append(("grad_ready", name, index, call)))

    for child in names:
        child.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        child.register_forward_hook(after)
    for fqn, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, fqn=fqn: log.append(("param_grad", fqn)))
    (loss or record.default_loss)(module(*args)).backward()
    return log

# SPDX-License-Identifier: Apache-2.0
"""Losses that run backwards of their own: each is a pass, in the order in which hooks see it on real tensors; plans of
such traces verify."""

import json

import pytest
import torch
from chunked_losses import Body, GivenGradient
from torch.utils.checkpoint import checkpoint
from tracer_support import events_of, fqn_of, order_on_real_tensors

from shardplan.tracer import document
from shardplan.tracer.errors import TracerError
from shardplan.tracer.session import Options, trace_module


def in_chunks(model, count, of_chunk=lambda head, chunk: head(chunk).square().mean()):
    def loss(hidden):
        total, gradients = torch.zeros((), device=hidden.device), []
        for chunk in (chunk.detach().requires_grad_() for chunk in hidden.chunk(count)):
            part = of_chunk(model.head, chunk)
            part.backward()
            total = total + part.detach()
            gradients.append(chunk.grad)
        return GivenGradient.apply(hidden, torch.cat(gradients), total)

    return loss


def recomputed(head, chunk):
    return checkpoint(lambda x: head(x).square().mean(), chunk, use_reentrant=False)


def over(model):
    """No backward follows."""

    def loss(hidden):
        value = model.head(hidden).square().mean()
        value.backward()
        return value.detach()

    return loss


def twice(model):
    """Two backwards of one forward."""

    def loss(hidden):
        value = model.head(hidden.detach()).square().mean()
        value.backward(retain_graph=True)
        value.backward()
        return model.head(hidden).sum()

    return loss


LOSSES = {
    **{f"chunks{count}": lambda model, count=count: in_chunks(model, count) for count in (1, 2, 4)},
    "recomputed": lambda model: in_chunks(model, 2, recomputed),
    "over": over,
    "twice": twice,
}


def traced(name):
    model = Body()
    return trace_module(model, (torch.zeros(4, 8),), loss=LOSSES[name](model))


def in_order(trace):
    """The passes, as they are called."""
    return [trace[f"{kind}s"][number] for kind, number in trace["calls"]]


def order_in(trace):
    seen = []
    for event in (event for entry in in_order(trace) for event in entry["events"]):
        if event[0] == "param_grad":
            seen.append(("param_grad", trace["parameters"][event[1]]["fqn"]))
        elif event[0] in ("enter", "exit", "inputs_done"):
            seen.append((event[0], fqn_of(trace, event[1])))
        elif event[0] == "grad_ready":
            seen.append((event[0], fqn_of(trace, event[1]), event[2]))
        elif event[0].startswith("recompute"):
            seen.append((event[0].removeprefix("recompute_"), fqn_of(trace, event[1])))
    return seen


@pytest.mark.parametrize("name", LOSSES)
def test_passes_are_in_the_order_of_real_tensors(name):
    model = Body()
    loss = LOSSES[name](model)
    real = order_on_real_tensors(
        model, (torch.zeros(4, 8),), (lambda y: loss(y).requires_grad_()) if name == "over" else loss
    )
    # Occurrences count within a pass there, and over the step here; where an early stop leaves a module is its own
    # (docs/reference/trace-format.md).
    assert order_in(traced(name)) == [entry[:3] if entry[0] == "grad_ready" else entry[:2] for entry in real]


@pytest.mark.parametrize("name", LOSSES)
def test_every_backward_is_whole(name):
    """A gradient is new in each, as where FSDP has reduced the one before; and each backward ends."""
    trace = traced(name)
    for backward in trace["backwards"]:
        made = [event[1] for event in backward["events"] if event[0] == "+" and event[3] == "parameter_grad"]
        assert [event[2] for event in backward["events"] if event[0] == "param_grad"] and len(made) == len(set(made))
        assert {event[2] for event in backward["events"] if event[0] == "param_grad"} == set(made)
        assert [event[0] for event in backward["events"]].count("backward_end") == 1


def test_the_work_is_that_of_the_chunks_together():
    flops = {
        name: sum(e[4] for e in events_of(traced(name)) if e[0] == "op" and e[1] in ("aten.mm", "aten.addmm"))
        for name in ("chunks1", "chunks2", "chunks4")
    }
    assert len(set(flops.values())) == 1, flops


@pytest.mark.parametrize(
    "flags",
    [
        "", "--accumulate 2", "--accumulate 2 --no-sync", "--checkpoint layers.* --checkpoint head",
        "--offload-activations layers.*",
    ],
)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "over"])
def test_plans_verify(name, flags, shardplan, tmp_path):
    trace, plan = tmp_path / "t.json", tmp_path / "p.json"
    with open(trace, "w", encoding="utf-8") as file:
        document.write(traced(name), file)
    units = ["--unit", "layers.*", "--unit", "head"]
    done = shardplan("plan", trace, "--cluster", "h100", "--ranks", "2", *units, *flags.split(), "-q", "-o", plan)
    if name == "twice" and "head" in flags:
        assert done.returncode == 3 and "two backwards of a step" in done.stderr, done.stderr
        return
    if name == "recomputed" and "head" in flags:  # it is checkpointed already
        return
    assert done.returncode == 0, done.stderr
    made = json.loads(plan.read_text())
    batches = 2 if "accumulate" in flags else 1
    forwards = [call for call in made["strategy"]["program"][0] if call["call"] == "forward"]
    assert len(forwards) == batches * len(json.loads(trace.read_text())["forwards"])
    assert made["tokens_per_step"] == 4 * batches


def test_work_that_goes_through_no_module_is_the_forwards():
    model = Body()

    def loss(hidden):
        logits = model.head(hidden)
        copy = logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(copy.square().sum(), copy)
        return (logits * gradient).mean()

    trace = trace_module(model, (torch.zeros(4, 8),), loss=loss)
    assert trace["calls"] == [] and len(trace["forwards"]) == len(trace["backwards"]) == 1
    assert {e[3] for e in trace["forwards"][0]["events"] if e[0] == "+"} <= {
        "saved", "forward_temp", "output", "loss_saved", "loss_temp",
    }


class Force(Body):
    def forward(self, x):
        x = x.requires_grad_()
        return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


def test_a_backward_inside_a_module_is_an_error():
    with pytest.raises(TracerError, match=r'the forward of "\(root\)" runs a backward through modules'):
        trace_module(Force(), (torch.zeros(4, 8),))


def test_several_steps_of_such_a_loss_are_an_error():
    model = Body()
    with pytest.raises(TracerError, match="is traced alone"):
        trace_module(model, (torch.zeros(4, 8),), loss=in_chunks(model, 2), options=Options(steps=2))

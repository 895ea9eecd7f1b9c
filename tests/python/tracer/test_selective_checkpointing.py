# SPDX-License-Identifier: Apache-2.0
"""Selective checkpointing as the planner applies it to a trace, against torch's own on real tensors: which operators
run again."""

import collections
import copy
import functools
import importlib.metadata
import inspect
import json
import random
import subprocess

import pytest
import torch
import torch.nn.functional as F
from conftest import build_folder
from torch import nn
from tracer_support import passes

from shardplan.tracer import document
from shardplan.tracer.session import Options, trace_module
from shardplan_conformance.checkpointing import early_stop, wrap

COMMAND = build_folder() / "bin" / "shardplan"
SEED = 4177


class Block(nn.Module):
    """Attention by products and a softmax, which run the same kernels on every device."""

    def __init__(self, dim=32):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.gate, self.down = (
            nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False),
            nn.Linear(2 * dim, dim, bias=False),
        )

    def forward(self, x):
        weights = torch.softmax(self.q(x) @ self.k(x).t() * 0.1, -1)
        h = x + self.o(weights @ self.v(x))
        return h + self.down(F.silu(self.gate(h)) * torch.sigmoid(self.up(h)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 8, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.by_name = collections.Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.by_name[str(operator).rpartition(".")[0]] += 1
        return operator(*args, **(kwargs or {}))


@functools.cache
def plain_trace():
    torch.manual_seed(1)
    return trace_module(Model(), (torch.zeros(6, 32),), options=Options())


def backward_on_real_tensors(strategy):
    torch.manual_seed(1)
    wrapped, _ = wrap(copy.deepcopy(Model()), strategy)
    with early_stop(strategy):
        loss = wrapped(torch.rand(6, 32)).sum()
        with Count() as count:
            loss.backward()
    return count.by_name


def backward_of_plan(strategy, folder):
    with open(folder / "t.json", "w") as file:
        document.write(plain_trace(), file)
    (folder / "s.json").write_text(json.dumps({"schema": "shardplan.strategy/1", "policy": "fsdp2"} | strategy))
    command = [
        COMMAND, "plan", folder / "t.json", "--strategy", folder / "s.json", "--ranks", "1", "--stop-after",
        "apply_checkpointing", "--dump", "-q", "-o", folder / "c.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = json.loads((folder / "c.json").read_text())
    return collections.Counter(event[1] for event in made["backwards"][0]["events"] if event[0] == "op")


def forward_names():
    return sorted({event[1] for event in plain_trace()["forwards"][0]["events"] if event[0] == "op"})


def rules():
    """Whole modules, torchtitan's two, and random ones."""
    yield {}
    yield {"every": 2}
    yield {"save": [{"name": "aten.mm", "recompute_every": 2}]}
    numbers = random.Random(SEED)
    for _ in range(7):
        save = [{"name": n, "recompute_every": numbers.randrange(4)} for n in numbers.sample(forward_names(), 3)]
        yield {"every": numbers.randrange(1, 3), "early_stop": numbers.random() < 0.7, "save": save}


@pytest.mark.parametrize("number", range(10))
def test_the_same_operators_run_again(number, tmp_path):
    rule = list(rules())[number]
    strategy = {"checkpoint": {"modules": ["layers.*"]} | rule}
    plain_real, plain_plan = backward_on_real_tensors({}), backward_of_plan({}, tmp_path)
    real, plan = backward_on_real_tensors(strategy), backward_of_plan(strategy, tmp_path)
    names = {event[1] for entry in passes(plain_trace()) for event in entry["events"] if event[0] == "op"}
    again_real = {n: real[n] - plain_real[n] for n in names if real[n] != plain_real[n]}
    again_plan = {n: plan[n] - plain_plan[n] for n in names if plan[n] != plain_plan[n]}
    assert again_plan, "something runs again"
    assert again_plan == again_real, f"seed {SEED}, rule {rule}: by the plan {again_plan}, by torch {again_real}"


def torchtitans_rule(folder):
    """The rule of `--checkpoint-save torchtitan`."""
    with open(folder / "t.json", "w") as file:
        document.write(plain_trace(), file)
    command = [
        COMMAND, "plan", folder / "t.json", "--checkpoint", "layers.*", "--checkpoint-save", "torchtitan", "--ranks",
        "1", "-q", "-o", folder / "p.json",
    ]
    done = subprocess.run([*command, "--write-strategy", folder / "s.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "s.json").read_text())["checkpoint"]


def test_torchtitans_list_is_that_of_the_installed_release(tmp_path):
    activation_checkpoint = pytest.importorskip("torchtitan.distributed.activation_checkpoint")
    rule = torchtitans_rule(tmp_path)
    assert rule["early_stop"] is False
    ours = {saved["name"]: saved.get("recompute_every", 0) for saved in rule["save"]}
    assert {name for name, every in ours.items() if every} == {"aten.mm", "aten.linear"} and ours["aten.mm"] == ours[
        "aten.linear"
    ] == 2
    theirs = {str(operator).removesuffix(".default") for operator in activation_checkpoint._get_default_save_ops()}
    # Operators of packages that are not installed are in the source alone.
    source = inspect.getsource(activation_checkpoint._get_default_save_ops)
    optional = {name for name in ours if name not in theirs and name in source}
    assert set(ours) - optional == theirs
    assert optional <= {
        "torch_attn._varlen_attn", "deepep.dispatch", "deepep.combine", "hybridep.dispatch", "hybridep.combine",
        "inductor_compiled_code",
    }
    version = importlib.metadata.version("torchtitan")
    told = subprocess.run([COMMAND, "plan", "--help"], capture_output=True, text=True).stdout
    assert f"release {version}" in " ".join(told.split())


def test_the_same_operators_run_again_as_under_torchtitan(tmp_path):
    activation_checkpoint = pytest.importorskip("torchtitan.distributed.activation_checkpoint")
    names = {event[1] for entry in passes(plain_trace()) for event in entry["events"] if event[0] == "op"}
    plan, plain_plan = (
        backward_of_plan({"checkpoint": torchtitans_rule(tmp_path)}, tmp_path),
        backward_of_plan({}, tmp_path),
    )
    torch.manual_seed(1)
    model = copy.deepcopy(Model())
    policy = activation_checkpoint.SelectiveAC(activation_checkpoint.SelectiveAC.Config())
    for name, block in list(model.layers.named_children()):
        model.layers.register_module(name, policy._wrap_block(block, base_fqn=f"layers.{name}"))
    loss = model(torch.rand(6, 32)).sum()
    with Count() as count:
        loss.backward()
    real, plain_real = count.by_name, backward_on_real_tensors({})
    again_real = {n: real[n] - plain_real[n] for n in names if real[n] != plain_real[n]}
    again_plan = {n: plan[n] - plain_plan[n] for n in names if plan[n] != plain_plan[n]}
    assert again_real["aten.mm"] > 0
    assert again_plan == again_real

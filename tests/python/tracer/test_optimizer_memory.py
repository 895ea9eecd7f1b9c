# SPDX-License-Identifier: Apache-2.0
"""Optimizer states and temporaries of plans beside torch.optim itself, stepping the rank's shards as fake CUDA
tensors."""

import importlib
import itertools
import json
import math
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tracer_support import trace_module

from shardplan.tracer import document
from shardplan.tracer.fake_cuda import fake_cuda

UNITS = [{"modules": ["low"]}, {"modules": [""]}]
RANKS = 8  # of the cluster that `shardplan plan` takes by default


class Half(nn.Module):
    """In bfloat16: one more list for the foreach implementations."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 300, dtype=torch.bfloat16)
        self.second = nn.Linear(300, 20, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.second(self.first(x.bfloat16())).float()


class Model(nn.Module):
    """Vectors, matrices of very different sizes, a stack of matrices, one that FSDP cannot cut evenly, and a frozen
    one."""

    def __init__(self, mixed):
        super().__init__()
        self.embed = nn.Linear(20, 700)
        self.experts = nn.Parameter(torch.zeros(7, 700, 20))
        self.norm = nn.LayerNorm(20)
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.low = Half() if mixed else nn.Linear(20, 20)
        self.head = nn.Linear(20, 1001, bias=False)

    def forward(self, x):
        y = torch.bmm(self.embed(x).expand(7, -1, -1), self.experts).sum(0)
        return self.head(self.low(self.frozen(self.norm(y))))


class Allocations(TorchDispatchMode):
    """CUDA memory in blocks of 512 bytes: what is alive, and the most that was."""

    def __init__(self):
        super().__init__()
        self.alive, self.most, self._references = 0, 0, {}

    def see(self, storage):
        address, size = storage._cdata, (storage.size() + 511) // 512 * 512
        if address in self._references:
            return

        def gone(_):
            del self._references[address]
            self.alive -= size

        self._references[address] = weakref.ref(storage, gone)
        self.alive += size
        self.most = max(self.most, self.alive)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                self.see(leaf.untyped_storage())
        return found


def optimizer_class(options):
    return {
        "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD,
        "adafactor": torch.optim.Adafactor,
    }[options["kind"]]


def arguments_of(options):
    """torch.optim's arguments of a strategy's optimizer."""
    found = {name: options[name] for name in ("nesterov", "amsgrad", "capturable", "maximize") if options.get(name)}
    if options["kind"] == "sgd" and options.get("momentum"):
        found["momentum"] = 0.9
    found["weight_decay"] = 0.1 if options.get("weight_decay") else 0.0
    how = options.get("implementation")
    return (
        found | {"foreach": {"foreach": True}, "fused": {"fused": True}, "for_loop": {"foreach": False}, None: {}}[how]
    )


def run_torch(shards, options, monkeypatch):
    """Bytes that the first step leaves behind, and the most that the second takes beside them."""
    monkeypatch.setattr(torch.Tensor, "item", lambda self: 1.0)  # fake tensors have no values: any number does
    monkeypatch.setattr(importlib.import_module("torch.optim.adam"), "_get_value", lambda x: 1.0)
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: None)  # it has no fake implementation
    with fake_cuda(), FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype, device="cuda")) for shape, dtype in shards]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = optimizer_class(options)(parameters, **arguments_of(options))
        log = Allocations()
        for tensor in parameters + [parameter.grad for parameter in parameters]:
            log.see(tensor.untyped_storage())
        given = log.alive
        with log:
            optimizer.step()
            states = log.alive
            log.most = states
            optimizer.step()
            assert log.alive == states
        return states - given, log.most - states


@pytest.fixture(scope="module", params=[False, True], ids=["one_dtype", "two_dtypes"])
def traced(request, tmp_path_factory):
    model = Model(request.param)
    shards = []  # of the first rank; the tracer moves the model
    for parameter in model.parameters():
        if parameter.requires_grad:
            rows = -(-parameter.shape[0] // RANKS)
            shards.append(((rows, *parameter.shape[1:]), parameter.dtype))
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with open(path, "w", encoding="utf-8") as file:
        document.write(trace_module(model, (torch.zeros(4, 20),)), file)
    return path, shards


def blocks(buffers):
    return sum((size + 511) // 512 * 512 for parts in buffers for size in parts)


def run_shardplan(shardplan, trace, strategy, folder):
    """The same of the plan's buffers."""
    path = folder / "strategy.json"
    path.write_text(json.dumps({"schema": "shardplan.strategy/1", "policy": "fsdp2", "units": UNITS, **strategy}))
    done = shardplan("plan", trace, "--strategy", path, "-o", "-", "-q")
    assert done.returncode == 0, done.stderr
    buffers = json.loads(done.stdout)["buffers"]
    return tuple(
        blocks(b["parts_bytes"] for b in buffers if b["role"] == role) for role in ("optimizer_state", "optimizer_temp")
    )


def cases():
    switches = lambda names: [
        dict(zip(names, values)) for values in itertools.product([False, True], repeat=len(names))
    ]  # noqa: E731
    how = ["for_loop", "foreach", "fused"]
    yield from (
        {"kind": "adamw", "implementation": i, **s}
        for i in how
        for s in switches(["amsgrad", "capturable", "maximize"])
    )
    yield from (
        {"kind": "adam", "implementation": i, **s}
        for i in how
        for s in switches(["weight_decay", "amsgrad", "capturable", "maximize"])
    )
    momenta = [{}, {"momentum": True}, {"momentum": True, "nesterov": True}]
    yield from (
        {"kind": "sgd", "implementation": i, **m, **s}
        for i in how
        for m in momenta
        for s in switches(["weight_decay", "maximize"])
    )
    yield from (
        {"kind": "adafactor", "implementation": i, **s}
        for i in ["for_loop", "foreach", None]
        for s in switches(["weight_decay", "maximize"])
    )


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "adafactor"])
def test_states_and_temporaries_are_those_of_torch(shardplan, traced, kind, tmp_path, monkeypatch):
    trace, shards = traced
    for options in cases():
        if options["kind"] != kind:
            continue
        given = {name: value for name, value in options.items() if value}
        found = run_shardplan(shardplan, trace, {"optimizer": given}, tmp_path)
        assert found == run_torch(shards, options, monkeypatch), given


def test_fsdp1_steps_pieces_of_the_flat_parameter(shardplan, traced, tmp_path, monkeypatch):
    """With original parameters each piece of the first rank is a vector of its own; without, the shard is one."""
    trace, _ = traced
    for original in (True, False):
        (tmp_path / "strategy.json").write_text(
            json.dumps({"schema": "shardplan.strategy/1", "policy": "fsdp1", "units": UNITS})
        )
        flags = ["--use-orig-params"] if original else []
        for optimizer in ("adamw-forloop-amsgrad", "adafactor", "adafactor-foreach", "sgdm-nesterov-foreach"):
            done = shardplan(
                "plan", trace, "--strategy", tmp_path / "strategy.json", "--optimizer", optimizer, *flags, "-o", "-",
                "-q",
            )
            if not original and "frozen" in done.stderr:
                continue  # FSDP1 refuses a unit that is frozen in part
            assert done.returncode == 0, done.stderr
            plan = json.loads(done.stdout)
            shards = []
            for unit in plan["units"]:
                end, dtype = unit["flat_numel"] // RANKS, getattr(torch, unit.get("orig_dtype", "float32"))
                for parameter in unit["parameters"]:
                    size = min(math.prod(parameter["shape"]), end - parameter.get("flat_offset", 0))
                    if size > 0 and parameter.get("requires_grad", True):
                        shards.append(((size,), dtype, parameter["fqn"]))
            order = [p["fqn"] for p in json.loads(trace.read_text())["parameters"]]
            shards = [shard[:2] for shard in sorted(shards, key=lambda shard: order.index(shard[2]))]
            if not original:
                shards = [
                    ((unit["flat_numel"] // RANKS,), getattr(torch, unit.get("orig_dtype", "float32")))
                    for unit in plan["units"]
                ]
            found = tuple(
                blocks(b["parts_bytes"] for b in plan["buffers"] if b["role"] == role)
                for role in ("optimizer_state", "optimizer_temp")
            )
            assert found == run_torch(shards, {"kind": "adamw"} | plan["strategy"]["optimizer"], monkeypatch), (
                optimizer,
                original,
            )


@pytest.mark.parametrize(
    "options, named",
    [
        ({"kind": "sgd", "nesterov": True}, "/optimizer/nesterov"),
        ({"kind": "adamw", "momentum": True}, "/optimizer/momentum"),
        ({"kind": "sgd", "amsgrad": True}, "/optimizer/amsgrad"),
        ({"kind": "adafactor", "capturable": True}, "/optimizer/capturable"),
        ({"kind": "adafactor", "implementation": "fused"}, "/optimizer/implementation"),
        ({"kind": "lion"}, "/optimizer/kind"),
        ({"kind": "adamw", "differentiable": True}, "/optimizer/differentiable"),
    ],
)
def test_what_torch_refuses_is_refused(shardplan, traced, options, named, tmp_path):
    path = tmp_path / "strategy.json"
    path.write_text(
        json.dumps({"schema": "shardplan.strategy/1", "policy": "fsdp2", "units": UNITS, "optimizer": options})
    )
    done = shardplan("plan", traced[0], "--strategy", path, "-o", "-", "-q")
    assert done.returncode == 3
    assert named in done.stderr


def test_flags_say_what_the_document_says(shardplan, traced, tmp_path):
    def strategy(*flags):
        path = tmp_path / "written.json"
        done = shardplan(
            "plan", traced[0], "--unit", "low", *flags, "--write-strategy", path, "-o", tmp_path / "plan.json", "-q"
        )
        return done, json.loads(path.read_text()).get("optimizer", {}) if done.returncode == 0 else None

    assert strategy("--optimizer", "adam-decay-capturable-forloop")[1] == {
        "kind": "adam",
        "implementation": "for_loop",
        "weight_decay": True,
        "capturable": True,
    }
    assert strategy("--optimizer", "sgdm-nesterov-maximize")[1] == {
        "kind": "sgd", "momentum": True, "nesterov": True, "maximize": True,
    }
    assert strategy("--optimizer", "adamw")[1] == {}
    assert strategy("--optimizer", "adafactor-foreach")[1] == {"kind": "adafactor", "implementation": "foreach"}
    for wrong in ("lion", "adamw-fast", "adamw-"):
        done, _ = strategy("--optimizer", wrong)
        assert done.returncode == 2
        assert wrong in done.stderr
    done, _ = strategy("--optimizer", "adamw-capturable", "--cpu-offload")
    assert done.returncode == 3
    assert "/optimizer/capturable" in done.stderr

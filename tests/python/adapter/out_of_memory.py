# SPDX-License-Identifier: Apache-2.0
"""Two ranks whose device is short of memory in a step, which they give up, on the device in software:
`python out_of_memory.py auto|traced FOLDER`; or a longer step that is foreseen: `foreseen FOLDER`."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys

import torch
import torch.nn as nn
from adapter_workers import run_on_ranks

import shardplan.torch as sp
from shardplan.torch._plans.planning import make_plan
from shardplan.tracer import session

WIDTH = 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _fill(bytes_left: int) -> torch.Tensor:
    """Takes the device's memory but for so much, and what the allocator has cached."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(free - bytes_left, dtype=torch.uint8, device="cuda")


def _train(plan: str, trouble: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters after three steps, and what was said of the trouble in the second one."""
    torch.manual_seed(2)
    model = Model().cuda()
    model = sp.auto(model, quiet=True, plans=None) if plan == "auto" else sp.apply(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    said = {}

    def step(number: int, rows: int) -> None:
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number)).cuda()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        if number == 1 and trouble:
            ballast = _fill(7 << 20) if trouble == "instruction" else None
            text = io.StringIO()
            with contextlib.redirect_stderr(text):
                try:
                    step(number, 1 << 14 if trouble == "operator" else 4)
                except torch.OutOfMemoryError as error:
                    said = {"error": str(error).splitlines()[0], "report": text.getvalue()}
            sp.abandon_step(model)
            del ballast
            torch.cuda.empty_cache()
        step(number, 4)
    return {fqn: parameter.full_tensor().cpu() for fqn, parameter in model.named_parameters()}, said


def trouble(plan: str) -> dict[str, dict[str, str]]:
    """By kind of trouble, what was said; "" of parameters that differ from those of a run without."""
    expected, _ = _train(plan, "")
    said = {}
    for kind in ("instruction", "operator"):
        parameters, said[kind] = _train(plan, kind)
        said[kind]["differ"] = " ".join(fqn for fqn in expected if not torch.equal(expected[fqn], parameters[fqn]))
    return said


def _traced(folder: pathlib.Path) -> str:
    """A plan that has the model's operators."""
    trace = session.trace_module(Model(), (torch.randn(4, WIDTH),), {}, lambda y: y.square().mean(), session.Options())
    strategy = {
        "schema": "shardplan.strategy/1", "policy": "fsdp2", "units": [{"modules": ["layers.*"]}, {"modules": [""]}],
    }
    plan = folder / "plan.json"
    plan.write_text(make_plan("plan", trace, strategy, ["--ranks", "2", "--optimizer", "sgd"]))
    return str(plan)


def foreseen(rows: int) -> dict[str, int]:
    """Bytes allocated at the peak of a step with that many rows, as forecast in the first step and as they came."""
    model = sp.auto(Model().cuda(), quiet=True, plans=None, optimizer="sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(4):
        x = torch.randn(rows if number > 1 else 4, WIDTH, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        del x
        torch.cuda.synchronize()
        if number == 1:
            forecast = sp.forecast(model, (torch.empty(rows, WIDTH, device="meta"),), loss=lambda y: y.square().mean())
    return {
        "forecast": forecast.allocated_bytes, "found": torch.cuda.max_memory_allocated(),
        "categories": forecast.at_peak,
    }


def main() -> None:
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "foreseen":
        outcomes = run_on_ranks(2, folder / "ranks", foreseen, 2048)
    else:
        outcomes = run_on_ranks(2, folder / "ranks", trouble, _traced(folder) if kind == "traced" else kind)
    print(json.dumps([outcome[1] for outcome in outcomes]))


if __name__ == "__main__":
    main()

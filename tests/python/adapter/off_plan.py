# SPDX-License-Identifier: Apache-2.0
"""Actions of a user that a plan does not have, under real FSDP2 (FSDP1) and by a plan, on the same ranks.

`PYTHONPATH=tools/python .venv/bin/python tests/python/adapter/off_plan.py [NAME ...]` prints the table: what PyTorch
does, what happens here with on_deviation="stop" and with "replan". Every case has to end as PyTorch does, bit for bit,
or with a message that names the module or parameter and the way out.

A case is a function of a Side, which makes models of one kind (PyTorch's, or by a plan) and notes what is seen. It runs
once for each kind; what was seen is compared. Both kinds have process groups of their own, and the ranks wait for each
other after each run without a collective. A case that hangs, dies or leaves the other rank behind ends the processes,
and the cases that are left go on in new ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import itertools
import json
import os
import pathlib
import pickle
import re
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator

import off_plan_models
import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE, run_on_ranks, warm
from equivalence import Case, largest_difference, local, make_model, with_fsdp2
from equivalence_models import ROOT, inputs_of, loss_of
from equivalence_settings import case as fsdp2_case
from flat_equivalence import clean, with_fsdp1
from torch.distributed.checkpoint.api import CheckpointException

RANKS = 2
HANGS_AFTER_S = 10
EQUAL = "equal"
KINDS = ("torch", "stop", "replan")  # in this order

DEFAULT = fsdp2_case("plain")


@dataclasses.dataclass(frozen=True)
class OffPlan:
    """stop, replan: what has to happen: EQUAL, a pattern of the message, or several of which one holds. tolerance: of
    "replan", relative."""

    name: str
    run: Callable[[Side], None]
    of: Case = DEFAULT
    stop: str | tuple[str, ...] = EQUAL
    replan: str | tuple[str, ...] = EQUAL
    tolerance: float = 0.0

    def allowed(self, kind: str) -> tuple[str, ...]:
        found = self.stop if kind == "stop" else self.replan
        return (found,) if isinstance(found, str) else found


CASES: dict[str, OffPlan] = {}


def off_plan(**fields) -> Callable:
    """Makes a case of the function, whose name it has."""

    def register(function: Callable[[Side], None]) -> Callable:
        CASES[function.__name__] = OffPlan(function.__name__, function, **fields)
        return function

    return register


class Side:
    """A training of one kind. kind: "torch" for real FSDP2 or FSDP1, "stop" and "replan" for a plan with that
    on_deviation."""

    def __init__(self, kind: str, case: OffPlan, plan: str, folder: str) -> None:
        self.kind, self.case, self.plan = kind, case, plan
        self.folder = f"{folder}/{case.name}-{kind}"  # the case's own, the same on all ranks
        self.seen: dict[str, torch.Tensor] = {}
        group = dist.new_group(list(range(RANKS)), timeout=datetime.timedelta(seconds=HANGS_AFTER_S))
        self.mesh = dist.device_mesh.DeviceMesh.from_group(group, DEVICE, mesh_dim_names=("shard",))

    @property
    def is_torch(self) -> bool:
        return self.kind == "torch"

    @property
    def is_flat(self) -> bool:
        return self.case.of.strategy.get("policy") == "fsdp1"

    def model(self, prepare: Callable[[nn.Module], object] = lambda model: None) -> nn.Module:
        """prepare: what the user does to the model before it is sharded."""
        import shardplan.torch as sp

        model = make_model(self.case.of)
        prepare(model)
        if self.is_torch:
            return (with_fsdp1 if self.is_flat else with_fsdp2)(self.case.of, model, self.mesh)
        return sp.apply(model, self.plan, self.mesh, on_deviation=self.kind)

    def optimizer(self, model: nn.Module, parameters=None) -> torch.optim.Optimizer:
        chosen = model.parameters() if parameters is None else parameters
        return torch.optim.SGD([p for p in chosen if p.requires_grad], lr=0.1, momentum=0.9)

    def input(self, number: int) -> torch.Tensor:
        """Another one on every rank."""
        return inputs_of(self.case.of.model, 100 * number + dist.get_rank())[0][0]

    def loss(self, model: nn.Module, number: int) -> torch.Tensor:
        loss = loss_of(model(self.input(number)))
        self.see(f"{number}: loss", loss)
        return loss

    def see(self, what: str, tensor: torch.Tensor) -> None:
        self.seen[f"{len(self.seen)} {what}"] = local(tensor).detach().clone()

    def see_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and local(parameter.grad).numel() > 0:
                self.see(f"gradient of {clean(name)}", parameter.grad)

    def see_parameters(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.see(clean(name), parameter)

    def end_step(self, model: nn.Module, optimizer) -> None:
        self.see_gradients(model)
        optimizer.step()
        self.see_parameters(model)
        optimizer.zero_grad()

    def train(self, model: nn.Module, optimizer, *numbers: int) -> None:
        for number in numbers:
            self.loss(model, number).backward()
            self.end_step(model, optimizer)


# ---- on a rank ----


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    from flat_equivalence import as_on_a_gpu

    with as_on_a_gpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _run(side: Side) -> tuple[str, str]:
    try:
        with _as_on_a_gpu():
            side.case.run(side)
        return "runs", ""
    except ImportError:
        raise  # says nothing of either side
    except AssertionError as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        if "off_plan" in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise  # the case itself is wrong
        return "raises", text
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        return "raises", "".join(traceback.format_exception_only(error)).strip()


def _difference(ours: Side, theirs: Side, ended: bool) -> tuple[float, str]:
    """Up to where ours ended."""
    expected = theirs.seen
    apart = [name for name in ours.seen if name not in expected]
    apart += [name for name in expected if name not in ours.seen] if ended else []
    if apart:
        return float("inf"), f"only in one of both: {apart[0]}"
    return largest_difference(ours.seen, {name: expected[name] for name in ours.seen})


def _outcome(side: Side, ended: tuple[str, str], theirs: Side | None, tolerance: float) -> dict:
    """theirs: None when PyTorch's part did not end."""
    what, message = ended
    outcome = {"what": what, "message": message}
    if side.is_torch:
        return outcome
    difference, where = _difference(side, theirs, what == "runs") if theirs is not None else (0.0, "")
    return outcome | {"difference": where if difference > (tolerance if side.kind == "replan" else 0.0) else ""}


def _of_all_ranks(name: str, own: str) -> list[str]:
    """The words of all ranks; empty when one does not come. Without a collective, which a rank may not reach."""
    store = dist.distributed_c10d._get_default_store()
    keys = [f"off_plan/{name}/{rank}" for rank in range(RANKS)]
    store.set(keys[dist.get_rank()], own)
    try:
        store.wait(keys, datetime.timedelta(seconds=HANGS_AFTER_S + 5))
        return [store.get(key).decode() for key in keys]
    except Exception:
        return []


def _run_kinds(case: OffPlan, kinds: list[str], plan: str, folder: str, note: Callable[[str, dict], None]) -> bool:
    """Whether the processes can go on: False when a rank was left behind."""
    theirs = None
    for kind in kinds:
        side = Side(kind, case, plan, folder)
        note(kind, {"what": "hangs", "message": ""})  # until it has ended
        ended = _run(side)
        outcome = _outcome(side, ended, theirs, case.tolerance)
        late = "imed out" in ended[1]
        good = outcome["what"] == "runs" and not outcome.get("difference")
        said = _of_all_ranks(f"{case.name}/{kind}", "late" if late else "good" if good else "bad")
        if not said or "late" in said:
            note(kind, outcome | {"what": "hangs"})
            return False
        note(kind, outcome)
        if kind == "torch":
            theirs = side
        elif set(said) == {"good"}:
            break  # nothing left the plan
        gc.collect()
    return True


def run_cases(left: list[tuple[str, list[str]]], plans: dict[str, str], folder: str) -> None:
    """Runs cases, by name, of those kinds. Writes the outcome of each as soon as it is known."""
    import off_plan_all  # noqa: F401, all cases

    path = pathlib.Path(folder, f"outcomes{dist.get_rank()}")
    found: dict[str, dict] = {}
    for name, kinds in left:
        found[name] = {}

        def note(kind: str, outcome: dict, of=found[name]) -> None:
            of[kind] = outcome
            path.with_suffix(".new").write_bytes(pickle.dumps(found))
            path.with_suffix(".new").rename(path)

        late = threading.Timer(4 * HANGS_AFTER_S, os._exit, [3])  # of one that spins
        late.daemon = True
        late.start()
        try:
            goes_on = _run_kinds(CASES[name], kinds, plans.get(CASES[name].of.name, ""), folder, note)
        except Exception:
            print(f"{name} is wrong itself:\n{traceback.format_exc()}", file=sys.stderr)
            note("torch", {"what": "is wrong", "message": traceback.format_exc()})
            goes_on = False
        late.cancel()
        if not goes_on:
            os._exit(0)


# ---- the whole table ----


def make_plans(cases: list[Case], folder: pathlib.Path, build: pathlib.Path) -> dict[str, dict[str, str]]:
    """Name of the Case -> {"plan": path} or {"refused": message}."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    here = pathlib.Path(off_plan_models.__file__)
    path = os.pathsep.join([str(here.parent), str(ROOT / "tools" / "python"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "SHARDPLAN_BUILD": str(build)}
    done = warm.run([here, folder / "cases.pickle", folder], env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"making plans failed:\n{done.stdout}\n{done.stderr}")
    return json.loads((folder / "plans.json").read_text())


def _merged(of_ranks: list[dict]) -> dict:
    """By kind: what the rank says that is the worst off, but for one that another left behind."""
    order = ["is wrong", "hangs", "raises", "runs"]
    merged = {}
    for kind in KINDS:
        outcomes = [found[kind] for found in of_ranks if kind in found]
        if outcomes:
            left_behind = ["Connection closed" in o["message"] or not o["message"] for o in outcomes]
            merged[kind] = min(
                zip(outcomes, left_behind), key=lambda o: (order.index(o[0]["what"]), o[1], not o[0].get("difference"))
            )[0]
            if len({o["what"] for o in outcomes}) > 1 and merged[kind]["what"] != "hangs":
                merged[kind] = {**merged[kind], "ranks differ": True}
    return merged


def _kinds_left(kinds: list[str], found: dict) -> list[str]:
    """After processes that ended in one of the kinds."""
    hangs = next((kind for kind in kinds if found.get(kind, {}).get("what") == "hangs"), None)
    if hangs is None or hangs == kinds[-1]:
        return []
    later = kinds[kinds.index(hangs) + 1 :]
    return later if hangs == "torch" else ["torch", *later]


def run_all(names: list[str], folder: pathlib.Path, build: pathlib.Path) -> dict[str, dict]:
    """Case name -> kind -> what happened."""
    settings = {CASES[name].of.name: CASES[name].of for name in names}
    plans = make_plans(list(settings.values()), folder / "plans", build)
    results: dict[str, dict] = {name: {} for name in names}
    left: list[tuple[str, list[str]]] = []
    for name in names:
        refused = plans[CASES[name].of.name].get("refused")
        left.append((name, list(KINDS) if refused is None else ["torch"]))
        if refused is not None:
            results[name]["stop"] = {"what": "is not planned", "message": refused}
    paths = {name: made["plan"] for name, made in plans.items() if "plan" in made}
    os.environ["PATH"] = f"{build / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ["SHARDPLAN_BUILD"] = str(build)
    for number in itertools.count():
        if not left:
            return results
        attempt = folder / f"attempt{number}"
        run_on_ranks(RANKS, attempt, run_cases, left, paths, str(attempt))
        files = [attempt / f"outcomes{rank}" for rank in range(RANKS)]
        found = [pickle.loads(file.read_bytes()) if file.exists() else {} for file in files]
        begun = [(name, kinds) for name, kinds in left if any(name in of for of in found)]
        if not begun:
            raise RuntimeError(f"the ranks did not begin: {left[0]}")
        left = left[len(begun) :]
        for name, kinds in begun:
            merged = _merged([of[name] for of in found if name in of])
            results[name] |= merged
            if again := _kinds_left(kinds, merged):
                left.insert(0, (name, again))


def verdict(case: OffPlan, kind: str, outcome: dict, theirs: dict) -> str:
    """The fault of it; "" when there is none. theirs: PyTorch's outcome."""
    what, message = outcome["what"], outcome["message"]
    if what == "runs":
        if outcome["difference"]:
            return f"differs: {outcome['difference']}"
        return "" if EQUAL in case.allowed(kind) else "runs, where a message is expected"
    if what == "is not planned":
        patterns = [pattern for pattern in case.allowed(kind) if pattern != EQUAL]
        said = "exit code 70" not in message and any(re.search(pattern, message, re.DOTALL) for pattern in patterns)
        return "" if said else f"is not planned: {message}"
    if what != "raises":
        return f"{what} {message}".strip()
    if outcome.get("ranks differ"):
        return f"only one rank raises: {message}"
    if message == theirs.get("message"):
        return ""  # as PyTorch says it
    if outcome.get("difference"):
        return f"differs before it raises: {outcome['difference']}"
    patterns = [pattern for pattern in case.allowed(kind) if pattern != EQUAL]
    return "" if any(re.search(pattern, message, re.DOTALL) for pattern in patterns) else f"says {message}"


def verdicts(case: OffPlan, result: dict) -> dict[str, str]:
    """By kind of plan. With on_deviation="stop" nothing deviated where "replan" was not run."""
    return {kind: verdict(case, kind, result[kind], result.get("torch", {})) for kind in KINDS[1:] if kind in result}


def _shown(outcome: dict | None) -> str:
    if outcome is None:
        return ""
    if outcome["what"] == "runs":
        return (
            "DIFFERS: " + outcome["difference"]
            if outcome.get("difference")
            else "equal"
            if "difference" in outcome
            else "runs"
        )
    return f"{outcome['what']}: {' '.join(outcome['message'].split())[:220]}"


def table(results: dict[str, dict]) -> str:
    lines = ["| case | PyTorch | a plan, stop | a plan, replan |", "|---|---|---|---|"]
    for name, result in results.items():
        cells = [_shown(result.get("torch"))]
        found = verdicts(CASES[name], result)
        for kind in KINDS[1:]:
            shown = _shown(result.get(kind)) or ("as stop" if kind == "replan" and "stop" in found else "")
            cells.append(f"**WRONG** {shown}" if found.get(kind) else shown)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    sys.path[:0] = [str(ROOT / "tools" / "python"), str(ROOT / "tests" / "python")]
    import off_plan as this  # as the cases know it
    import off_plan_all  # noqa: F401, all cases

    build = pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build" / "dev")).resolve()
    names = [name for name in this.CASES if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        results = this.run_all(names, pathlib.Path(folder), build)
    print(this.table(results))
    wrong = {
        name: found
        for name in names
        if (found := [k for k, v in this.verdicts(this.CASES[name], results[name]).items() if v])
    }
    print(
        f"{len(names)} cases, {len(wrong)} wrong:\n"
        + "\n".join(f'    "{name}": {tuple(kinds)},' for name, kinds in wrong.items())
    )


if __name__ == "__main__":
    main()

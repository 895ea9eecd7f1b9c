# SPDX-License-Identifier: Apache-2.0
"""Trainings by plans of `shardplan plan --optimizer muon`, on a rank. A model follows the plan. Beside it are
FSDP2 with the plan for its optimizer alone, and torch.optim.Muon of whole matrices with the same gradients.
`muon_planned.py CASE` runs one on ranks of its own."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from muon_models import DEVICE, make_mesh, whole

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """words: of `shardplan plan`. Without owners torch.optim.Muon steps DTensors."""

    name: str
    words: tuple[str, ...]
    replicas: int = 1
    shards: int = 2
    batches: int = 1  # of a step

    @property
    def owned(self) -> bool:
        return "--muon-owners" in self.words

    @property
    def in_backward(self) -> int:
        """Exchanges that begin there: one for each bucket, and one for the rest."""
        return min(self.words.count("--muon-bucket") + 1, 3) if IN_BACKWARD in self.words else 0


IN_BACKWARD = "--muon-in-backward"
BUCKETS = tuple(word for number in range(3) for word in ("--muon-bucket", f"1.{number}.*.weight"))
CASES = (
    Case("shards", ("--muon-owners", "shards")),
    Case("buckets", ("--muon-owners", "shards", *BUCKETS), shards=4),
    Case("over_replicas", ("--muon-owners", "replicas", *BUCKETS), replicas=2),
    Case("in_each_replica", ("--muon-owners", "shards"), replicas=2),
    Case("dist_muon", ("--muon-owners", "dist_muon", *BUCKETS), shards=4),
    Case("on_all", ("--muon-owners", "all"), shards=4),
    Case("on_all_buckets", ("--muon-owners", "all", *BUCKETS), replicas=2),
    Case("sharded", ()),
    Case("in_backward", ("--muon-owners", "shards", *BUCKETS, IN_BACKWARD), shards=4),
    Case("in_backward_of_two", ("--muon-owners", "shards", "--muon-bucket", "1.2.*.weight", IN_BACKWARD)),
    Case("in_backward_over_replicas", ("--muon-owners", "replicas", *BUCKETS, IN_BACKWARD), replicas=2),
    Case("in_backward_accumulated", ("--muon-owners", "shards", *BUCKETS, IN_BACKWARD, "--accumulate", "2"), batches=2),
)


def layers() -> nn.Module:
    """For `shardplan trace muon_planned:layers`: no size divides by four but those between the blocks."""
    torch.manual_seed(3)
    blocks = (nn.Sequential(nn.Linear(64, 130), nn.GELU(), nn.Linear(130, 64)) for _ in range(3))
    return nn.Sequential(nn.Embedding(100, 64), nn.Sequential(*blocks), nn.Linear(64, 100))


def make_plans(folder: pathlib.Path, build: pathlib.Path) -> dict[str, str]:
    """Case name -> path."""
    trace = folder / "trace.json"
    words = ["--batch", "4", "--seq", "8", "--dtype", "float32", "--muon", "2,2x2,4", "--muon-device", "cpu"]
    words += ["--muon-matrices", "1.*.*.weight", "-o", trace]
    here = pathlib.Path(__file__).resolve().parent
    run([sys.executable, "-m", "shardplan.tracer", "muon_planned:layers", *words], here)
    plans = {}
    for case in CASES:
        plans[case.name] = str(folder / f"{case.name}.json")
        mesh = [f"replicate={case.replicas}"] if case.replicas > 1 else []
        mesh.append(f"shard={case.shards}")
        words = ["--ranks", case.replicas * case.shards, "--mesh", *mesh, "--unit", "1.*", "-q", "-o", plans[case.name]]
        words += ["--optimizer", "muon", "--muon-matrices", "1.*.*.weight", *case.words]
        run([build / "bin" / "shardplan", "plan", trace, *words], here)
    return plans


def run(command: list, folder: pathlib.Path) -> None:
    done = subprocess.run([str(word) for word in command], cwd=folder, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr}")


def compare(case: Case, plan: str) -> str:
    """On a rank; "": equal bit for bit."""
    import shardplan.torch as sp

    models = make_models(case, plan)
    theirs = models["fsdp2"]
    sp.Muon(models["ours"], lr=0.5)  # dropped: it begins no exchange
    ours = sp.Muon(models["ours"], lr=0.02)
    stepped = set(ours.param_groups[0]["params"])
    names = [fqn for fqn, parameter in models["ours"].named_parameters() if parameter in stepped]
    assert len(names) == 6 and all(name.startswith("1.") for name in names), names
    if case.owned:
        muons = {"ours": ours, "fsdp2": sp.Muon(theirs, plan=plan, lr=0.02)}
    else:
        muons = {"ours": ours, "fsdp2": torch.optim.Muon([theirs.get_parameter(fqn) for fqn in names], lr=0.02)}
    rests = {
        name: torch.optim.AdamW([p for fqn, p in model.named_parameters() if fqn not in names], lr=1e-3)
        for name, model in models.items()
    }
    alone = {fqn: nn.Parameter(whole(models["ours"].get_parameter(fqn)).clone()) for fqn in names}
    single = torch.optim.Muon(alone.values(), lr=0.02)
    for step in range(STEPS):
        losses = []
        for name, model in models.items():
            exchanges = [backward(model, step, batch, losses) for batch in range(case.batches)]
            expected = [0] * (case.batches - 1) + [case.in_backward if name == "ours" or case.owned else 0]
            if exchanges != expected:
                return f"{name}: exchanges that begin in the backwards: {exchanges}, expected {expected}"
            if name == "ours":
                for fqn, parameter in alone.items():
                    parameter.grad = whole(model.get_parameter(fqn).grad).clone()
            for optimizer in (muons[name], rests[name]):
                optimizer.step()
                optimizer.zero_grad()
        single.step()
        if not torch.equal(*torch.stack(losses).chunk(2)):
            return f"step {step}: losses {losses}"
    for fqn, parameter in models["ours"].named_parameters():
        if not torch.equal(whole(parameter), whole(theirs.get_parameter(fqn))):
            return f"{fqn}: not that of FSDP2"
        if case.owned and fqn in alone and not torch.equal(whole(parameter), alone[fqn]):
            return f"{fqn}: not that of one process"
    return ""


def leaves_its_plan(plan: str, plan_of_theirs: str) -> tuple[list[int], str]:
    """Micro-batches as in the plan, fewer, and as in the plan again. Exchanges that begin in each step's backwards, and
    the first parameter that differs from FSDP2's, whose exchanges all begin in step()."""
    import shardplan.torch as sp

    case = Case("", ())
    models = make_models(case, plan, on_deviation="replan")
    muons = {"ours": sp.Muon(models["ours"], lr=0.02), "fsdp2": sp.Muon(models["fsdp2"], plan=plan_of_theirs, lr=0.02)}
    stepped = {id(p) for muon in muons.values() for group in muon.param_groups for p in group["params"]}
    begun: list[int] = []
    for step, batches in enumerate((2, 2, 1, 2, 2)):
        for name, model in models.items():
            exchanges = [backward(model, step, batch, []) for batch in range(batches)]
            if name == "ours":
                begun.append(sum(exchanges))
            muons[name].step()
            with torch.no_grad():
                for parameter in model.parameters():
                    if id(parameter) not in stepped:
                        parameter.sub_(parameter.grad, alpha=0.01)
            model.zero_grad()
    for fqn, parameter in models["ours"].named_parameters():
        if not torch.equal(whole(parameter), whole(models["fsdp2"].get_parameter(fqn))):
            return begun, fqn
    return begun, ""


def make_models(case: Case, plan: str, **arguments) -> dict[str, nn.Module]:
    import shardplan.torch as sp
    from torch.distributed.fsdp import fully_shard

    mesh = make_mesh(case.replicas, case.shards)
    theirs = layers().to(DEVICE)
    for block in theirs[1]:
        fully_shard(block, mesh=mesh)
    ours = sp.apply(layers().to(DEVICE), plan, mesh, **arguments)
    return {"ours": ours, "fsdp2": fully_shard(theirs, mesh=mesh)}


def backward(model: nn.Module, step: int, batch: int, losses: list[torch.Tensor]) -> int:
    """Runs a micro-batch. Returns how many exchanges have begun in its backward."""
    numbers = torch.Generator().manual_seed(100 * step + 10 * batch + dist.get_rank())
    tokens = torch.randint(100, (4, 9), generator=numbers).to(DEVICE)
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    losses.append(loss.detach())
    sent = []
    real = dist.all_to_all_single
    dist.all_to_all_single = lambda *words: sent.append(words) or real(*words)
    try:
        loss.backward()
    finally:
        dist.all_to_all_single = real
    return len(sent)


def refused(case: Case, plan: str) -> dict[str, str]:
    """Loops for which exchanges may not begin in the backward: errors."""
    import shardplan.torch as sp

    said = {}
    for name, model in make_models(case, plan).items():
        muon = sp.Muon(model, plan=plan if name == "fsdp2" else None, lr=0.02)
        losses: list[torch.Tensor] = []
        backward(model, 0, 0, losses)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for what, call in (("clipped", muon.step), ("two backwards", lambda: backward(model, 0, 1, losses))):
            if what == "two backwards":
                backward(model, 0, 0, losses)
            try:
                call()
            except RuntimeError as error:
                said[f"{name}, {what}"] = str(error)
    return said


def compare_all(cases: list[Case], plans: dict[str, str]) -> dict[str, str]:
    return {case.name: compare(case, plans[case.name]) for case in cases}


def main() -> None:
    from adapter_workers import run_on_ranks

    case = next(case for case in CASES if case.name == sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        plans = make_plans(pathlib.Path(folder), pathlib.Path(os.environ["SHARDPLAN_BUILD"]))
        ranks = case.replicas * case.shards
        outcomes = run_on_ranks(ranks, pathlib.Path(folder, "ranks"), compare_all, [case], plans)
    wrong = [outcome for outcome in outcomes if outcome != ("returned", {case.name: ""})]
    sys.exit(f"{case.name}: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()

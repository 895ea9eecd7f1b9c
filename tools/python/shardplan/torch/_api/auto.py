# SPDX-License-Identifier: Apache-2.0
"""auto(): from a model to one that trains by a plan, in one call.

[Note: how auto plans] FSDP2's schedule needs the order in which modules run, and nothing else. The module tree says it
for most models, so the first plan is made of that. A step that goes otherwise is finished on demand, and the plan is
made of the points that it passed: what `on_deviation="replan"` does for any plan. `policy="optimize"` needs operators,
too: the first forward's arguments are traced on fake tensors where it begins, on the first rank, and the search runs
([Note: beside the training]). Every plan is the first rank's, so that ranks with other disks, loads and clocks have the
same.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .._job.agree import agree
from .._job.arguments import Decision, Memory, PlanError, Policy, check_choice, seconds
from .._job.first_rank import from_first_rank
from .._job.peers import peers
from .._model.init import Initialize, reset_parameters
from .._model.skeleton import Skeleton, backends_of
from .._model.units import Arguments, Strategy, Units, forget_marks
from .._plans.documents import plan_of
from .._plans.plan_store import PlanStore, default_folder
from .._plans.planning import is_muon, make_plan
from .._replay.applied import ATTRIBUTE
from .apply import apply_plan
from .auto_planned import AutoPlanned, Costs
from .search import Search
from .ties import TiesMadeLater

_FOLDER: Any = object()  # `plans` was not given


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise PlanError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group before "
            "shardplan.torch.auto"
        )


def _search_arguments(
    policy: Policy, budget: int | str | None, allow: Sequence[Decision], search_seconds: float
) -> list[str]:
    check_choice("policy", policy, Policy)
    if policy == "fsdp2":
        if budget is not None:
            raise ValueError('shardplan: a budget is for policy="optimize"; FSDP2 has the schedule that it has')
        return []
    given = "device" if budget is None else f"{budget}B" if isinstance(budget, int) else budget
    arguments = [
        "--memory-budget", given, "--time-limit", f"{max(int(search_seconds * 1000), 1)}ms", "--fix", "layout",
        "accumulation", "reduction",
    ]
    for decision in allow:
        check_choice("a decision to allow", decision, Decision)
    return [*arguments, *(["--allow", *allow] if allow else [])]


def auto(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    policy: Policy = "fsdp2",
    budget: int | str | None = None,
    allow: Sequence[Decision] = ("checkpoint",),
    units: Units | None = None,
    cluster: str | os.PathLike | None = None,
    optimizer: str = "adamw",
    loss: Callable[[Any], torch.Tensor] | None = None,
    search_seconds: float = 30.0,
    plans: str | os.PathLike | None = _FOLDER,
    quiet: bool = False,
    initialize: Initialize = reset_parameters,
    broadcast_from_rank_0: bool = False,
    memory: Memory = "allocator",
    timeout: float | datetime.timedelta | None = None,
    **arguments: Any,
) -> nn.Module:
    """Makes `model` train by a plan that is made here and now; returns the same module.

    arguments: what fully_shard takes besides, for all units: reshard_after_forward, shard_placement_fn, mp_policy,
    offload_policy, ignored_params, dp_mesh_dims.
    mesh: as fully_shard's; None: all ranks of the default process group.
    units: patterns of FQNs ("layers.*"), classes, modules, or rules of a strategy document, in order; the root is
    added. None: the modules that are marked (shardplan.torch.unit), else each repeated block.
    policy: "fsdp2": FSDP2's schedule. "optimize": the fastest plan that reserves at most `budget` (bytes, "60GiB", or
    None: what the cluster's device has), for at most `search_seconds`; it may do what `allow` says besides. `loss` is
    of the model's output, for the trace; None: the output's `loss`, else its sum.
    cluster: a document or the name of a shipped one, whose costs the search takes.
    optimizer: whose states the plan counts, as `shardplan plan --optimizer` has it; the loop's own is the user's. With
    "muon" all ranks that have rows of a hidden layer's matrix may own it, and shardplan.torch.Muon(model) follows the
    plan. Other parameters have an optimizer of their own, AdamW.
    plans: the folder in which plans are kept; None: none are. Default: $SHARDPLAN_PLANS, else the user's cache folder.
    A restart begins with the plan of the same model, arguments, ranks and releases.
    quiet: the line of what planning cost is not printed.
    initialize, broadcast_from_rank_0, memory, timeout: as apply's.

    A step that does not go as planned is finished on demand, and the next one is planned as it went (apply's
    on_deviation="replan"). Create the optimizer after this call. Collective. Raises PlanError as apply does, and where
    there is no plan; TypeError and ValueError for arguments.
    """
    if hasattr(model, ATTRIBUTE):
        raise PlanError("a plan is applied to this model already")
    check_choice("memory", memory, Memory)
    searched = _search_arguments(policy, budget, allow, search_seconds)
    defaults = Arguments.of(arguments)
    timeout_s = seconds(timeout)
    _check_initialized()
    strategy = Strategy(model, mesh, defaults, units)
    forget_marks(model)
    document, trace, ranks, whole = strategy.document, strategy.trace, strategy.ranks, strategy.whole_mesh()
    peers()
    where = ["--ranks", str(len(ranks))] + (
        ["--cluster", os.path.abspath(cluster) if os.path.exists(cluster) else os.fspath(cluster)] if cluster else []
    )
    where += ["--optimizer", optimizer, *(["--muon-owners", "replicas"] if is_muon(optimizer) else [])]
    first = dist.get_rank() == ranks[0]
    store = PlanStore((default_folder() if plans is _FOLDER else plans) if first else None)
    facts = {"trace": trace, "strategy": document, "planned": [*where]}
    costs = Costs()

    def first_plan() -> str:
        path = store.path(trace["model"], facts)
        if (kept := store.read(path)) is not None:
            costs.kept = True
            return kept
        began = time.monotonic()
        text = make_plan("plan", trace, document, where)
        costs.plan_s = time.monotonic() - began
        store.write(path, text)
        return text

    try:
        plan = plan_of(from_first_rank(first_plan, ranks, timeout_s))
    except PlanError as error:
        agree(model, None, whole, timeout_s, failure=str(error))
        raise
    skeleton = Skeleton(model, document.get("mixed_precision", {}).get("param_dtype"))
    applied = apply_plan(
        model,
        plan,
        whole,
        initialize=initialize,
        broadcast_from_rank_0=broadcast_from_rank_0,
        on_deviation="replan",
        memory=memory,
        timeout=timeout,
        skeleton=skeleton,
        given=strategy.given,
    )
    # Micro-batches are what the loop says, whatever a plan on disk has.
    applied.set_sync(list(range(len(plan.units))), True)
    applied.await_optimizer()
    applied.following.plan_anew = lambda setup: make_plan("plan", trace, {**document, "setup": setup}, where)
    applied.setters.came_from_disk()
    TiesMadeLater.watch(applied, document, where, strategy, ranks)
    following = AutoPlanned(applied, store, facts, ranks, costs, quiet)
    if policy == "optimize":
        own = {**facts, "planned": [*where, *searched], "compiled": backends_of(model)}
        following.facts = own
        search = Search(applied, document, where, searched, loss, following, timeout_s + search_seconds)
        applied.before_next_step(search.begin, first=True)
    return model

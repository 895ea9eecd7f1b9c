"""auto(): from a model to one that trains by a plan, in one call.

[Note: how auto plans] FSDP2's schedule needs the order in which modules run, and nothing else. The module tree says it for most models, so
the first plan is made of that. A step that goes otherwise is finished on demand, and the plan is made of the points that it passed: what
`on_deviation="replan"` does for any plan. `policy="optimize"` needs operators, too: the first forward's arguments are traced on fake
tensors where it begins, on the first rank, the search runs, and that step follows its plan. Every plan is the first rank's, so that ranks with
other disks, loads and clocks have the same.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import os
import pathlib
import sys
import time
import typing
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from ._agree import agree
from ._applied import ATTRIBUTE, Applied, applied_to
from ._apply import apply
from ._errors import PlanError
from ._fit import modules_of
from ._init import Initialize, reset_parameters
from ._outline import outline
from ._peers import connect, peers, seconds
from ._plan_store import PlanStore, default_folder
from ._planning import make_plan, plan_of
from ._setters import Setters
from ._switch import switch
from ._units import Arguments, Strategy, Units, forget_marks

_FOLDER: Any = object()  # `plans` was not given
_exchanges: dict[tuple[int, ...], int] = {}  # by the ranks that take part: how many there were

Policy = Literal["fsdp2", "optimize"]
Decision = Literal["checkpoint", "offload", "cache-release"]


@dataclasses.dataclass
class Costs:
    """Of what is printed once, in seconds."""

    trace_s: float = 0.0
    plan_s: float = 0.0
    first_step_s: float = 0.0
    kept: bool = False  # the plan was on disk


def _ranks_of(mesh: DeviceMesh | None) -> list[int]:
    if not dist.is_initialized():
        raise PlanError("torch.distributed is not initialized: call torch.distributed.init_process_group before shardplan.torch.auto")
    return list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()


def _from_first_rank(make: Callable[[], str], ranks: list[int], timeout_s: float) -> str:
    """What make() returns on the first of the ranks, on all of them; PlanError likewise. Collective."""
    if len(ranks) < 2 or dist.get_backend() == "fake":
        return make()
    key = tuple(ranks)
    _exchanges[key] = _exchanges.get(key, 0) + 1
    name = f"shardplan/auto/{zlib.crc32(repr(ranks).encode())}/{_exchanges[key]}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    if dist.get_rank() == ranks[0]:
        try:
            text = make()
        except Exception as error:
            store.set("plan", zlib.compress(f"!{error}".encode()))
            raise
        store.set("plan", zlib.compress(f"={text}".encode()))
        return text

    def wait() -> str:
        store.wait(["plan"], datetime.timedelta(seconds=timeout_s))
        return zlib.decompress(store.get("plan")).decode()

    text = connect(wait, timeout_s)
    if text[0] == "!":
        raise PlanError(f"rank {ranks[0]}: {text[1:]}")
    return text[1:]


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy on the meta device, to be traced: taken before the plan is applied, since hooks are not copied. What is compiled in the model is in it."""
    from shardplan.tracer import compiled

    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                empty = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    skeleton = copy.deepcopy(model, memo)
    compiled.compile_as(model, skeleton)
    return skeleton


def _backends(model: nn.Module) -> dict[str, str]:
    """FQN -> backend of every module that is compiled by itself."""
    from shardplan.tracer import compiled

    found = {fqn: compiled.backend_of(module) for fqn, module in modules_of(model).items()}
    return {fqn: backend for fqn, backend in found.items() if backend}


class _Auto:
    """What `auto` does after it has returned: the search, the plan on disk, one line of what it cost."""

    def __init__(self, applied: Applied, store: PlanStore, facts: dict[str, Any], ranks: list[int], costs: Costs, quiet: bool) -> None:
        self._applied = weakref.ref(applied)
        self._store, self._facts, self._ranks, self._costs, self._quiet = store, facts, ranks, costs, quiet
        self._began = 0.0
        self._planned_again = False
        applied.following.on_new_plan = self._note_new_plan
        applied.before_next_step(self._first_step)

    @property
    def path(self) -> pathlib.Path | None:
        return self._store.path(self._applied().plan.model, self._facts)

    def _note_new_plan(self) -> None:
        self._planned_again = True
        if self._is_first_rank():
            self._store.write(self.path, self._applied().plan.json)

    def _is_first_rank(self) -> bool:
        return dist.get_rank() == self._ranks[0]

    def _first_step(self, *_entered: object) -> None:
        self._began = time.monotonic()
        self._applied().before_next_step(self._second_step)

    def _second_step(self, *_entered: object) -> None:
        applied = self._applied()
        self._costs.first_step_s = time.monotonic() - self._began
        applied.following.on_new_plan = None
        if self._quiet or not self._is_first_rank():
            return
        plan = applied.plan
        how = "on demand, since it left the order of the module tree" if self._planned_again else "as planned"
        made = "read from disk" if self._costs.kept else f"made in {self._costs.plan_s:.1f} s"
        traced = f"traced in {self._costs.trace_s:.1f} s, " if self._costs.trace_s else ""
        where = f"; {self.path}" if self.path and self.path.exists() else ""
        print(
            f"shardplan: {plan.model}, {len(plan.units)} units on {plan.world_size} ranks: {traced}plan {made}; the first step took "
            f"{self._costs.first_step_s:.1f} s, {how}{where}",
            file=sys.stderr,
            flush=True,
        )


class _Search:
    """policy="optimize": at the first forward, from its arguments to the plan that the search finds."""

    def __init__(
        self,
        applied: Applied,
        skeleton: nn.Module | None,
        strategy: dict[str, Any],
        arguments: list[str],
        loss: Callable | None,
        auto: _Auto,
        timeout_s: float,
    ) -> None:
        self._applied = weakref.ref(applied)
        self._skeleton, self._strategy, self._arguments = skeleton, strategy, arguments
        self._loss, self._auto, self._timeout_s = loss, auto, timeout_s

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        applied, auto = self._applied(), self._auto
        text = _from_first_rank(lambda: self._plan(module, args, kwargs), auto._ranks, self._timeout_s)
        switch(applied, plan_of(text))
        applied.following.on_new_plan = auto._note_new_plan

    def _plan(self, module: nn.Module, args: tuple, kwargs: dict) -> str:
        auto = self._auto
        if module is not self._applied().model:
            raise PlanError(
                f"the search needs the whole forward's arguments, and the first module that ran is a {type(module).__name__}: call the model itself"
            )
        auto._facts["inputs"] = _described((args, kwargs))
        if (kept := auto._store.read(auto.path)) is not None:
            auto._costs.kept = True
            return kept
        began = time.monotonic()
        trace = self._trace(args, kwargs)
        auto._costs.trace_s = time.monotonic() - began
        began = time.monotonic()
        text = make_plan("optimize", trace, self._strategy, self._arguments)
        auto._costs.plan_s = time.monotonic() - began
        auto._costs.kept = False
        auto._store.write(auto.path, text)
        return text

    def _trace(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        from shardplan.tracer import session
        from shardplan.tracer.errors import TracerError

        skeleton, self._skeleton = self._skeleton, None
        precision = self._strategy.get("mixed_precision", {}).get("param_dtype")
        options = session.Options(dtype=precision, name=type(skeleton).__name__)
        try:
            return session.trace_module(skeleton, args, kwargs, self._loss, options)
        except TracerError as error:
            raise PlanError(f'policy="optimize" needs a trace of the model, and it cannot be traced: {error}') from error


def _described(value: Any) -> Any:
    """Shapes and dtypes of arguments, and the values of what is no tensor, as JSON has them."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype), value.requires_grad]
    if isinstance(value, (list, tuple)):
        return [_described(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _described(one) for key, one in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _search_arguments(policy: Policy, budget: int | str | None, allow: Sequence[Decision], search_seconds: float) -> list[str]:
    if policy == "fsdp2":
        if budget is not None:
            raise ValueError('shardplan: a budget is for policy="optimize"; FSDP2 has the schedule that it has')
        return []
    if policy != "optimize":
        raise ValueError(f'shardplan: policy is "fsdp2" or "optimize", not {policy!r}')
    given = "device" if budget is None else f"{budget}B" if isinstance(budget, int) else budget
    arguments = ["--memory-budget", given, "--time-limit", f"{max(int(search_seconds * 1000), 1)}ms", "--fix", "layout", "accumulation"]
    if unknown := set(allow) - set(typing.get_args(Decision)):
        raise ValueError(f"shardplan: allow takes {', '.join(typing.get_args(Decision))}, not {sorted(unknown)[0]!r}")
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
    memory: Literal["allocator", "arena"] = "allocator",
    timeout: float | datetime.timedelta | None = None,
    **arguments: Any,
) -> nn.Module:
    """Makes `model` train by a plan that is made here and now; returns the same module.

    arguments: what fully_shard takes besides, for all units: reshard_after_forward, shard_placement_fn, mp_policy, offload_policy,
    ignored_params, dp_mesh_dims.
    mesh: as fully_shard's; None: all ranks of the default process group.
    units: patterns of FQNs ("layers.*"), classes, modules, or rules of a strategy document, in order; the root is added. None:
    the modules that are marked (shardplan.torch.unit), else each repeated block.
    policy: "fsdp2": FSDP2's schedule. "optimize": the fastest plan that reserves at most `budget` (bytes, "60GiB", or None: what
    the cluster's device has), for at most `search_seconds`; it may do what `allow` says besides. `loss` is of the model's output,
    for the trace; None: the output's `loss`, else its sum.
    cluster: a document or the name of a shipped one, whose costs the search takes.
    optimizer: whose states the plan counts, as `shardplan plan --optimizer` has it; the loop's own is the user's.
    plans: the folder in which plans are kept; None: none are. Default: $SHARDPLAN_PLANS, else the user's cache folder. A restart begins with
    the plan of the same model, arguments, ranks and releases.
    quiet: the line of what planning cost is not printed.
    initialize, broadcast_from_rank_0, memory, timeout: as apply's.

    A step that does not go as planned is finished on demand, and the next one is planned as it went (apply's on_deviation="replan").
    Create the optimizer after this call. Collective. Raises PlanError as apply does, and where there is no plan; TypeError and ValueError for
    arguments.
    """
    if hasattr(model, ATTRIBUTE):
        raise PlanError("a plan is applied to this model already")
    searched = _search_arguments(policy, budget, allow, search_seconds)
    defaults = Arguments.of(arguments)
    timeout_s = seconds(timeout)
    strategy = Strategy(model, mesh, defaults)
    document = strategy.document(units)
    forget_marks(model)
    whole = strategy.whole_mesh
    ranks = _ranks_of(whole)
    peers()
    trace = outline(model)
    where = ["--ranks", str(len(ranks))] + (["--cluster", os.path.abspath(cluster) if os.path.exists(cluster) else os.fspath(cluster)] if cluster else [])
    where += ["--optimizer", optimizer]
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
        plan = plan_of(_from_first_rank(first_plan, ranks, timeout_s))
    except PlanError as error:
        agree(model, None, whole, timeout_s, failure=str(error))
        raise
    skeleton = _skeleton(model) if policy == "optimize" and first else None
    apply(
        model,
        plan,
        whole,
        initialize=initialize,
        broadcast_from_rank_0=broadcast_from_rank_0,
        on_deviation="replan",
        memory=memory,
        timeout=timeout,
    )
    applied = applied_to(model)
    applied.set_sync(list(range(len(plan.units))), True)  # micro-batches are what the loop says, whatever a plan on disk has
    applied.await_optimizer()
    applied.setters = Setters(applied, from_disk=True)
    applied.setters.watch()
    following = _Auto(applied, store, facts, ranks, costs, quiet)
    if policy == "optimize":
        own = {**facts, "planned": [*where, *searched], "compiled": _backends(model)}
        following._facts = own
        search = _Search(applied, skeleton, document, [*where, *searched], loss, following, timeout_s + search_seconds)
        applied.at_next_step.insert(0, search.begin)
    return model

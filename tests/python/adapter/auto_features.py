# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_auto_features.py: sp.auto, its plans on disk, its search, and the setters of
FSDPModule, next to real FSDP2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE
from auto_dynamic import DYNAMIC, dynamic, searched_meanwhile
from auto_losses import LOSSES, backwards_inside_the_loss
from auto_porting import PORTING
from equivalence import largest_difference, whole
from equivalence_models import Mlp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import shardplan.torch as sp

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make(**arguments) -> nn.Module:
    torch.manual_seed(3)
    return Mlp(**arguments).to(DEVICE)


def apply_fsdp(model: nn.Module, shard: Callable, **arguments) -> None:
    """A user's function, for either."""
    for layer in model.layers:
        shard(layer, **arguments)
    shard([model.head], **arguments)
    shard(model, **arguments)


def batch(step: int, microbatch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dist.get_rank())
    return torch.randn(2, 5, 7, generator=generator).to(DEVICE)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def train(
    model: nn.Module, steps: int, before: Callable[[nn.Module, int], None] = lambda model, step: None, rows: int = 1
) -> dict[str, torch.Tensor]:
    """rows: how often each batch is repeated."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    seen = {}
    for step in range(steps):
        before(model, step)
        loss = loss_of(model(batch(step).repeat(rows, 1, 1)))
        loss.backward()
        seen[f"loss {step}"] = loss.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    return seen | {name: whole(parameter) for name, parameter in model.named_parameters()}


def both(
    steps: int = 3, before=lambda model, step: None, model: dict | None = None, mesh=None, **arguments
) -> tuple[float, str]:
    """The largest difference between a ported script and the original."""
    ours, theirs = make(**(model or {})), make(**(model or {}))
    apply_fsdp(ours, sp.unit, mesh=mesh, **arguments)
    sp.auto(ours, quiet=True)
    apply_fsdp(theirs, fully_shard, mesh=mesh or init_device_mesh(DEVICE, (dist.get_world_size(),)), **arguments)
    return largest_difference(train(ours, steps, before), train(theirs, steps, before))


# ---- arguments ----


def shard_placement_fn() -> tuple[float, str]:
    place = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None  # noqa: E731
    return both(model={"width": 8, "hidden": 12}, shard_placement_fn=place)


def param_dtype_override_fn() -> tuple[float, str]:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=lambda p: torch.float32 if p.ndim == 1 else None,
    )
    return both(mp_policy=policy, model={"bias": False})


def offload_policy() -> tuple[float, str]:
    return both(offload_policy=CPUOffloadPolicy(pin_memory=False))


def dp_mesh_dims() -> tuple[float, str]:
    """Named dimensions of a mesh that has others: of size 1 here, so that parameters need no cut along it."""
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("data", "tensor"))
    dims = DataParallelMeshDims(shard="data")
    ours, theirs = make(), make()
    sp.auto(ours, mesh, units=["layers.*", "head"], dp_mesh_dims=dims, quiet=True)
    apply_fsdp(theirs, fully_shard, mesh=mesh["data"])
    return largest_difference(train(ours, 2), train(theirs, 2))


def repeated_blocks_are_units() -> tuple[float, str]:
    ours = sp.auto(make(), mp_policy=BF16, quiet=True)
    assert [name for name, module in ours.named_modules() if isinstance(module, FSDPModule)] == [
        "", "layers.0", "layers.1", "layers.2",
    ]
    theirs = make()
    for layer in theirs.layers:
        fully_shard(layer, mp_policy=BF16)
    fully_shard(theirs, mp_policy=BF16)
    return largest_difference(train(ours, 2), train(theirs, 2))


# ---- the first step, and what is kept ----


class Backwards(Mlp):
    """Runs its blocks in another order than it registers them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


def other_order(folder: str) -> str:
    """The first step of the first run is on demand; a second run begins with the plan. Numbers are FSDP2's in both."""

    def model() -> nn.Module:
        torch.manual_seed(3)
        return Backwards().to(DEVICE)

    said = []
    for _ in range(2):
        ours, theirs = model(), model()
        with contextlib.redirect_stderr(io.StringIO()) as text, warnings.catch_warnings():
            warnings.simplefilter("error")
            sp.auto(ours, plans=folder)
            apply_fsdp(theirs, lambda module, **arguments: None)
            for layer in theirs.layers:
                fully_shard(layer)
            fully_shard(theirs)
            difference = largest_difference(train(ours, 3), train(theirs, 3))
        if difference != (0.0, ""):
            return f"differs: {difference}"
        said.append(text.getvalue())
    if dist.get_rank() != 0:
        return "" if said == ["", ""] else f"rank {dist.get_rank()} said {said}"
    on_demand, kept = said
    if "on demand" not in on_demand or on_demand.count("\n") != 1 or "plan made in" not in on_demand:
        return f"first: {on_demand}"
    if "as planned" not in kept or "plan read from disk" not in kept:
        return f"second: {kept}"
    files = os.listdir(folder)
    return "" if len(files) == 1 and files[0].endswith(".plan.json") else f"kept: {files}"


def optimized(folder: str) -> str:
    """The search's plan is followed from the first step on where FSDP2's does not fit, else from a later one; numbers
    are FSDP2's."""
    from shardplan.torch._replay.applied import applied_to
    from shardplan.torch._api.search import Search

    cluster = pathlib.Path(__file__).resolve().parents[3] / "examples" / "train_gpt" / "cluster.json"
    steps, rows = 7, 4096
    theirs = make(layers=6)
    for layer in theirs.layers:
        fully_shard(layer)
    fully_shard(theirs)
    wanted = train(theirs, steps, rows=rows)
    digests = []
    # The second of a kind takes the plan of the first from the disk.
    for budget, waits in (("96MB", True), ("96MB", True), ("400MB", False), ("400MB", True)):
        ours = make(layers=6)
        settings = {"cluster": cluster, "search_seconds": 1, "plans": folder, "loss": loss_of, "quiet": True}
        sp.auto(ours, policy="optimize", budget=budget, units=["layers.*"], **settings)
        followed = []

        def watch(model: nn.Module, step: int) -> None:
            followed.append(applied_to(model).plan.digest)  # in the step before
            searches = [
                function.__self__
                for function in applied_to(model).at_next_step
                if isinstance(function.__self__, Search)
            ]
            until = time.monotonic() + 100 * (step == 3 and dist.get_rank() == 0)
            while searches and not searches[0]._found and time.monotonic() < until:  # the first rank's; others follow
                time.sleep(0.05)

        difference = largest_difference(train(ours, steps, watch, rows), wanted)
        if difference[0] > 1e-6:
            return f"differs: {difference}"
        digests.append(applied_to(ours).plan.digest)
        changed = next((step for step, digest in enumerate(followed[1:]) if digest != followed[0]), steps)
        if waits != (changed == 0) or changed == steps:
            return f"{budget}: the plan changed in step {changed} of {steps}"
    return "" if digests[0] == digests[1] and digests[2] == digests[3] else "two plans"


# ---- setters ----


def _plans_made() -> Callable[[], int]:
    from shardplan.torch._plans import replan

    count = [0]
    real = replan.make_plan

    def counted(*arguments, **keywords):
        count[0] += 1
        return real(*arguments, **keywords)

    replan.make_plan = counted
    return lambda: count[0]


SETTERS: dict[str, Callable[[nn.Module], None]] = {
    "set_reshard_after_forward": lambda m: m.set_reshard_after_forward(False),
    "set_reshard_after_forward_one": lambda m: m.layers[1].set_reshard_after_forward(False, recurse=False),
    "set_reshard_after_backward": lambda m: m.set_reshard_after_backward(False),
    "set_modules_to_forward_prefetch": lambda m: m.layers[0].set_modules_to_forward_prefetch(
        [m.layers[1], m.layers[2]]
    ),
    "set_modules_to_backward_prefetch": lambda m: m.layers[2].set_modules_to_backward_prefetch(
        [m.layers[1], m.layers[0]]
    ),
    "set_gradient_divide_factor": lambda m: [layer.set_gradient_divide_factor(2.0) for layer in m.layers],
    "set_reduce_scatter_divide_factor": lambda m: m.layers[0].set_reduce_scatter_divide_factor(2.0),
    "set_force_sum_reduction_for_comms": lambda m: m.layers[0].set_force_sum_reduction_for_comms(True),
    "set_unshard_in_backward": lambda m: m.head.set_unshard_in_backward(True),
    "set_requires_all_reduce": lambda m: m.set_requires_all_reduce(True),
    "set_separate_reduce_scatter_group": lambda m: m.set_separate_reduce_scatter_group(True),
    "set_reduce_scatter_max_input_buffers": lambda m: m.set_reduce_scatter_max_input_buffers(2),
    "set_reduce_scatter_unused_params": lambda m: m.set_reduce_scatter_unused_params(True),
    "set_keep_unsharded_storage": lambda m: m.set_keep_unsharded_storage(True),
    "set_allocate_memory_from_process_group_for_comm": lambda m: m.set_allocate_memory_from_process_group_for_comm(
        False
    ),
    "_set_unshard_async_op": lambda m: m._set_unshard_async_op(True),
}


def setter(name: str) -> str:
    """Called before the first step; called, and undone where there is an opposite, later. FSDP2 trains beside."""
    from shardplan.torch._replay.applied import applied_to

    call = SETTERS[name]
    ours, theirs = make(), make()
    apply_fsdp(ours, sp.unit)
    sp.auto(ours, quiet=True)
    apply_fsdp(theirs, fully_shard)
    made = _plans_made()

    def before(model: nn.Module, step: int) -> None:
        if step == 0 or (step == 2 and name != "set_keep_unsharded_storage"):  # the same again changes nothing
            call(model)

    difference = largest_difference(train(ours, 4, before), train(theirs, 4, before))
    if difference != (0.0, ""):
        return f"differs: {difference}"
    if made() != 1:
        return f"{made()} plans were made"
    method = name.removesuffix("_one").replace("reduce_scatter_divide", "gradient_divide")
    setup = json.loads(applied_to(ours).plan.strategy_json).get("setup", [])
    return "" if any(entry["method"] == method for entry in setup) else f"the plan has {setup}"


def toggled() -> str:
    """A setting and its opposite in turn: two plans, each made once and kept."""
    ours, theirs = make(), make()
    apply_fsdp(ours, sp.unit)
    sp.auto(ours, quiet=True)
    apply_fsdp(theirs, fully_shard)
    made = _plans_made()
    before = lambda model, step: model.set_reshard_after_forward(step % 2 == 0)  # noqa: E731
    difference = largest_difference(train(ours, 6, before), train(theirs, 6, before))
    if difference != (0.0, ""):
        return f"differs: {difference}"
    return "" if made() == 2 else f"{made()} plans were made"


def post_optim_event() -> str:
    from shardplan.torch._replay.applied import applied_to

    ours = sp.auto(make(), quiet=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    made = _plans_made()
    for step in range(4):
        loss_of(ours(batch(step))).backward()
        optimizer.step()
        ours.set_post_optim_event(None)
        optimizer.zero_grad()
    program = json.loads(applied_to(ours).plan.strategy_json)["program"]
    methods = [call.get("method") for call in program[-1]]
    if made() != 1 or "set_post_optim_event" not in methods:
        return f"{made()} plans, {program}"
    return ""


def reset_iter_state() -> tuple[float, str]:
    """An exception in a forward, and the method that real FSDP2 has for it."""

    def before(model: nn.Module, step: int) -> None:
        if step != 1:
            return
        with contextlib.suppress(KeyError):
            handle = model.layers[1].register_forward_hook(lambda *_: {}["no"])
            model(batch(7))
        handle.remove()
        model.reset_iter_state()

    return both(before=before)


def symmetric_memory() -> str:
    model = sp.auto(make(), quiet=True)
    try:
        model.set_symm_mem_for_comm()
    except NotImplementedError as error:
        return "" if "arena" in str(error) else str(error)
    return "nothing was raised"


def is_an_fsdp_module() -> str:
    """Questions of libraries, and the answers that they find."""
    model = make()
    sp.unit(model.layers[0])
    sp.auto(model, quiet=True)
    kinds = [isinstance(m, FSDPModule) for m in (model, model.layers[0], model.layers[1])]
    if kinds != [True, True, False]:
        return str(kinds)
    if type(model).__mro__[2] is not Mlp or type(model).__name__ != "Mlp":
        return str(type(model).__mro__)
    missing = [
        name
        for name in vars(FSDPModule)
        if not name.startswith("__") and name != "_orig_cls_mro_index" and vars(type(model)).get(name) is None
    ]
    if missing:
        return f"methods of FSDP2's own are left: {missing}"
    for name, wanted in (("_comm_ctx", "docs/guide/migration.md"), ("_fsdp_param_groups", "docs/guide/migration.md")):
        try:
            getattr(model._get_fsdp_state(), name)
            return f"{name} is there"
        except AttributeError as error:
            if wanted not in str(error):
                return str(error)
    sp.remove(model)
    return "" if type(model) is Mlp and not isinstance(model.layers[0], FSDPModule) else str(type(model))


def refusals() -> str:
    """Errors of arguments, in words that say what to do."""
    def said(function: Callable) -> str:
        try:
            function()
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    marked = make()
    sp.unit(marked.layers[0])
    cases = {
        "twice": (lambda: sp.unit(marked.layers[0]), "is marked as a unit already"),
        "a list": (lambda: sp.unit(marked.layers), "has no forward"),
        "no module": (lambda: sp.unit("layers.0"), "a unit is a torch.nn.Module"),
        "an argument": (lambda: sp.unit(marked.layers[1], reshard=True), "unexpected keyword argument 'reshard'"),
        "marks and units": (lambda: sp.auto(marked, units=["layers.*"]), "one of them says what units are"),
        "policy": (lambda: sp.auto(make(), policy="fsdp3"), "policy is"),
        "budget": (lambda: sp.auto(make(), budget="1GiB"), 'a budget is for policy="optimize"'),
        "allow": (lambda: sp.auto(make(), policy="optimize", allow=("magic",)), "not 'magic'"),
        "no such unit": (lambda: sp.auto(make(), units=["blocks.*"]), "blocks.*"),
        "cluster": (lambda: sp.auto(make(), cluster="no_such_cluster"), "no_such_cluster"),
        "forecast": (lambda: sp.forecast(sp.auto(make(), quiet=True), (torch.zeros(3, 999),)), "cannot be traced"),
        "ignored": (lambda: sp.auto(make(), ignored_params={nn.Parameter(torch.zeros(1))}), "does not have"),
    }
    wrong = {name: text for name, (function, wanted) in cases.items() if wanted not in (text := said(function))}
    return str(wrong) if wrong else ""


# ---- what is left behind, and what is told ----


def whole_parameters_go() -> str:
    """After apply nobody holds the whole model, wherever its parameters came from."""
    import gc
    import weakref

    left = {}
    for device in (DEVICE, "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            model = Mlp()
        whole = [weakref.ref(parameter) for parameter in model.parameters()]

        def made_from_meta(module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                nn.init.ones_(parameter)
                whole.append(weakref.ref(parameter))

        sp.auto(model, mesh=init_device_mesh(DEVICE, (dist.get_world_size(),)), quiet=True, initialize=made_from_meta)
        gc.collect()
        left[device] = sum(reference() is not None for reference in whole)
    return "" if set(left.values()) == {0} else f"{left} whole parameters are alive"


def stops_together() -> str:
    """One rank is told; all end behind the same step."""
    import signal

    rank, ended = dist.get_rank(), -1
    before = signal.getsignal(signal.SIGTERM)
    with sp.stop_on_signal() as stop:
        for step in range(10):
            if step == 3 and rank == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop():
                ended = step
                break
    return "" if ended == 4 and signal.getsignal(signal.SIGTERM) == before else f"ended at step {ended}"


def optimizer_made_before() -> str:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sp.auto(model, quiet=True)
    loss_of(model(batch(0))).backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    texts = [str(warning.message) for warning in said]
    return (
        ""
        if len(texts) == 1 and "this SGD was made before the plan was applied: 23 of its parameters" in texts[0]
        else str(texts)
    )


FEATURES = [
    shard_placement_fn, param_dtype_override_fn, offload_policy, dp_mesh_dims, repeated_blocks_are_units, toggled,
    post_optim_event, reset_iter_state, symmetric_memory, is_an_fsdp_module, refusals, whole_parameters_go,
    optimizer_made_before, stops_together, searched_meanwhile, *PORTING,
]


def run(names: list[str], folder: str) -> dict[str, object]:
    """Name -> what is wrong, or (difference, where); ends behind the first that raises."""
    import traceback

    results: dict[str, object] = {}
    functions = {function.__name__: function for function in FEATURES}
    for name in names:
        try:
            if name.startswith("setter:"):
                results[name] = setter(name.removeprefix("setter:"))
            elif name.startswith("dynamic:"):
                results[name] = dynamic(name.removeprefix("dynamic:"))
            elif name.startswith("loss:"):
                results[name] = backwards_inside_the_loss(
                    name.removeprefix("loss:"), str(pathlib.Path(folder) / name.replace(":", "_"))
                )
            elif name in ("other_order", "optimized"):
                results[name] = globals()[name](str(pathlib.Path(folder) / name))
            else:
                results[name] = functions[name]()
        except Exception:
            results[name] = traceback.format_exc()
            break
    return results


NAMES = [
    *(function.__name__ for function in FEATURES),
    "other_order",
    "optimized",
    *(f"setter:{name}" for name in SETTERS),
    *(f"dynamic:{name}" for name in DYNAMIC),
    *(f"loss:{name}" for name in LOSSES),
]

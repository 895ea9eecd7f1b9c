# SPDX-License-Identifier: Apache-2.0
"""sp.Muon: torch.optim.Muon, in which each matrix is whole on the rank that a plan says, or on every one.

[Note: equal bits] The momentum, the cast to the exchange's dtype and the update of the parameter are torch.optim.Muon's
own operations, element by element, on the rows that the rank has. The iterations are torch's function on the whole
matrix. So the result is that of one process, however the matrix is cut.

[Note: no gradient] torch.optim.Muon leaves out a parameter without a gradient. The plan is fixed, so zeros are sent for
it, its owner does not iterate, and neither momentum nor parameter change. All ranks have the same model, so they agree.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _adjust_lr, muon
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalized
from torch.optim.optimizer import Optimizer, _to_scalar

from .._job.arguments import PlanError, default_timeout_s
from .._job.mesh import OwnMesh, mesh_of_ranks, process_groups
from .._model.fit import ModelParameter, parameters_of
from .._plans.documents import load_plan
from .._replay.applied import ATTRIBUTE
from .pieces import Part
from .program import Beginning, Buffer, Exchange, Instruction, bind
from .streams import Streams, make_streams

_ARGUMENTS = (
    "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn",
)


def _local_rows(tensor: DTensor, part: Part) -> torch.Tensor:
    local = tensor._local_tensor
    return local.view(-1, local.shape[-1])[part.first_local : part.first_local + part.rows]


def _words(tensor: torch.Tensor) -> str:
    """Shape and placements."""
    if not isinstance(tensor, DTensor):
        return f"{list(tensor.shape)}, a whole tensor"
    placements = ", ".join(f"Shard({p.dim})" if isinstance(p, Shard) else "Replicate()" for p in tensor.placements)
    return f"{list(tensor.shape)} in {placements} over {'x'.join(map(str, tensor.device_mesh.shape))} ranks"


def _groups(plan, by_fqn: dict[str, ModelParameter]) -> list[dist.ProcessGroup]:
    """Groups of a model that fully_shard has sharded: those of its meshes, where they have them. Collective."""
    parameters = [found.parameter for found in by_fqn.values()]
    meshes = {p.device_mesh: OwnMesh(p.device_mesh) for p in parameters if isinstance(p, DTensor)}
    if not meshes:
        raise PlanError("the model has no sharded parameters: call fully_shard, or shardplan.torch.apply, before")
    if plan.world_size != dist.get_world_size():
        raise PlanError(f"the plan is for {plan.world_size} ranks, found {dist.get_world_size()}")
    ranks = list(range(plan.world_size))
    mesh = mesh_of_ranks(ranks, [("ranks", len(ranks))], next(iter(meshes)).device_type)
    return process_groups(plan, mesh, meshes.values(), {}, default_timeout_s())


class _Step:
    """One run of a program, in the backward and when the optimizer steps."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups: dict[int, dict] = {}  # of each parameter, by id
        self.state: Any = None

    def run(self, instructions: list[Instruction], optimizer: Optimizer) -> None:
        self.groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        self.state = optimizer.state
        for instruction in instructions:
            getattr(self, instruction.kind)(instruction)

    def allocate(self, instruction: Instruction) -> None:
        buffer: Buffer = instruction.dst
        exchange = buffer.exchange
        device = exchange.parameters[0]._local_tensor.device
        with self.streams.on(instruction.stream):
            self.tensors[buffer.name] = torch.empty(exchange.sizes[buffer.role], dtype=exchange.dtype, device=device)

    def free(self, instruction: Instruction) -> None:
        self.streams.safe_after(self.tensors.pop(instruction.src.name), instruction.safe_after)

    def record(self, instruction: Instruction) -> None:
        self.streams.record(instruction.event, instruction.stream)

    def wait(self, instruction: Instruction) -> None:
        self.streams.wait(instruction.event, instruction.stream)

    def host_wait(self, instruction: Instruction) -> None:
        self.streams.host_wait(instruction.event)

    def update_copy_in(self, instruction: Instruction) -> None:
        exchange = instruction.exchange
        pieces = self.tensors[instruction.dst.name]
        with self.streams.on(instruction.stream):
            for part in exchange.pieces:
                parameter = exchange.parameters[part.matrix]
                out = pieces[part.at : part.at + part.size(exchange.layout.matrices)]
                if parameter.grad is None:
                    out.zero_()
                    continue
                group = self.groups[id(parameter)]
                gradient = _local_rows(parameter.grad, part)
                momentum = _local_rows(self.state[parameter]["momentum_buffer"], part)
                momentum.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                out.view(update.shape).copy_(update)

    def all_to_all(self, instruction: Instruction) -> None:
        exchange, src, dst = instruction.exchange, instruction.src, instruction.dst
        source, target = self.tensors[src.name], self.tensors[dst.name]
        goes_back = dst.role == "update_pieces"
        sent, received = exchange.back if goes_back else exchange.there

        def call(async_op: bool):
            if not goes_back:
                begin, end = exchange.sent_there
                own = source[begin:end]
            elif exchange.replicas > 1 and source.is_cuda:
                to = source.split(sent[: exchange.layout.shards]) * exchange.replicas
                return dist.all_to_all(list(target.split(received)), list(to), exchange.group, async_op)
            else:  # Gloo's list of tensors has them all of one size
                own = source.repeat(exchange.replicas) if exchange.replicas > 1 else source
            return dist.all_to_all_single(target, own, received, sent, exchange.group, async_op)

        self.streams.collective(instruction.stream, (src, dst), call)

    def update_gather(self, instruction: Instruction) -> None:
        src, dst = instruction.src, instruction.dst
        source, target = self.tensors[src.name], self.tensors[dst.name]
        group = instruction.exchange.group
        self.streams.collective(
            instruction.stream,
            (src, dst),
            lambda async_op: dist.all_gather_into_tensor(target, source, group, async_op),
        )

    def orthogonalize(self, instruction: Instruction) -> None:
        exchange, number = instruction.exchange, instruction.matrix
        matrix, parameter = exchange.layout.matrices[number], exchange.parameters[number]
        if matrix.owner not in (exchange.rank, None) or parameter.grad is None:
            return
        whole, group = self.tensors[instruction.dst.name], self.groups[id(parameter)]
        with self.streams.on(instruction.stream):
            parts = [
                whole[part.at : part.at + part.rows * matrix.columns].view(-1, matrix.columns)
                for part in exchange.whole[number]
            ]
            update = parts[0] if len(parts) == 1 else torch.cat(parts)
            update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
            for place, part in zip(parts, exchange.whole[number]):
                place.copy_(update[part.first : part.first + part.rows])

    def update_apply(self, instruction: Instruction) -> None:
        exchange = instruction.exchange
        results = self.tensors[instruction.src.name]
        with self.streams.on(instruction.stream):
            for part in exchange.results:
                parameter, matrix = exchange.parameters[part.matrix], exchange.layout.matrices[part.matrix]
                if parameter.grad is None:
                    continue
                group = self.groups[id(parameter)]
                lr = _to_scalar(group["lr"])
                adjusted = _adjust_lr(lr, group["adjust_lr_fn"], torch.Size((matrix.rows, matrix.columns)))
                rows = _local_rows(parameter, part)
                update = results[part.at : part.at + part.size(exchange.layout.matrices)].view(rows.shape)
                rows.mul_(1 - lr * group["weight_decay"])
                rows.add_(update.to(torch.bfloat16), alpha=-adjusted)  # the dtype of torch's update
        for parameter in exchange.parameters:
            torch.autograd.graph.increment_version(parameter)

    def optimizer_step(self, instruction: Instruction) -> None:
        """A matrix that no rank has whole: torch's own step, on DTensors."""
        parameter: Any = instruction.parameter
        if parameter.grad is None:
            return
        group = {key: value for key, value in self.groups[id(parameter)].items() if key in _ARGUMENTS}
        momentum = self.state[parameter]["momentum_buffer"]
        with self.streams.on(instruction.stream):
            muon([parameter], [parameter.grad], [momentum], **group, has_complex=False)


def _norms(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm([p.grad._local_tensor for p in parameters]))


class _Unchanged:
    """Whether gradients are the same at two moments, by parameter; on CUDA known a step later, without a wait."""

    def __init__(self, parameters: list[nn.Parameter], before: torch.Tensor) -> None:
        self.parameters, now = parameters, _norms(parameters)
        self._before = before  # is of another stream: its memory is to live until this is known
        same = (now == before) | (now.isnan() & before.isnan())
        self._host = torch.empty(same.shape, dtype=same.dtype, pin_memory=same.is_cuda).copy_(same, non_blocking=True)
        self._there = torch.cuda.current_stream().record_event() if same.is_cuda else None

    @property
    def is_later(self) -> bool:
        return self._there is not None

    def changed(self) -> nn.Parameter | None:
        if self._there is not None:
            self._there.synchronize()
        return next((p for p, same in zip(self.parameters, self._host.tolist()) if not same), None)


class _InBackward:
    """The exchanges of a step that have begun in its backward.

    [Note: gradients are final] A parameter's gradient is the step's when it has been reduced as often as in the plan.
    If the loop reduces less often, the exchange begins when the optimizer steps. If it changes the gradient later,
    the step would not be of that gradient: an error. Norms show it: torch's foreach operations, with which it clips,
    leave the versions of DTensors as they are (torch 2.15)."""

    def __init__(self, beginnings: list[Beginning]) -> None:
        self.beginnings = beginnings
        self.counts: dict[int, int] = {}  # reductions of this step, by parameter's id
        self.begun: list[Beginning] = []
        self.norms: list[torch.Tensor] = []  # of the gradients of each that has begun

    def reduced(self, parameter: nn.Parameter) -> list[Beginning]:
        """Counts a reduction. Returns what begins now."""
        self.counts[id(parameter)] = self.counts.get(id(parameter), 0) + 1
        ready = [
            beginning
            for beginning in self.beginnings
            if id(parameter) in beginning.reductions
            and all(self.counts.get(id(p), 0) == beginning.reductions[id(p)] for p in beginning.parameters)
        ]
        for beginning in ready:
            self.begun.append(beginning)
            self.norms.append(_norms(beginning.parameters))
        return ready


class Muon(Optimizer):
    """torch.optim.Muon of the matrices that a plan exchanges (docs/reference/python.md).

    model: one that shardplan.torch.apply or auto has set up. Or one that fully_shard has sharded, with `plan`, a path
    or what load_plan returned; the call is collective then.
    params: as torch.optim.Muon's, the same matrices in groups; None: one group.
    The other arguments, param_groups and state are torch.optim.Muon's. An expert's matrix in a parameter of three
    dimensions is a matrix like others. A matrix that no rank has whole is stepped as torch.optim.Muon steps it, on
    DTensors.

    The plan says which parameters Muon steps. All others have an optimizer of their own, AdamW say. Raises PlanError,
    naming the parameter, where plan and model differ; ValueError for params that are not the plan's.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (DEFAULT_A, DEFAULT_B, DEFAULT_C),
        eps: float = EPS,
        ns_steps: int = DEFAULT_NS_STEPS,
        adjust_lr_fn: str | None = None,
        params: Iterable | None = None,
        *,
        plan: str | os.PathLike | Any | None = None,
    ) -> None:
        arguments = (lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)
        # torch's own checks of the arguments.
        defaults = torch.optim.Muon([torch.zeros(1, 1)], *arguments).defaults
        self._by_fqn = parameters_of(model)
        self._applied = getattr(model, ATTRIBUTE, None) if plan is None else None
        if plan is None and self._applied is None:
            raise PlanError(
                "Muon follows a plan, which says who owns each matrix: set the model up with shardplan.torch.apply, or "
                "give plan=, made by `shardplan plan --optimizer muon --muon-owners shards`"
            )
        if isinstance(plan, (str, os.PathLike)):
            plan = load_plan(plan)
        if self._applied is not None:
            self._plan, groups = self._applied.plan, self._applied.groups
        else:
            self._plan, groups = plan, _groups(plan, self._by_fqn)
        self._program = bind(self._plan, self._by_fqn, groups)
        own = self._program.parameters
        self._names = {id(parameter): fqn for fqn, parameter in own.items()}
        self._shown = {id(found.parameter): fqn for fqn, found in self._by_fqn.items()}
        super().__init__(own.values() if params is None else params, defaults)
        self._check_groups()
        self._streams = self._make_streams()
        self._hooks: list[Any] = []
        self._has_deviated = False
        self._due: list[_Unchanged] = []  # of the last step
        self._register()
        self._start_step()

    def _register(self) -> None:
        """A loop that has left its plan once may do so again, and what has begun cannot be taken back: from then on
        all exchanges begin in step()."""
        for hook in self._hooks:
            hook.remove()
        if self._has_deviated:
            return
        begun = {id(p): p for beginning in self._program.in_backward for p in beginning.parameters if p.requires_grad}
        own = weakref.WeakMethod(self._reduced)  # a Muon that is dropped is gone, and so are its exchanges

        def reduced(parameter: nn.Parameter) -> None:
            if (call := own()) is not None:
                call(parameter)

        self._hooks = [parameter.register_post_accumulate_grad_hook(reduced) for parameter in begun.values()]

    def _start_step(self) -> None:
        self._step = _Step(self._streams)
        self._in_backward = _InBackward(self._program.in_backward)

    @torch.no_grad()
    def _reduced(self, parameter: nn.Parameter) -> None:
        """A hook: this rank's part of the parameter's gradient is there. Collective where an exchange begins."""
        if self._is_outdated():
            return  # the next step follows the other plan, and begins its exchanges
        if any(id(parameter) in beginning.reductions for beginning in self._in_backward.begun):
            raise RuntimeError(
                f"shardplan: parameter {self._names[id(parameter)]}: another gradient has come, and its exchange has "
                f"begun with the one before. The plan's step reduces {self._in_backward.counts[id(parameter)]} times: "
                "call step() behind that, or plan without --muon-in-backward"
            )
        ready = self._in_backward.reduced(parameter)
        if ready:
            self._check_groups()
        for beginning in ready:
            self._prepare(beginning.parameters)
            for instruction in beginning.instructions:
                if instruction.kind == "update_copy_in":
                    self._streams.follow(instruction.stream)
            self._step.run(beginning.instructions, self)

    def _check_unchanged(self) -> None:
        begun = self._in_backward
        for parameter in (p for beginning in begun.begun for p in beginning.parameters):
            if parameter.grad is None:
                self._refuse_changed(parameter)
        checks = [_Unchanged(beginning.parameters, norms) for beginning, norms in zip(begun.begun, begun.norms)]
        later = any(check.is_later for check in checks)
        due, self._due = (self._due, checks) if later else ([*self._due, *checks], [])
        for check in due:
            if (changed := check.changed()) is not None:
                self._refuse_changed(changed)

    def _refuse_changed(self, parameter: nn.Parameter) -> NoReturn:
        raise RuntimeError(
            f"shardplan: parameter {self._names[id(parameter)]}: its gradient was changed behind the backward, and its "
            "exchange has begun with the one before. Plan without --muon-in-backward for a loop that clips"
        )

    def _make_streams(self) -> Streams:
        parameter = next(iter(self._program.parameters.values()))
        return make_streams(parameter._local_tensor.device, self._program.stream_priorities)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "shardplan: sp.Muon belongs to its model and plan, and is neither copied nor pickled: state_dict() has "
            "what another one loads"
        )

    def _check_groups(self) -> None:
        stepped = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        if left := [fqn for parameter, fqn in self._names.items() if parameter not in stepped]:
            raise ValueError(
                f"shardplan: Muon steps parameter {left[0]} in the plan, and it is in none of the groups of parameters"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if id(parameter) not in self._names:
                self.param_groups.pop()
                name = self._shown.get(id(parameter), "that the model does not have")
                shape = list(parameter.shape)
                raise ValueError(
                    f"shardplan: Muon does not step parameter {name}, of shape {shape}, in the plan: it has an "
                    "optimizer of its own, torch.optim.AdamW say"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own, given = ([len(g["params"]) for g in groups] for groups in (self.param_groups, state_dict["param_groups"]))
        if own != given:
            number = next((i for i, size in enumerate(own) if given[i : i + 1] != [size]), len(own) - 1)
            group = self.param_groups[number]["params"]
            raise ValueError(
                f"shardplan: groups of the state have {given} parameters, those of this Muon {own}; the first "
                f"difference is in group {number}, here of {self._names[id(group[0])]} to {self._names[id(group[-1])]}"
            )
        self._check_momentum(state_dict)
        super().load_state_dict(state_dict)

    def _check_momentum(self, state_dict: dict[str, Any]) -> None:
        """The state numbers parameters in the order of the groups."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, (p for group in self.param_groups for p in group["params"])):
            momentum = state_dict["state"].get(number, {}).get("momentum_buffer")
            if momentum is None:
                continue
            own, given = _words(parameter), _words(momentum)
            if own != given:
                raise ValueError(
                    f"shardplan: parameter {self._names[id(parameter)]}: momentum_buffer of the state expected {own}, "
                    f"found {given}; torch.distributed.checkpoint cuts it anew (set_optimizer_state_dict)"
                )

    def _is_outdated(self) -> bool:
        """The model may follow another plan than at the last step."""
        return self._applied is not None and self._applied.plan is not self._plan

    def _follow(self) -> None:
        if self._is_outdated():
            if self._in_backward.begun:
                raise PlanError("the model's plan has changed between a backward and the step, and exchanges had begun")
            self._plan = self._applied.plan
            self._program = bind(self._plan, self._by_fqn, self._applied.groups)
            if {id(p) for p in self._program.parameters.values()} != self._names.keys():
                raise PlanError("the plan that the model follows now has other matrices for Muon than the one before")
            self._streams = self._make_streams()
            self._has_deviated = True
            self._register()
            self._start_step()

    def _prepare(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every gradient is one that can be stepped, and has its momentum, before anything is changed."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            name = self._names[id(parameter)]
            if torch.is_complex(parameter) or gradient.is_sparse:
                raise RuntimeError(f"shardplan: parameter {name}: Muon takes neither complex nor sparse numbers")
            if not isinstance(gradient, DTensor) or gradient.placements != parameter.placements:
                raise RuntimeError(f"shardplan: parameter {name}: its gradient is not sharded as the parameter is")
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None):
        """Collective. The gradients are read here, clipped or not; those whose exchange has begun are not to change.

        RuntimeError: such a gradient has changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_groups()
        self._follow()
        begun = self._in_backward
        try:
            self._check_unchanged()
            self._prepare(parameter for group in self.param_groups for parameter in group["params"])
            self._streams.arrive()
            for beginning in self._program.in_backward:
                if beginning not in begun.begun:
                    self._step.run(beginning.instructions, self)
            self._step.run(self._program.instructions, self)
        finally:
            self._streams.finish()
            self._start_step()
        return loss

# SPDX-License-Identifier: Apache-2.0
"""Builders of distributed models, as rank 0 of a fake process group sees them. Each is traced in a process of its
own: a process group and DTensor's caches outlive a model."""

import contextlib
import weakref

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

TP = 4


def join(ranks=TP):
    """A builder that reads values runs twice."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """The head is on every rank whole."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def whole(batch):
    return Blocks(), torch.zeros(batch, 16)


def tensor_parallel(batch):
    join()
    model = Blocks()
    mesh = init_device_mesh("cuda", (TP,), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, torch.zeros(batch, 16)


# ---- collectives ----


def all_reduce(x):
    dist.all_reduce(x)
    return x


def all_reduce_async(x):
    dist.all_reduce(x, async_op=True).wait()
    return x


def all_gather_into_tensor(x):
    gathered = x.new_empty(TP * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(gathered, x)
    return gathered


def reduce_scatter_tensor(x):
    part = x.new_empty(x.shape[0] // TP, x.shape[1])
    dist.reduce_scatter_tensor(part, x, async_op=True).wait()
    return part


def all_to_all_single(x):
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


def all_to_all(x):
    received = [torch.empty_like(part) for part in x.chunk(TP)]
    dist.all_to_all(received, list(x.chunk(TP)))
    return received


def all_gather(x):
    gathered = [torch.empty_like(x) for _ in range(TP)]
    dist.all_gather(gathered, x)
    return gathered


def broadcast_of_the_root(x):
    dist.broadcast(x, 0)
    return x


def broadcast_of_another(x):
    dist.broadcast(x, 1)
    return x


def reduce_to_the_root(x):
    dist.reduce(x, 0)
    return x


def reduce_to_another(x):
    dist.reduce(x, 1)
    return x


def batch_isend_irecv(x):
    received = torch.empty_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, received, 3)]):
        work.wait()
    return received


def coalesced(x):
    y = x * 2
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    return x, y


def barrier(x):
    dist.barrier()
    return x


def functional_all_gather(x):
    return functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def functional_all_reduce(x):
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def functional_send(x):
    return torch.ops._c10d_functional.isend(x, 1, 0, dist.group.WORLD.group_name)


def functional_out(x):
    part = x.new_empty(x.shape[0] // TP, x.shape[1])
    group = dist.group.WORLD.group_name
    return torch.ops._c10d_functional.reduce_scatter_tensor_out(x, "sum", TP, group, out=part)


def differentiable_all_to_all(x):
    return differentiable.all_to_all_single(torch.empty_like(x), x)


def isend_and_irecv(x):
    received = torch.empty_like(x)
    works = [dist.isend(x, 1), dist.irecv(received, 3)]
    for work in works:
        work.wait()
    return received


def batch_of_one(x):
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 2)]):
        work.wait()
    return x


def two_batches(x):
    return batch_isend_irecv(x), batch_isend_irecv(x)


def coalesced_of_two_kinds(x):
    gathered = x.new_empty(TP * x.shape[0], x.shape[1])
    with dist._coalescing_manager(device=x.device, async_ops=True) as group:
        dist.all_gather_into_tensor(gathered, x, async_op=True)
        dist.broadcast(x, 0, async_op=True)
    y = gathered.new_zeros(1)
    group.wait()
    return y


def functional_batch(x):
    name = dist.group.WORLD.group_name
    return torch.ops._c10d_functional.batch_p2p_ops(["isend", "irecv"], [1, 3], [0, 0], [x, torch.empty_like(x)], name)


def asynchronous(x):
    """Its product runs beside it; the second wait is for nothing."""
    work = dist.all_reduce(x, async_op=True)
    product = x.new_ones(x.shape[0], x.shape[0]) @ x.new_ones(x.shape)
    work.wait()
    work.wait()
    return x + product


def waited_for_by_its_future(x):
    future = dist.all_reduce(x, async_op=True).get_future()
    product = x.new_ones(x.shape[0], x.shape[0]) @ x.new_ones(x.shape)
    future.wait()
    return x + product


def polled(x):
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    return x


def functional_used_later(x):
    gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    product = x.t() @ x
    return gathered @ product


@torch.library.custom_op("tracer_tests::gathers", mutates_args=())
def _gathers(x: torch.Tensor, group: str) -> torch.Tensor:
    return functional.all_gather_tensor(x, 0, group).wait()


@_gathers.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(TP * x.shape[0], x.shape[1])


def inside_of_an_operator(x):
    return _gathers(x, dist.group.WORLD.group_name)


def never_waited_for(x):
    dist.all_reduce(x, async_op=True)
    return x * 2


def uneven_all_to_all(x):
    """All ranks send their first rank 5 rows."""
    received = x.new_empty(4 * 5, x.shape[1])
    dist.all_to_all_single(received, x, [5] * 4, [5, 1, 1, 1])
    return received


DOORS = [
    all_reduce, all_reduce_async, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, all_to_all,
    all_gather, broadcast_of_the_root, broadcast_of_another, reduce_to_the_root, reduce_to_another, batch_isend_irecv,
    coalesced, barrier, functional_all_gather, functional_all_reduce, functional_send, functional_out,
    differentiable_all_to_all, isend_and_irecv, batch_of_one, two_batches, coalesced_of_two_kinds, functional_batch,
    asynchronous, waited_for_by_its_future, polled, functional_used_later, inside_of_an_operator, never_waited_for,
    uneven_all_to_all,
]


class Communicating(nn.Module):
    def __init__(self, door):
        super().__init__()
        self.linear, self.door = nn.Linear(16, 16, bias=False), door

    def forward(self, x):
        return self.door(self.linear(x))


class Summing(Block):
    def forward(self, x):
        y = super().forward(x).detach()
        dist.all_reduce(y)
        return x + y


GONE = []


def compiled_exchanges(batch):
    """A collective that Dynamo breaks the graph at. Among all objects there is a proxy of one that is gone."""
    join()
    torch._dynamo.config.recompile_limit = 2
    model = nn.Sequential(*(Summing() for _ in range(3)), nn.Linear(16, 16))
    for block in model[:3]:
        block.compile(backend="aot_eager")
    GONE.append(weakref.proxy(nn.Identity()))
    return model, torch.zeros(batch, 16)


def sharded(batch):
    from torch.distributed.fsdp import fully_shard

    join()
    model = Blocks()
    fully_shard(model.layers[1], mesh=init_device_mesh("cuda", (TP,), mesh_dim_names=("dp",)))
    return model, torch.zeros(batch, 16)


def flat(batch):
    from torch.distributed.fsdp import FullyShardedDataParallel

    join()
    model = Blocks()
    flat = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # its constructor asks for a device
    nn.Module.__init__(flat)
    flat._fsdp_wrapped_module = model.layers[1]
    model.layers[1] = flat
    return model, torch.zeros(batch, 16)


def gathers_without_gradient(batch):
    join()
    return Communicating(all_gather_into_tensor), torch.zeros(batch, 16)


def exchanges(batch):
    join()
    return Communicating(differentiable_all_to_all), torch.zeros(batch, 16)


def columns_to_rows(batch):
    """Shards of columns become shards of rows: each rank keeps as many bytes as it had."""
    join()
    mesh = init_device_mesh("cuda", (TP,), mesh_dim_names=("tp",))

    def exchange(x):
        return DTensor.from_local(x, mesh, [Shard(1)]).redistribute(mesh, [Shard(0)]).to_local()

    return Communicating(exchange), torch.zeros(batch, 16)


def of_groups(ranks, names, shape, groups, batch=8):
    """A model that reduces among each of these groups of a mesh."""
    join(ranks)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)

    def reduce_all(x):
        for group in groups(mesh):
            dist.all_reduce(x, group=group)
        return x

    return Communicating(reduce_all), torch.zeros(batch, 16)


def of_a_mesh():
    """Each dimension, two that lie apart under a name, two that lie side by side without one, one of one rank."""

    def groups(mesh):
        apart = mesh["dp", "tp"]._flatten("outer_tp").get_group()
        side_by_side = dist.new_group([0, 1, 2, 3, 4, 5])
        return [mesh.get_group("cp"), mesh.get_group("tp"), apart, side_by_side, mesh.get_group("pp")]

    return of_groups(12, ("pp", "dp", "cp", "tp"), (1, 2, 3, 2), groups)


def of_unknown_name():
    return of_groups(4, ("rows", "tp"), (2, 2), lambda mesh: [mesh.get_group("rows"), mesh.get_group("tp")])


def of_no_dimension():
    return of_groups(4, ("dp", "tp"), (2, 2), lambda mesh: [dist.new_group([0, 3])])


def of_no_mesh(ranks):
    join(4)
    group = dist.new_group(ranks)
    return Communicating(lambda x: functional.all_reduce(x, "sum", group)), torch.zeros(8, 16)


def of_every_other_rank():
    return of_no_mesh([0, 2])


def of_no_digits():
    return of_no_mesh([0, 1, 2])


def placed_along_unknown():
    """No collective is along the dimension: a replicated weight alone lies on it."""
    join()
    model = nn.Linear(16, 16)
    mesh = init_device_mesh("cuda", (TP,), mesh_dim_names=("columns",))
    parallelize_module(model, mesh, ColwiseParallel(use_local_output=False))
    return model, torch.zeros(8, 16), lambda output: output.to_local().sum()


def splits(sent, received):
    join()

    def exchange(x):
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x, received, sent)
        return out

    return Communicating(exchange), torch.zeros(8, 16)


def receives_from_any():
    join()

    def receive(x):
        dist.recv(x)
        return x

    return Communicating(receive), torch.zeros(8, 16)


def splits_of_three():
    return splits([4, 2, 2], [2, 2, 2, 2])


def splits_of_too_few_rows():
    return splits([2, 2, 2, 1], [2, 2, 2, 1])


def splits_to_itself():
    return splits([2, 2, 2, 2], [1, 3, 2, 2])


def splits_that_get_lost():
    return splits([2, 3, 1, 2], [2, 2, 2, 1])


NOVEL = torch.library.Library("_c10d_functional", "FRAGMENT")


def novel_collective(batch):
    NOVEL.define("novel(Tensor x) -> Tensor")
    NOVEL.impl("novel", torch.empty_like, "Meta")
    join()
    return Communicating(torch.ops._c10d_functional.novel), torch.zeros(batch, 16)


# ---- parameters that spmd_types annotates ----


def annotated(kind, group="tp"):
    """A weight that is cut, one with `kind` along a group of the mesh, a bias with a whole gradient."""
    import spmd_types as spmd

    join(8)
    mesh = init_device_mesh("cuda", (2, TP), mesh_dim_names=("data", "tp"))
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16, bias=False))
    other = mesh.get_group("tp") if group == "tp" else dist.new_group(list(range(8)))
    data = {} if group != "tp" else {mesh.get_group("data"): spmd.R}
    tp = mesh.get_group("tp")
    spmd.assert_type(model[0].weight, {tp: spmd.S(0), mesh.get_group("data"): spmd.R})
    spmd.assert_type(model[0].bias, {tp: spmd.I, mesh.get_group("data"): spmd.R})
    spmd.assert_type(model[1].weight, {other: kind(spmd), **data})
    return model, torch.zeros(8, 16)


def annotated_replicated():
    return annotated(lambda spmd: spmd.R)


def annotated_partial():
    return annotated(lambda spmd: spmd.P)


def annotated_elsewhere():
    return annotated(lambda spmd: spmd.S(0), "all")


def annotated_all_replicated():
    """Along both dimensions."""
    import spmd_types as spmd

    join(8)
    mesh = init_device_mesh("cuda", (2, TP), mesh_dim_names=("fsdp", "tp"))
    model = nn.Linear(16, 4)
    for parameter in model.parameters():
        spmd.assert_type(parameter, {mesh.get_group("tp"): spmd.R, mesh.get_group("fsdp"): spmd.R})
    return model, torch.zeros(8, 16)


def annotated_experts():
    """Two dimensions of the same ranks: the weight is cut, the bias is replicated for FSDP."""
    import spmd_types as spmd

    join(8)
    dense = init_device_mesh("cuda", (8,), mesh_dim_names=("fsdp",))
    experts = init_device_mesh("cuda", (8,), mesh_dim_names=("ep",))
    model = nn.Linear(16, 4)
    spmd.assert_type(model.weight, {experts.get_group("ep"): spmd.S(0)})
    spmd.assert_type(model.bias, {dense.get_group("fsdp"): spmd.R})
    return model, torch.zeros(8, 16)


# ---- torchtitan ----

STEP = contextlib.ExitStack()


def titan(tp, backend, batch, seq):
    """torchtitan's llama3 debug model, cut by its own `parallelize`, and its loss."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, spmd_types
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    set_spmd_backend(backend)
    config = llama3_configs["debugmodel"]("flex")
    for layer in config.layers:  # flex attention is compiled
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=True)
    with torch.device("meta"):
        model = config.build()
    if tp > 1:
        join(tp)
        parallelism = ParallelismConfig(tensor_parallel_degree=tp, spmd_backend=backend)
        dims = ParallelDims.from_config(parallelism, tp)
        dims.build_mesh()
        model.parallelize(dims)
        if backend == "spmd_types":  # the whole step runs so (torchtitan.distributed.utils.get_spmd_context)
            spmd_types.set_spmd_meshes(dense_mesh=dims.spmd_dense_mesh(), sparse_mesh=None)
            STEP.enter_context(spmd_types.set_current_spmd_mesh(dims.spmd_dense_mesh()))
    labels = torch.zeros(batch, seq, dtype=torch.long, device="cuda")

    def loss(output):
        if tp == 1 or backend != "spmd_types":
            return cross_entropy_loss(output, labels)
        return cross_entropy_loss(output, labels, global_vocab_size=config.vocab_size)

    return model, torch.zeros(batch, seq, dtype=torch.long), loss


def titan_whole(batch, seq):
    return titan(1, "partial_dtensor", batch, seq)


def titan_dtensor(batch, seq):
    return titan(TP, "partial_dtensor", batch, seq)


def titan_spmd_types(batch, seq):
    return titan(TP, "spmd_types", batch, seq)


# ---- experts ----


class Experts(nn.Module):
    """Tokens go to the ranks of their experts by their counts, and come back."""

    def __init__(self, ranks, experts, chosen):
        super().__init__()
        self.router, self.expert = nn.Linear(16, experts, bias=False), nn.Linear(16, 16, bias=False)
        self.ranks, self.experts, self.chosen = ranks, experts, chosen

    def forward(self, x):
        _, chosen = self.router(x).topk(self.chosen, dim=-1)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        there = torch.empty_like(counts)
        dist.all_to_all_single(there, counts)
        sent, received = (c.view(self.ranks, -1).sum(1).tolist() for c in (counts, there))
        tokens = x[chosen.flatten().argsort() // self.chosen]
        come = self.expert(differentiable.all_to_all_single(x.new_empty(sum(received), 16), tokens, received, sent))
        return differentiable.all_to_all_single(x.new_empty(len(tokens), 16), come, sent, received)


class Mixture(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[: len(x)]
        return x


def experts_of_four_ranks(batch):
    """8 experts, of which a token chooses 2."""
    join()
    return Mixture(Experts(TP, 8, 2) for _ in range(2)), torch.zeros(batch, 16)


def experts_of_ten(batch):
    """The tokens do not divide among them."""
    join(2)
    return Mixture([Experts(2, 10, 2)]), torch.zeros(batch, 16)


class Looped(nn.Module):
    """A loop over the experts that are hit, as transformers has it without grouped products."""

    def __init__(self, experts, chosen):
        super().__init__()
        self.router = nn.Linear(16, experts, bias=False)
        self.ups = nn.Parameter(torch.zeros(experts, 16, 16))
        self.chosen = chosen

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.chosen, dim=-1)
        mask = nn.functional.one_hot(chosen, num_classes=len(self.ups)).permute(2, 1, 0)
        result = torch.zeros_like(x)
        for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            expert = expert[0]
            position, token = torch.where(mask[expert])
            result.index_add_(0, token, x[token] @ self.ups[expert] * weights[token, position, None])
        return result


def looped_experts(batch):
    return Looped(8, 2), torch.zeros(batch, 16)

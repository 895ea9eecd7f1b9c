# SPDX-License-Identifier: Apache-2.0
"""Llama-like models on meshes, dense or with experts, as KempnerForge, torchtitan and NeMo Automodel train them.

Tensor parallelism is DTensor's, with the sequence cut between the products: queries, keys, values, gate and up by
columns, the others by rows, norms on a part of the sequence. The embedding is whole on every rank (KempnerForge); the
head is cut along the vocabulary, and its logits are gathered where the loss is not parallel. Context parallelism
gathers keys and values (torch's `context_parallel` with its default rotation). Experts are exchanged by two
all-to-alls with balanced splits, and multiplied as one grouped product.

Ranks are (data, ep, cp, tp), outermost first.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

from shardplan.tracer.fake_meshes import join_fake_group

_DEGREES = ("ep", "cp", "tp")


def _mesh(row) -> DeviceMesh:
    """The mesh of a process group of as many ranks as the row has."""
    ranks = row["gpus"]
    join_fake_group(ranks)
    sizes = [row.get(name) or 1 for name in _DEGREES]
    inner = 1
    for size in sizes:
        inner *= size
    if ranks % inner:
        raise ValueError(f"{ranks} GPUs are no multiple of {' x '.join(map(str, sizes))} ({', '.join(_DEGREES)})")
    return init_device_mesh("cuda", (ranks // inner, *sizes), mesh_dim_names=("dp_shard", *_DEGREES))


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    return turned.flatten(-2).type_as(x)


def _head_dim(row) -> int:
    return row.get("head_dim") or row["dim"] // row["n_heads"]


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, context: DeviceMesh | None):
        super().__init__()
        self.head_dim, self.context = head_dim, context
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        if self.context is not None:  # causality is deducted nowhere: every rank has as many scores
            k, v = (functional.all_gather_tensor_autograd(t.contiguous(), 2, self.context) for t in (k, v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.context is None, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Experts(nn.Module):
    """Experts of an equal share of the tokens each."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int, mesh: DeviceMesh | None):
        super().__init__()
        self.top_k, self.mesh = top_k, mesh
        self.router = nn.Linear(dim, experts, bias=False)
        for name, rows, columns in (("gate", dim, hidden), ("up", dim, hidden), ("down", hidden, dim)):
            weight = nn.Parameter(torch.empty(experts, rows, columns))
            if mesh is not None:
                weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None))
            self.register_parameter(name, weight)

    def _exchanged(self, rows: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return rows
        return functional.all_to_all_single_autograd(rows, None, None, self.mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        scores = F.softmax(self.router(rows).float(), dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        places = order // self.top_k
        own = [w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.up, self.down)]
        sent = self._exchanged(rows[places])
        count = own[0].shape[0]
        ends = torch.arange(1, count + 1, device=x.device, dtype=torch.int32) * (sent.shape[0] // count)
        gate, up = (torch._grouped_mm(sent, w, offs=ends) for w in own[:2])
        made = self._exchanged(torch._grouped_mm(F.silu(gate) * up, own[2], offs=ends))
        made = made * weights.flatten()[order].unsqueeze(-1).type_as(made)
        return torch.zeros_like(rows).index_add(0, places, made).view_as(x)


class _Block(nn.Module):
    def __init__(self, row, mesh: DeviceMesh):
        super().__init__()
        dim = row["dim"]
        context, expert = (mesh[name] if mesh[name].size() > 1 else None for name in ("cp", "ep"))
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = _Attention(dim, row["n_heads"], row["n_kv_heads"], _head_dim(row), context)
        experts = row.get("experts") or 0
        if experts:
            self.mlp = _Experts(dim, row["ffn_hidden"], experts, row["top_k"], expert)
        else:
            self.mlp = _FeedForward(dim, row["ffn_hidden"])

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, row, mesh: DeviceMesh):
        super().__init__()
        dim, places = row["dim"], row["sequence"] // mesh["cp"].size()
        self.token_embedding = nn.Embedding(row["vocabulary"], dim)
        self.layers = nn.ModuleList(_Block(row, mesh) for _ in range(row["n_layers"]))
        self.norm = nn.RMSNorm(dim)
        self.output_head = nn.Linear(dim, row["vocabulary"], bias=False)
        for name in ("cosine", "sine"):
            table = torch.zeros(places, _head_dim(row) // 2)
            self.register_buffer(name, table, persistent=False)
        self._tensor = mesh["tp"] if mesh["tp"].size() > 1 and not row.get("experts") else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(tokens)
        if self._tensor is not None:
            x = DTensor.from_local(x, self._tensor, [Replicate()], run_check=False)
            x = x.redistribute(placements=[Shard(1)]).to_local()
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.output_head(self.norm(x))


class _ParallelEntropy(torch.autograd.Function):
    """Cross entropy of logits that are cut along the vocabulary: three sums over the ranks, in the forward alone
    (torch.distributed.tensor.parallel.loss_parallel, whose backward has to run inside of its context)."""

    @staticmethod
    def forward(context, logits: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        values = logits.float()
        values = values - functional.all_reduce(values.amax(-1), "max", mesh).unsqueeze(-1)
        scores = values - functional.all_reduce(values.exp().sum(-1), "sum", mesh).log().unsqueeze(-1)
        context.save_for_backward(scores, labels)
        own = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return -functional.all_reduce(own, "sum", mesh).mean()

    @staticmethod
    def backward(context, gradient: torch.Tensor):
        scores, labels = context.saved_tensors
        ones = scores.new_ones((labels.numel(), 1))
        made = scores.exp().scatter_add(-1, labels.unsqueeze(-1), -ones)
        return (made * gradient / labels.numel()).to(torch.bfloat16), None, None


def _cut(model: Llama, mesh: DeviceMesh, parallel_loss: bool) -> None:
    """Tensor parallelism. Beside experts the attention alone is cut, and activations are whole."""
    dense = isinstance(model.layers[0].mlp, _FeedForward)
    columns = ColwiseParallel(input_layouts=Shard(1)) if dense else ColwiseParallel()
    rows = RowwiseParallel(output_layouts=Shard(1)) if dense else RowwiseParallel()
    plan = {f"attention.{name}_proj": columns for name in "qkv"} | {"attention.o_proj": rows}
    if dense:
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        plan |= {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
        logits = Shard(-1) if parallel_loss else Replicate()
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=logits)
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "output_head": head})
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def build(row):
    """The model of a row with gpus, dim, n_layers, n_heads, n_kv_heads, ffn_hidden, vocabulary, sequence; and tp, cp,
    ep, head_dim, experts, top_k, loss_parallel where it has them. Its input; its loss."""
    mesh = _mesh(row)
    parallel_loss = bool(row.get("loss_parallel")) and mesh["tp"].size() > 1 and not row.get("experts")
    with torch.device("meta"):
        model = Llama(row, mesh).to(torch.bfloat16)
    if mesh["tp"].size() > 1:
        _cut(model, mesh["tp"], parallel_loss)
    tokens = torch.zeros(row["micro_batch"], row["sequence"] // mesh["cp"].size(), dtype=torch.long)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        flat, labels = logits.flatten(0, 1), tokens.flatten()
        if parallel_loss:
            return _ParallelEntropy.apply(flat, labels, mesh["tp"])
        return F.cross_entropy(flat.float(), labels)

    return model, tokens, loss


def plan_flags(row) -> list[str]:
    flags = ["--policy", "fsdp2", "--param-dtype", "bfloat16", "--reduce-dtype", "float32", "--optimizer", "adamw"]
    if row.get("no_sync") and row["micro_batches"] > 1:
        flags.append("--no-sync")
    return flags + (["--compile"] if row.get("compile") else [])


build.plan_flags = plan_flags
build.blocks = "layers.*"

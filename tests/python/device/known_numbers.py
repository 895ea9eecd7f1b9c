# SPDX-License-Identifier: Apache-2.0
"""Numbers on a device on which nothing computes: integers and few floats are real, what comes of bulk is settled, peers
give what this rank gives. Run by test_known_numbers.py as rank 5 of 64; every check is an assertion."""

import math
import resource

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import distributed_c10d

RANK, RANKS = 5, 64
CUDA = torch.device("cuda")


def integers_are_real() -> None:
    x = torch.arange(100, device=CUDA)
    assert x.sum().item() == 4950 and (x % 7).bincount().tolist() == [15, 15, 14, 14, 14, 14, 14]
    assert torch.arange(5).to(CUDA, non_blocking=True).tolist() == [0, 1, 2, 3, 4] and x.cpu()[:3].tolist() == [0, 1, 2]
    third = torch.arange(1000, device=CUDA) % 3 == 0
    assert third.nonzero().shape == (334, 1) and torch.arange(1000, device=CUDA)[third].tolist() == list(
        range(0, 1000, 3)
    )
    assert torch.repeat_interleave(torch.tensor([1, 2, 3], device=CUDA)).tolist() == [0, 1, 1, 2, 2, 2]
    assert torch.unique(torch.tensor([3, 1, 3], device=CUDA)).tolist() == [1, 3]
    assert sorted(torch.randperm(50, device=CUDA).tolist()) == list(range(50))
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1)
    many = torch.arange(100_000, device=CUDA) % 64
    assert (
        torch.histc(many, bins=64, min=0, max=64).tolist()
        == torch.histc(many.float(), bins=64, min=0, max=64).tolist()
        == torch.bincount(many).tolist()
    )
    assert (many.float() * 2).long().max().item() == 126  # floats of integers
    assert torch.argsort(many, stable=True)[:2].tolist() == [0, 64]


def bulk_reads_as_zero() -> None:
    w = torch.randn(4096, 4096, device=CUDA)
    assert (w @ w).mean().item() == 0 == w.norm().item() and torch.equal(w, w)
    assert not torch.isnan(w).any() and torch.isfinite(w).all() and (w > 0).sum().item() == 0
    assert math.isfinite((w.sum() / w.sum()).item()) and torch.zeros((), device=CUDA).log().item() == -math.inf
    assert torch.full((3,), -math.inf, device=CUDA).tolist() == [-math.inf] * 3
    assert w.sort(dim=0).indices[:3, 0].tolist() == [0, 1, 2]


def routing_is_balanced() -> None:
    scores = torch.randn(8192, 64, device=CUDA).softmax(-1)
    values, experts = scores.topk(8, -1)
    assert values.shape == experts.shape == (8192, 8)
    assert torch.bincount(experts.flatten(), minlength=64).tolist() == [1024] * 64
    assert all(len(set(row)) == 8 for row in experts[:100].tolist())
    assert F.one_hot(experts, 64).sum((0, 1)).tolist() == [1024] * 64
    assert torch.bincount(scores.argmax(-1), minlength=64).tolist() == [128] * 64
    offsets = torch.cumsum(torch.bincount(experts.flatten(), minlength=64), 0, dtype=torch.int32)
    product = torch._grouped_mm(
        torch.randn(65536, 128, device=CUDA, dtype=torch.bfloat16),
        torch.randn(64, 128, 256, device=CUDA, dtype=torch.bfloat16),
        offs=offsets,
    )
    assert product.shape == (65536, 256)


def masks_are_read() -> None:
    bulk = torch.randn(100_000, 64, device=CUDA)
    mask = torch.arange(100_000, device=CUDA) % 4 == 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert bulk[mask].shape == (25_000, 64) and torch.masked_select(bulk, mask[:, None]).shape == (25_000 * 64,)
    bulk[mask] = torch.randn(25_000, 64, device=CUDA)
    bulk[mask] = 0.0
    ids = torch.arange(100_000, device=CUDA)
    ids[mask] = -1
    assert ids[:5].tolist() == [-1, 1, 2, 3, -1] and ids[~mask].numel() == 75_000
    gathered = bulk[torch.arange(400_000, device=CUDA) % 7]
    assert gathered.shape == (400_000, 64) and (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 64


def freed_integers_leave_the_host() -> None:
    held = lambda: int(open("/proc/self/statm", encoding="ascii").read().split()[1]) >> 8  # MiB
    before = held()
    many = torch.arange(1 << 24, device=CUDA)
    assert many[-1].item() == (1 << 24) - 1 and held() - before >= 128
    del many
    assert held() - before < 64


def graphs_are_captured() -> None:
    weight, side = torch.randn(1024, 1024, device=CUDA), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = weight @ weight
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            other = result + 1
        torch.cuda.current_stream().wait_stream(side)
    assert not torch.cuda.is_current_stream_capturing()
    private = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    assert sum(segment["allocated_size"] for segment in private) >= 2 * result.nbytes
    graph.replay()
    torch.cuda.synchronize()
    del result, other
    graph.reset()
    with torch.cuda.stream(side):
        assert not torch.cuda.is_current_stream_capturing()


def training_goes_on() -> None:
    embedding = torch.nn.Embedding(1000, 512).cuda()
    optimizer = torch.optim.AdamW(embedding.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(1, 3):
        scaler.scale(embedding(torch.randint(0, 1000, (4, 512), device=CUDA)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.state[embedding.weight]["step"].item() == step and scaler.get_scale() == 65536.0
    q = torch.randn(2, 8, 1024, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert torch.nn.Conv2d(3, 64, 7).cuda()(torch.randn(2, 3, 64, 64, device=CUDA)).shape == (2, 64, 58, 58)


def host_initialisation_touches_no_page() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    linear = torch.nn.Linear(1 << 14, 1 << 15)
    with torch.no_grad():
        torch.nn.init.trunc_normal_(linear.weight, std=0.02)
        torch.nn.init.normal_(linear.weight)
        linear.weight.mul_(2).add_(1).clamp_(min=-1, max=1)
        assert not torch.isnan(linear.weight).any() and torch.isfinite(linear.weight).all()
    half = linear.to(torch.bfloat16)
    half.cuda()
    assert torch.cuda.memory_allocated() >= 2 << 29
    # Few floats and integers are computed.
    assert torch.randn(10).std().item() > 0 and torch.arange(200_000).sum().item() == 199_999 * 100_000
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown_mib < 300, grown_mib


def peers_give_what_this_rank_gives() -> None:
    numbers = torch.tensor([RANK, 7], device=CUDA)
    gathered = torch.empty(2 * RANKS, dtype=torch.long, device=CUDA)
    dist.all_gather_into_tensor(gathered, numbers)
    assert gathered.tolist() == [RANK, 7] * RANKS
    dist.all_reduce(numbers)
    assert numbers.tolist() == [RANK * RANKS, 7 * RANKS]
    mean = torch.tensor(2.5, device=CUDA)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.item() == 2.5
    part = torch.empty(1, dtype=torch.long, device=CUDA)
    dist.reduce_scatter_tensor(part, torch.arange(RANKS, device=CUDA))
    assert part.item() == RANK * RANKS
    counts = torch.arange(RANKS, device=CUDA)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    assert received.tolist() == [RANK] * RANKS
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": RANK}] * RANKS
    dist.barrier()
    group = dist.new_group([1, 3, RANK, 7])
    four = torch.ones(1, dtype=torch.long, device=CUDA)
    dist.all_reduce(four, group=group)
    assert four.item() == 4 and dist.get_rank(group) == 2
    splits = [2, 0, 3, 1]
    out = torch.empty(4 * splits[2], dtype=torch.long, device=CUDA)
    dist.all_to_all_single(out, torch.arange(sum(splits), device=CUDA), [splits[2]] * 4, splits, group=group)
    assert out.tolist() == [2, 3, 4] * 4
    pieces = [torch.empty(2, dtype=torch.long, device=CUDA) for _ in range(4)]
    dist.all_gather(pieces, torch.tensor([8, 9], device=CUDA), group=group)
    assert torch.stack(pieces).tolist() == [[8, 9]] * 4
    passed = torch.empty(3, dtype=torch.long, device=CUDA)
    ring = [dist.P2POp(dist.isend, torch.arange(3, device=CUDA), 7, group), dist.P2POp(dist.irecv, passed, 3, group)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert passed.tolist() == [0, 1, 2]
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), process_group=group)
    ddp(torch.randn(8, 64, device=CUDA)).sum().backward()
    # Integers that travel as floats, as some routers send them.
    ids = torch.arange(20_000, device=CUDA).float().view(-1, 1)
    returned = torch.empty(20_000, 1, device=CUDA)
    dist.all_to_all_single(returned, ids, [5000] * 4, [5000] * 4, group=group)
    assert returned.long().flatten().bincount(minlength=20_000)[10_000:15_000].tolist() == [4] * 5000
    in_use = torch.cuda.memory_allocated()
    del ids, returned
    bulk = torch.randn(20_000, device=CUDA)  # takes their memory: its floats are nowhere
    assert torch.cuda.memory_allocated() < in_use and bulk.sort().indices[:3].tolist() == [0, 1, 2]


def main() -> None:
    checks = (
        integers_are_real, bulk_reads_as_zero, routing_is_balanced, masks_are_read, freed_integers_leave_the_host,
        graphs_are_captured, training_goes_on,
    )
    for check in (*checks, host_initialisation_touches_no_page):
        check()
    # Without peers a split does not know its ranks: groups are made anew.
    distributed_c10d._get_split_source = lambda *_: None
    store = _AnyId()  # torch calls it as long as there are groups
    dist.init_process_group("nccl", rank=RANK, world_size=RANKS, store=store, device_id=torch.device("cuda", 0))
    peers_give_what_this_rank_gives()
    print("all checks hold")


class _AnyId(dist.Store):
    """Every key has been set by a peer."""

    def __init__(self):
        super().__init__()
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values.get(key, b"\0" * 128)

    def add(self, key, number):
        self.values[key] = self.values.get(key, 0) + number
        return self.values[key]

    def check(self, keys):
        return True

    def wait(self, keys, timeout=None):
        pass

    def delete_key(self, key):
        return self.values.pop(key, None) is not None

    def clone(self):
        return self

    def set_timeout(self, timeout):
        pass


if __name__ == "__main__":
    main()

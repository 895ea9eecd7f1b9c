# SPDX-License-Identifier: Apache-2.0
"""The layout of an exchange's buffers, beside ranks that are played with tensors: every element carries its number."""

import itertools
import random

import pytest
import torch

from shardplan.torch._muon.pieces import Layout, Matrix


def pieces_of(rank: int, ranks: int, shards: int, matrices: list, numbers: list) -> list:
    """By owner, and matrix of the owner: what the rank has of it. numbers: the parameter of each matrix."""
    result = []
    for owner in range(ranks):
        of_owner = []
        for (shape, first, rows, own), whole in zip(matrices, numbers):
            if own != owner:
                continue
            chunks = torch.chunk(whole, shards)
            mine = chunks[rank % shards].reshape(-1) if rank % shards < len(chunks) else whole.new_empty(0)
            wanted = whole.reshape(-1, shape[-1])[first : first + rows].reshape(-1)
            of_owner.append(mine[torch.isin(mine, wanted)])
        result.append(of_owner)
    return result


def joined(tensors) -> list[int]:
    return torch.cat([torch.empty(0, dtype=torch.long), *tensors]).tolist()


def check(matrices: list, replicas: int, shards: int) -> None:
    """matrices: (shape of the parameter, first row, rows, owner)."""
    ranks = replicas * shards
    numbers, begin = [], 0
    parameters: dict = {}
    for shape, *_ in matrices:
        if shape not in parameters:
            size = torch.Size(shape).numel()
            parameters[shape] = torch.arange(begin, begin + size).view(shape)
            begin += size
        numbers.append(parameters[shape])
    layout = Layout(tuple(Matrix(shape, own, first, rows) for shape, first, rows, own in matrices), ranks, shards)
    held = [pieces_of(rank, ranks, shards, matrices, numbers) for rank in range(ranks)]
    flat = [torch.tensor(joined(itertools.chain(*pieces)), dtype=torch.long) for pieces in held]

    for rank in range(ranks):
        assert layout.size(layout.pieces(rank)) == len(flat[rank])
        for part in layout.pieces(rank):  # each part is these rows of the rank's own piece
            own = torch.chunk(numbers[part.matrix], shards)[rank % shards]
            rows = own.reshape(-1, own.shape[-1])[part.first_local : part.first_local + part.rows].reshape(-1)
            assert rows.tolist() == flat[rank][part.at : part.at + len(rows)].tolist()

    # All ranks send, and each receives what was sent to it in the order of the ranks.
    sent = []
    for rank in range(ranks):
        begin, end = layout.sent_there(rank)
        counts = layout.there(rank)[0]
        assert sum(counts) == end - begin
        sent.append(flat[rank][begin:end].split(counts))
    whole = []
    for rank in range(ranks):
        arrived = [sent[source][rank] for source in range(ranks)]
        assert [len(part) for part in arrived] == layout.there(rank)[1]
        whole.append(torch.tensor(joined(arrived), dtype=torch.long))
        replica = rank // shards * shards
        assert whole[rank].tolist() == joined(
            piece for source in range(replica, replica + shards) for piece in held[source][rank]
        )
        assert layout.size(layout.whole(rank)) == len(whole[rank])
        found: dict = {}
        for part in layout.whole(rank):
            shape, first, *_ = matrices[part.matrix]
            rows = whole[rank][part.at : part.at + part.rows * shape[-1]].tolist()
            expected = numbers[part.matrix].reshape(-1, shape[-1])[first + part.first :][: part.rows].reshape(-1)
            assert rows == expected.tolist()
            found.setdefault(part.matrix, []).extend(rows)
        for number in layout.of_owner(rank):  # whole, its rows in order
            shape, first, rows, _ = matrices[number]
            expected = numbers[number].reshape(-1, shape[-1])[first : first + rows].reshape(-1)
            assert found.get(number, []) == expected.tolist()
        if len(layout.of_owner(rank)) == 1:  # one matrix lies as it is
            assert whole[rank].tolist() == found.get(layout.of_owner(rank)[0], [])

    # Back, each rank has what it had at first, whichever replica it is in.
    returned = []
    for rank in range(ranks):
        counts = layout.back(rank)[0]
        returned.append(whole[rank].repeat(replicas).split(counts))
    for rank in range(ranks):
        arrived = [returned[owner][rank] for owner in range(ranks)]
        assert [len(part) for part in arrived] == layout.back(rank)[1]
        assert joined(arrived) == flat[rank].tolist()


def check_gathered(matrices: list, shards: int) -> None:
    """matrices: (shape of the parameter, first row, rows), which have no owners."""
    numbers, parameters = [], {}
    for shape, *_ in matrices:
        begin = sum(whole.numel() for whole in parameters.values())
        parameters.setdefault(shape, torch.arange(begin, begin + torch.Size(shape).numel()).view(shape))
        numbers.append(parameters[shape])
    layout = Layout(tuple(Matrix(shape, None, first, rows) for shape, first, rows in matrices), shards, shards)
    with_owner = [(*matrix, 0) for matrix in matrices]
    pieces = [joined(pieces_of(rank, shards, shards, with_owner, numbers)[0]) for rank in range(shards)]
    longest = max(map(len, pieces))
    gathered = torch.tensor([element for own in pieces for element in own + [-1] * (longest - len(own))])
    for rank in range(shards):
        assert layout.sizes(rank) == {"update_pieces": longest, "update_whole": longest * shards}
        results = layout.results(rank)
        assert [part._replace(at=part.at - rank * longest) for part in results] == layout.pieces(rank)
        assert joined(gathered[part.at : part.at + part.size(layout.matrices)] for part in results) == pieces[rank]
        assert layout.of_owner(rank) == list(range(len(matrices)))
        for number, (shape, first, rows) in enumerate(matrices):
            parts = [part for part in layout.whole(rank) if part.matrix == number]
            found = joined(gathered[part.at : part.at + part.size(layout.matrices)] for part in parts)
            assert found == numbers[number].reshape(-1, shape[-1])[first : first + rows].flatten().tolist()


def test_without_owners_every_rank_has_all():
    for shards, rows, other in itertools.product(range(1, 5), range(1, 7), (1, 2, 5)):
        experts = [((other, 3, 4), expert * 3, 3) for expert in range(other)]
        check_gathered([((rows, 2), 0, rows), *experts, ((other, 3), 0, other)], shards)


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("replicas", [1, 2])
def test_small_matrices_in_every_way(shards, replicas):
    """All heights up to more than the ranks, and all owners of two matrices."""
    ranks = shards * replicas
    for rows, other, first, second in itertools.product(range(1, 7), (1, 2, 5), range(ranks), range(ranks)):
        check([((rows, 2), 0, rows, first), ((other, 3), 0, other, second)], replicas, shards)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("replicas", [1, 3])
def test_experts_in_every_way(shards, replicas):
    """Matrices of a parameter of three dimensions, the owners in turn, and rows of a matrix that shards cut."""
    ranks = shards * replicas
    for experts, rows, begin in itertools.product(range(1, 6), (1, 2, 3), range(ranks)):
        shape = (experts, rows, 2)
        matrices = [(shape, number * rows, rows, (begin + number) % ranks) for number in range(experts)]
        check(matrices, replicas, shards)
        height = experts * rows
        for cut in range(1, height):
            parts = [((height, 2), 0, cut, begin), ((height, 2), cut, height - cut, (begin + 1) % ranks)]
            check(parts, replicas, shards)


def test_random_exchanges():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(100):
        shards, replicas = draw.randint(1, 8), draw.randint(1, 3)
        matrices = []
        for number in range(draw.randint(1, 6)):
            columns = 100 * number + draw.randint(1, 5)  # shapes tell parameters apart
            if draw.random() < 0.5:
                rows = draw.randint(1, 40)
                matrices.append(((rows, columns), 0, rows, draw.randrange(shards * replicas)))
            else:
                experts, rows = draw.randint(1, 12), draw.randint(1, 4)
                matrices += [
                    ((experts, rows, columns), expert * rows, rows, draw.randrange(shards * replicas))
                    for expert in range(experts)
                ]
        draw.shuffle(matrices)
        check(matrices, replicas, shards)

# SPDX-License-Identifier: Apache-2.0
"""Memory that PyTorch's own host code takes inside of kernels, on a device on which nothing computes.
`record_kernels.py` prints a JSON document with the bytes of the storages that each operator of a list of random ones
reads and writes. In order follow the blocks that it takes ("+", bytes) and gives back ("-", which of those taken), and
where it allocates its outputs ("o"). `tests/simulator/kernels_215.json` is its output with torch 2.15,
`kernels_211.json` with 2.11; `kernel_recordings_test.cc` compares the formulas with both."""

import json
import random

import torch

aten = torch.ops.aten


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _device(tensors) -> list[torch.Tensor]:
    return [
        tensor
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" and _bytes(tensor)
    ]


def _recorded(function):
    torch.cuda.memory._record_memory_history(max_entries=10_000, context=None)
    result = function()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return result, [
        (event["action"], event["addr"], event["size"])
        for event in trace
        if event["action"] in ("alloc", "free_requested")
    ]


def _steps(actions: list, outputs: list[torch.Tensor]) -> list:
    """A block that is not given back while the operator runs is an output."""
    last = {address: index for index, (action, address, _) in enumerate(actions) if action == "alloc"}
    freed = {address: index for index, (action, address, _) in enumerate(actions) if action != "alloc"}
    kept = [index for address, index in last.items() if freed.get(address, -1) < index]
    assert len(kept) == len(outputs), (actions, [_bytes(tensor) for tensor in outputs])
    steps, taken, held = [], 0, {}
    for index, (action, address, size) in enumerate(actions):
        if index in kept:
            steps.append("o")
        elif action == "alloc":
            steps.append(["+", size])
            held[address], taken = taken, taken + 1
        else:
            steps.append(["-", held.pop(address)])
    return steps


def _case(name: str, dtype: torch.dtype, flops: int, reads: list, function) -> dict:
    result, actions = _recorded(function)
    outputs = _device(result if isinstance(result, tuple) else (result,))
    return {
        "op": f"aten.{name}",
        "dtype": str(dtype).removeprefix("torch."),
        "flops": flops,
        "reads": [_bytes(tensor) for tensor in _device(reads)],
        "writes": [_bytes(tensor) for tensor in outputs],
        "steps": _steps(actions, outputs),
    }


def _embedding(draw: random.Random) -> dict:
    indices, rows, width = (
        draw.choice((3072, 3073, draw.randrange(3000, 400_000))), draw.randrange(1, 60_000), draw.choice((1, 8, 72)),
    )
    dtype = draw.choice((torch.bfloat16, torch.float32))
    index = torch.empty(indices, dtype=torch.long, device="cuda")
    gradient = torch.empty(indices, width, dtype=dtype, device="cuda")
    run = lambda: aten.embedding_dense_backward(gradient, index, rows, -1, False)
    return _case("embedding_dense_backward", dtype, 0, [gradient, index], run)


def _heads(batch: int, length: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(batch, length, heads, width, dtype=dtype, device="cuda").transpose(1, 2)


def _flash(draw: random.Random) -> list[dict]:
    batch, groups, repeats, length = (
        draw.randrange(1, 4), draw.randrange(1, 5), draw.choice((1, 4)), draw.randrange(1, 3000),
    )
    width, dtype = 8 * draw.randrange(1, 33), draw.choice((torch.bfloat16, torch.float16))
    q = _heads(batch, length, groups * repeats, width, dtype)
    k, v = (_heads(batch, length, groups, width, dtype) for _ in "kv")
    flops = 4 * q.numel() * length
    forward = _case(
        "_scaled_dot_product_flash_attention",
        dtype,
        flops,
        [q, k, v],
        lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True),
    )
    out, lse, *lengths, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    state = [seed, offset]
    run = lambda: aten._scaled_dot_product_flash_attention_backward(out, q, k, v, out, lse, *lengths, 0.0, True, *state)
    reads = [torch.empty_like(out), q, k, v, out, lse, *state]
    return [forward, _case("_scaled_dot_product_flash_attention_backward", dtype, flops * 5 // 2, reads, run)]


def _efficient(draw: random.Random, most_heads: int) -> dict:
    dtype = draw.choice((torch.float32, torch.bfloat16))
    batch, heads, length = (
        draw.randrange(1, 4), draw.randrange(min(2, most_heads), most_heads + 1), draw.randrange(1, 1500),
    )
    keys, width = draw.choice((length, draw.randrange(1, 1500))), 8 * draw.randrange(1, 40)
    q, k, v = (_heads(batch, size, heads, width, dtype) for size in (length, keys, keys))
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    wanted = [True, True, True, False]
    gradient = torch.empty_like(out)
    run = lambda: aten._scaled_dot_product_efficient_attention_backward(
        gradient, q, k, v, None, out, lse, seed, offset, 0.0, wanted
    )
    case = _case(
        "_scaled_dot_product_efficient_attention_backward",
        dtype,
        10 * q.numel() * keys,
        [gradient, q, k, v, out, lse],
        run,
    )
    return {**case, "sequences": batch}


def _sum(draw: random.Random, rows: int, width: int, dtype: torch.dtype) -> dict:
    """A parameter's gradient: over all but the last dimension. With one column: over everything."""
    shape = (draw.choice((1, 2, 3)), rows, width)
    values = torch.empty(shape, dtype=dtype, device="cuda")
    return _case("sum", dtype, 0, [values], lambda: aten.sum.dim_IntList(values, [0, 1]))


def _workspaces_are_given_back() -> bool:
    before, square = torch.cuda.memory_allocated(), torch.empty(2, 2, device="cuda")
    aten.mm(square, square)
    del square
    return torch.cuda.memory_allocated() == before


def _product(draw: random.Random) -> list[dict]:
    dtype, rows, inner, columns = (
        draw.choice((torch.float32, torch.bfloat16)),
        *(draw.choice((1, 2, 48, draw.randrange(1, 3000))) for _ in range(3)),
    )
    empty = lambda *shape: torch.empty(shape, dtype=dtype, device="cuda")
    a, b = empty(rows, inner), draw.choice((empty(inner, columns), empty(columns, inner).t()))
    row, matrix = empty(columns), empty(rows, columns)
    vector = empty(inner)
    batch = empty(3, inner, columns)
    flops = 2 * rows * inner * columns
    many = empty(3, rows, inner)
    return [
        _case("mm", dtype, flops, [a, b], lambda: aten.mm(a, b)),
        _case("addmm", dtype, flops, [row, a, b], lambda: aten.addmm(row, a, b)),
        _case("addmm", dtype, flops, [matrix, a, b], lambda: aten.addmm(matrix, a, b)),
        _case("bmm", dtype, 3 * flops, [many, batch], lambda: aten.bmm(many, batch)),
        _case("mv", dtype, 2 * rows * inner, [a, vector], lambda: aten.mv(a, vector)),
        _case("dot", dtype, 2 * inner, [vector, vector], lambda: aten.dot(vector, vector)),
    ]


def main() -> None:
    draw = random.Random(16)
    cases = []
    for _ in range(12):
        cases += [_embedding(draw), *_flash(draw), _efficient(draw, 39)]
    cases += [_efficient(draw, 1) for _ in range(6)]
    for dtype in (torch.float32, torch.bfloat16) * 20:
        rows = draw.choice((3, 100, 1024, draw.randrange(1, 100_000)))
        cases.append(_sum(draw, rows, draw.choice((1, 2, 30, 128, 1536, 8192, draw.randrange(1, 5000))), dtype))
    for dtype in (torch.float32, torch.bfloat16):  # more than 2 GiB, or nearly
        cases += [_sum(draw, rows, 4096, dtype) for rows in (131_072, 262_145)]
    if _workspaces_are_given_back():
        for _ in range(12):
            cases += _product(draw)
    print("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]")


if __name__ == "__main__":
    main()

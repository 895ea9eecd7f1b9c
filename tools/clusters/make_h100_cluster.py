#!/usr/bin/env python3
"""Makes the H100 SXM cluster documents from measured tables.

Usage:
    make_h100_cluster.py COLLECTIVES.csv MATMULS.csv OUT_DIR

COLLECTIVES.csv: device,collective,concurrent_groups,ranks_per_group,full_tensor_bytes,duration_ns
MATMULS.csv:     device,dtype,batch,m,n,k,duration_ns
Writes h100_sxm_8.json, h100_sxm_64.json and h100_sxm_1024.json. docs/simulator.md explains every figure.
"""
import bisect
import collections
import csv
import json
import math
import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "python"))
from shardplan.files import write_text  # noqa: E402

COLLECTIVE_DEVICE = "h100-sxm"
MATMUL_DEVICE = "h100-sxm"
SOURCE = "public performance tables of XLA, H100 SXM"

# NVIDIA H100 SXM data sheet, dense.
PEAK_FLOPS = {"bf16": 989_400_000_000_000, "f32": 494_700_000_000_000}
ELEMENT_BYTES = {"bf16": 2, "f32": 4}
# float16 has bfloat16's peak and gets its measured curve; float32 matmuls were measured on TF32 tensor cores.
DTYPES = [("bfloat16", "bf16"), ("float16", "bf16"), ("float32", "f32")]
MEMORY_BYTES_PER_SECOND = 3_350_000_000_000
# A matmul counts for the efficiency curve when moving its operands once takes less than this part of its time.
ARITHMETIC_BOUND = 0.7

DEVICE = {
    "name": "H100 SXM 80GB",
    "memory_bytes": 84_943_962_112,
    "context_bytes": 545_259_520,
    "memory_bytes_per_second": MEMORY_BYTES_PER_SECOND,
    "memory_efficiency_ppm": 850_000,
    "vector_flops_per_second": 66_900_000_000_000,
    "kernel_overhead_ns": 2_000,
}
# Typical of eager PyTorch on a current server core; calibrate for your own host.
HOST = {
    "operator_issue_ns": 7_000,
    "collective_issue_ns": 30_000,
    "copy_issue_ns": 15_000,
    "allocate_ns": 1_000,
    "event_ns": 1_500,
    "trigger_ns": 30_000,
    # Two sockets of 8 channels DDR5-4800 are 614.4 GB/s (Intel Xeon Platinum 8480C, NVIDIA DGX H100 data sheet); a rank has an
    # eighth. Four fifths are what STREAM reaches. It needs the rank's share of the cores: OMP_NUM_THREADS of torchrun is 1.
    "memory_bytes_per_second": 61_440_000_000,
}
# NDR InfiniBand, one 400 Gbit/s adapter a GPU: 48 of the 50 GB/s of the wire; the latency is what NCCL's own tuning
# model assumes for a ring step over a network with the simple protocol.
NETWORK = {"name": "network", "latency_ns": 14_000, "bytes_per_second": 48_000_000_000}
KINDS = {"all-gather": "all_gather", "reduce-scatter": "reduce_scatter", "all-reduce": "all_reduce"}


def isotonic(groups):
    """The non-decreasing sequence nearest in absolute difference: one value for each group of samples (pool adjacent
    violators with medians, so that a single outlier moves nothing but itself)."""
    blocks = []
    for group in groups:
        blocks.append([list(group), 1])
        while len(blocks) > 1 and statistics.median(blocks[-2][0]) > statistics.median(blocks[-1][0]):
            samples, count = blocks.pop()
            blocks[-1][0] += samples
            blocks[-1][1] += count
    return [statistics.median(samples) for samples, count in blocks for _ in range(count)]


def collective_tables(path):
    """Tables by (kind, groups, ranks); durations made monotone in log space."""
    measured = collections.defaultdict(dict)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["device"] != COLLECTIVE_DEVICE:
                continue
            key = (row["collective"], int(row["concurrent_groups"]), int(row["ranks_per_group"]))
            measured[key][int(row["full_tensor_bytes"])] = int(row["duration_ns"])
    tables = []
    for (kind, groups, ranks), points in measured.items():
        sizes = sorted(points)
        logs = isotonic([math.log(points[size])] for size in sizes)
        moved = [abs(math.exp(log) / points[size] - 1) for size, log in zip(sizes, logs)]
        large = max(change for size, change in zip(sizes, moved) if size >= 1 << 20)
        print(f"{kind} {groups}x{ranks}: smoothing moved {sum(m > 0.005 for m in moved)} of {len(sizes)} points, "
              f"by at most {max(moved):.0%}, from 1 MiB on {large:.0%}")
        tables.append({
            "kind": KINDS[kind], "ranks": ranks,
            **({"concurrent_groups": groups} if groups > 1 else {}),  # documents leave out defaults
            "link": "nvlink",
            "points": [{"full_tensor_bytes": size, "duration_ns": round(math.exp(log))}
                       for size, log in zip(sizes, logs)],
            "source": SOURCE,
        })
    order = list(KINDS.values())
    return sorted(tables, key=lambda t: (order.index(t["kind"]), -t["ranks"]))


def nvlink(tables):
    """Alpha and beta for numbers of ranks that were not measured: one line through the one-pass collectives."""
    one_pass = [t for t in tables if t["kind"] != "all_reduce"]
    rates = []
    steps, delays = [], []
    for table in one_pass:
        last, ranks = table["points"][-1], table["ranks"]
        rates.append(last["full_tensor_bytes"] * (ranks - 1) / ranks / last["duration_ns"] * 1e9)
        steps.append(ranks - 1)
        delays.append(statistics.median(
            p["duration_ns"] for p in table["points"] if p["full_tensor_bytes"] <= 65536))
    slope = statistics.linear_regression(steps, delays).slope
    return {"name": "nvlink", "latency_ns": round(slope), "bytes_per_second": round(statistics.median(rates))}


def efficiency_curve(path, dtype):
    """[(flops, efficiency ppm)]: the median at each number of FLOPs, made monotone; and the errors of using it."""
    samples = collections.defaultdict(list)
    rows = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["device"] != MATMUL_DEVICE or row["dtype"] != dtype:
                continue
            b, m, n, k, duration_ns = (int(row[x]) for x in ("batch", "m", "n", "k", "duration_ns"))
            flops = 2 * b * m * n * k
            moved = ELEMENT_BYTES[dtype] * b * (m * k + k * n + m * n)
            rate = MEMORY_BYTES_PER_SECOND * DEVICE["memory_efficiency_ppm"] / 1e6
            memory_ns = moved / rate * 1e9
            rows.append((flops, memory_ns, duration_ns))
            if memory_ns < ARITHMETIC_BOUND * duration_ns:
                samples[flops].append(flops / (PEAK_FLOPS[dtype] * duration_ns * 1e-9))
    levels = sorted(samples)
    smooth = isotonic(samples[f] for f in levels)
    curve = list(zip(levels, smooth))
    report_errors(dtype, rows, curve)
    return curve


def report_errors(dtype, rows, curve):
    """Prints how far the roofline with this curve is from the measurements it was made from."""
    levels = [f for f, _ in curve]
    errors = []
    for flops, memory_ns, duration_ns in rows:
        i = min(max(bisect.bisect_right(levels, flops), 1), len(levels) - 1)
        (f0, e0), (f1, e1) = curve[i - 1], curve[i]
        part = min(max(math.log(flops / f0) / math.log(f1 / f0), 0), 1)
        arithmetic_ns = flops / (PEAK_FLOPS[dtype] * (e0 + part * (e1 - e0))) * 1e9
        error = abs(max(arithmetic_ns, memory_ns, DEVICE["kernel_overhead_ns"]) / duration_ns - 1)
        errors.append((flops >= 10**10, error))
    for name, chosen in (("all", [e for _, e in errors]), (">= 1e10 FLOPs", [e for big, e in errors if big])):
        chosen.sort()
        print(f"{dtype} {name}: {len(chosen)} matmuls, error median {statistics.median(chosen):.1%}, "
              f"90 % below {chosen[int(0.9 * len(chosen))]:.1%}, worst {chosen[-1]:.1%}")


def flat(value):
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def lines(items, indent):
    """A JSON list with one element a line."""
    pad = " " * indent
    return "[\n" + ",\n".join(f"{pad}  {flat(item)}" for item in items) + f"\n{pad}]"


def block(value, indent, listed=()):
    """A JSON object with one member a line; members named in `listed` are lists with one element a line."""
    pad = " " * indent
    members = []
    for key, item in value.items():
        text = lines(item, indent + 2) if key in listed else flat(item)
        members.append(f'{pad}  "{key}": {text}')
    return "{\n" + ",\n".join(members) + f"\n{pad}}}"


def document(name, ranks, rates, tables, links):
    device = dict(DEVICE)
    overhead = device.pop("kernel_overhead_ns")
    head = block(device, 2)[:-4]
    matmul = ",\n".join(" " * 6 + block(rate, 6, ("efficiency",)) for rate in rates)
    device_text = f'{head},\n    "matmul": [\n{matmul}\n    ],\n    "kernel_overhead_ns": {overhead}\n  }}'
    table_text = ",\n".join(" " * 4 + block(table, 4, ("points",)) for table in tables)
    return (
        f'{{\n  "schema": "shardplan.cluster/1",\n  "name": {flat(name)},\n  "ranks": {ranks},\n'
        f'  "device": {device_text},\n  "host": {block(HOST, 2)},\n'
        f'  "links": {lines(links, 2)},\n  "collectives": [\n{table_text}\n  ],\n'
        f'  "compute_rate_while_communicating_ppm": 900000,\n'
        f'  "communication_rate_while_computing_ppm": 950000,\n'
        f'  "host_link_bytes_per_second": 55000000000\n}}\n')


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    collectives, matmuls, out = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    tables = collective_tables(collectives)
    inner = nvlink(tables)
    print(f"nvlink where nothing was measured: {inner['latency_ns']} ns a step, "
          f"{inner['bytes_per_second'] / 1e9:.1f} GB/s")
    curves = {dtype: efficiency_curve(matmuls, dtype) for dtype in ELEMENT_BYTES}
    rates = [{"dtype": dtype, "flops_per_second": PEAK_FLOPS[measured],
              "efficiency": [{"flops": f, "efficiency_ppm": round(e * 1e6)} for f, e in curves[measured]]}
             for dtype, measured in DTYPES]
    for ranks in (8, 64, 1024):
        links = [inner] if ranks <= 8 else [inner, NETWORK]
        name = f"{ranks} x H100 SXM"
        write_text(out / f"h100_sxm_{ranks}.json", document(name, ranks, rates, tables, links))


if __name__ == "__main__":
    main()

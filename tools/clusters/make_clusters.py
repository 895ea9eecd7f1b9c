#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the shipped cluster documents from measured tables and data sheets.

Usage:
    make_clusters.py SHARDPLAN OUT_DIR
    make_clusters.py --runs SHARDPLAN OUT_DIR      *_2023_*, fitted to eight runs of each GPU: behind the first form

SHARDPLAN is the built command: `shardplan cost` does the fitting. tables/ has what others measured, measured/ what
`shardplan calibrate` measured. docs/internals/simulator.md explains every figure.
"""
import collections
import csv
import io
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "python"))
from shardplan.calibrate import fit  # noqa: E402
from shardplan.files import write_text  # noqa: E402
from shardplan.runs import documents  # noqa: E402

TABLES = pathlib.Path(__file__).parent / "tables"
COLLECTIVES, MATMULS, RUNS = (TABLES / f"{name}.csv" for name in ("collectives", "matmuls", "training_runs_2023"))
SOURCE = "public performance tables of XLA"

# Data sheets, dense. float32 means TF32 tensor cores. `as` names the device whose measurements stand for it.
DEVICES = {
    "a100_80": {
        "name": "A100 SXM 80GB",
        "memory_bytes": 85_095_874_560,
        "memory_bytes_per_second": 2_039_000_000_000,
        "bf16": 312_000_000_000_000,
        "f32": 156_000_000_000_000,
        "vector": 19_500_000_000_000,
        "nvlink": 300,
        "table_name": "a100-sxm",
        "multiprocessors": 108,
        # By the published run of Llama 3 8B on 64 (every second layer recomputed) that `dev/predictions --published`
        # has; its other rows were not used. With the H100's clock under load all of them come out 7 to 11 % too slow.
        "clock_ppm": 951_000,
    },
    "h100_sxm": {
        "name": "H100 SXM 80GB", "memory_bytes": 84_943_962_112, "memory_bytes_per_second": 3_350_000_000_000,
        "bf16": 989_400_000_000_000, "f32": 494_700_000_000_000, "vector": 66_900_000_000_000, "nvlink": 450,
        "table_name": "h100-sxm", "multiprocessors": 132,
    },
    "h100_96_500w": {
        "name": "H100 SXM 96GB at 500 W",
        "memory_bytes": 95 * 2**30,
        "memory_bytes_per_second": 2_400_000_000_000,
        "bf16": 989_400_000_000_000,
        "f32": 494_700_000_000_000,
        "vector": 66_900_000_000_000,
        "nvlink": 450,
        "table_name": "h100-sxm-96-500w",
        "multiprocessors": 132,
        "as": "h100-sxm",
        # By the published eager run on 8 of them; the compiled one and those on 128 were not used.
        "clock_ppm": 715_000,
    },
    "h200": {
        "name": "H200 SXM 141GB",
        "memory_bytes": 150_754_820_096,
        "memory_bytes_per_second": 4_800_000_000_000,
        "bf16": 989_400_000_000_000,
        "f32": 494_700_000_000_000,
        "vector": 66_900_000_000_000,
        "nvlink": 450,
        "table_name": "h200",
        "multiprocessors": 132,
        "as": "h100-sxm",  # the same processor and links with other memory
    },
    "b200": {
        "name": "B200 SXM 180GB", "memory_bytes": 191_500_000_000, "memory_bytes_per_second": 7_700_000_000_000,
        "bf16": 2_250_000_000_000_000, "f32": 1_125_000_000_000_000, "vector": 75_000_000_000_000, "nvlink": 900,
        "table_name": "b200", "multiprocessors": 148,
    },
    "gb200_nvl72": {
        "name": "GB200 186GB",
        "memory_bytes": 198_600_000_000,
        "memory_bytes_per_second": 8_000_000_000_000,
        "bf16": 2_500_000_000_000_000,
        "f32": 1_250_000_000_000_000,
        "vector": 80_000_000_000_000,
        "nvlink": 900,
        "table_name": "gb200-nvl72",
        "multiprocessors": 148,
        "as": "b200",  # matrix rates; its collectives were measured
    },
}
ELEMENT_BYTES = {"bf16": 2, "f32": 4}
# float16 has bfloat16's peak and gets its measured shapes.
DTYPES = [("bfloat16", "bf16"), ("float16", "bf16"), ("float32", "f32")]
MEMORY_EFFICIENCY_PPM = 850_000
# A matmul counts for the efficiency curve when moving its operands once takes less than this part of its time.
ARITHMETIC_BOUND = 0.7

# Typical of eager PyTorch on a current server core; calibrate for your own host.
HOST = {
    "operator_issue_ns": 7_000,
    "collective_issue_ns": 30_000,
    "copy_issue_ns": 15_000,
    "allocate_ns": 1_000,
    "event_ns": 1_500,
    "trigger_ns": 30_000,
    # Two sockets of 8 channels DDR5-4800 are 614.4 GB/s (Intel Xeon Platinum 8480C, NVIDIA DGX H100 data sheet); a rank
    # has an eighth. Four fifths are what STREAM reaches. It needs the rank's share of the cores: OMP_NUM_THREADS of
    # torchrun is 1.
    "memory_bytes_per_second": 61_440_000_000,
}
# Rings of eight ranks reach this part of a link's data sheet (H100: 350 of 450 GB/s).
NVLINK_REACHED = 0.78
# NCCL's tuning model: latencies of a ring step and parts of the rate, by protocol. LL moves a flag with every word,
# LL128 one with every 120 bytes.
INNER_PROTOCOLS = [
    {"name": "LL", "latency_ns": 600, "rate_ppm": 330_000},
    {"name": "LL128", "latency_ns": 1_900, "rate_ppm": 920_000},
]
OUTER_PROTOCOLS = [
    {"name": "LL", "latency_ns": 2_700, "rate_ppm": 250_000},
    {"name": "LL128", "latency_ns": 4_000, "rate_ppm": 920_000},
]
BASE_LATENCY_NS = 8_400
RING_STEP_NS = {"inner": 3_400, "outer": 14_000}
# Collectives reach this part of the wire: 45 of 50 GB/s through a 400 Gbit/s adapter.
WIRE_REACHED = 0.9
GIGABIT = 125_000_000

# Name, device, ranks, ranks in a node, Gbit/s of a node's adapters together.
CLUSTERS = [
    ("a100_80_8", "a100_80", 8, 8, 1600),
    ("a100_80_64", "a100_80", 64, 8, 1600),
    ("h100_sxm_8", "h100_sxm", 8, 8, 3200),
    ("h100_sxm_64", "h100_sxm", 64, 8, 3200),
    ("h100_sxm_256", "h100_sxm", 256, 8, 3200),
    ("h100_sxm_1024", "h100_sxm", 1024, 8, 3200),
    ("h100_96_500w_8", "h100_96_500w", 8, 8, 3200),
    ("h100_96_500w_128", "h100_96_500w", 128, 8, 3200),
    ("h100_sxm_64_400g", "h100_sxm", 64, 8, 400),
    ("h100_sxm_64_100g", "h100_sxm", 64, 8, 100),
    ("h200_8", "h200", 8, 8, 3200),
    ("h200_64", "h200", 64, 8, 3200),
    ("h200_64_nodes_of_4", "h200", 64, 4, 1600),
    ("b200_8", "b200", 8, 8, 3200),
    ("b200_64", "b200", 64, 8, 3200),
    ("gb200_nvl72_72", "gb200_nvl72", 72, 72, 28_800),
    ("gb200_nvl72_576", "gb200_nvl72", 576, 72, 28_800),
]

# Software of 2023, which no table of today's holds for. FlashAttention and FlashAttention-2 by sequence (Dao 2023,
# figures 4 to 7, causal): s / (s + 600) of their rate, which counts both triangles here. GPUs of one cluster differ by
# 8 % from the slowest to the fastest (Sinha et al., SC22), of which a standard deviation is about 2.5 %.
HALF_RATE_SEQUENCE = 600
SPREAD_PPM = 25_000
UNSURE_2023 = {"matmul": 100_000, "attention": 300_000, "memory": 200_000}
RUNS_RANKS = 512
# GPUs of the table of runs, and the document that each fit starts from.
OF_2023 = [("h100_80gb", "h100_sxm_1024"), ("a100_80gb", "a100_80_64")]
# The same processor with other memory (data sheet: 40 GB of HBM2 at 1,555 GB/s): the fitted document with these.
A100_40 = {"name": "A100 SXM 40GB", "memory_bytes": 42_298_834_944, "memory_bytes_per_second": 1_555_000_000_000}


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


def efficiency_curve(device, dtype, peak, memory_bytes_per_second):
    """[(flops, efficiency)]: the median at each number of FLOPs, made monotone. For operators whose shape a document
    does not know."""
    samples = collections.defaultdict(list)
    with open(MATMULS, newline="") as file:
        for row in csv.DictReader(file):
            if row["device"] != device or row["dtype"] != dtype:
                continue
            b, m, n, k, duration_ns = (int(row[x]) for x in ("batch", "m", "n", "k", "duration_ns"))
            flops = 2 * b * m * n * k
            moved = ELEMENT_BYTES[dtype] * b * (m * k + k * n + m * n)
            memory_ns = moved / (memory_bytes_per_second * MEMORY_EFFICIENCY_PPM / 1e6) * 1e9
            if memory_ns < ARITHMETIC_BOUND * duration_ns:
                samples[flops].append(flops / (peak * duration_ns * 1e-9))
    levels = sorted(samples)
    return list(zip(levels, isotonic(samples[f] for f in levels)))


def matmul_rates(key):
    """Peaks and efficiency curves. A device without measurements has the H100's curve, at FLOPs that take as long."""
    own = DEVICES[key]
    measured_as = own.get("as", own["table_name"])
    rates = []
    for dtype, column in DTYPES:
        source = next((d for d in DEVICES.values() if d["table_name"] == measured_as), own)
        curve = efficiency_curve(measured_as, column, source[column], source["memory_bytes_per_second"])
        if not curve:
            source = DEVICES["h100_sxm"]
            curve = efficiency_curve(source["table_name"], column, source[column], source["memory_bytes_per_second"])
        scale = own[column] / source[column]
        rates.append(
            {
                "dtype": dtype,
                "flops_per_second": own[column],
                "efficiency": [
                    {"flops": round(f * scale), "efficiency_ppm": min(1_000_000, round(e * 1e6))} for f, e in curve
                ],
            }
        )
    return rates


def measured_h100():
    path = str(pathlib.Path(__file__).parent / "measured" / "h100_sxm.json")
    return fit.checked(path, fit.document(path))


def kernels(key):
    """Attention and kernels bound by memory: measured on an H100 by `shardplan calibrate`; for others its curves at
    their own peaks."""
    own, measured_on = DEVICES[key], DEVICES["h100_sxm"]
    measured = measured_h100()
    memory = fit.memory_rates(measured["memory"])
    reached = memory["memory_bytes_per_second"] / measured_on["memory_bytes_per_second"]
    moved = own["memory_bytes_per_second"] / measured_on["memory_bytes_per_second"]
    curve = [
        {"moved_bytes": round(p["moved_bytes"] * moved), "efficiency_ppm": round(p["efficiency_ppm"] * reached)}
        for p in memory["memory_efficiency"]
    ]
    described = {
        "clock_ppm": own.get("clock_ppm", fit.clock_ppm(measured)), "memory_efficiency_ppm": MEMORY_EFFICIENCY_PPM,
        "memory_efficiency": curve,
    }
    faster = own["bf16"] / measured_on["bf16"]
    for field, which, products in (("attention", "forward", 4), ("attention_backward", "backward", 10)):
        described[field] = []
        for dtype in ("bfloat16", "float16"):
            for rate in fit.attention_rates(measured["attention"], which, products):
                points = [p | {"flops": round(p["flops"] * faster)} for p in rate["efficiency"]]
                described[field].append(
                    {"dtype": dtype, "flops_per_second": round(rate["flops_per_second"] * faster), "efficiency": points}
                )
    return described


def links(key, ranks, in_node, gigabits):
    own = DEVICES[key]
    inner = {
        "name": "nvlink", "latency_ns": RING_STEP_NS["inner"],
        "bytes_per_second": round(own["nvlink"] * NVLINK_REACHED * 1e9), "base_latency_ns": BASE_LATENCY_NS,
        "protocols": INNER_PROTOCOLS, "algorithms": ["ring", "tree"] + (["nvls"] if own["nvlink"] >= 450 else []),
    }
    outer = {
        "name": "network", "latency_ns": RING_STEP_NS["outer"],
        "bytes_per_second": round(gigabits * GIGABIT * WIRE_REACHED / in_node), "base_latency_ns": BASE_LATENCY_NS,
        "protocols": OUTER_PROTOCOLS,
        "algorithms": ["ring", "tree", "pat"] + (["nvls"] if own["nvlink"] >= 450 else []),
    }
    return [inner] if ranks <= in_node else [inner, outer]


def renamed(path, out, column_device, name):
    """The table's rows of one device under another's name: what was measured stands for it."""
    with open(path, newline="") as file:
        rows = csv.DictReader(file)
        text = io.StringIO()
        writer = csv.DictWriter(text, rows.fieldnames)
        writer.writeheader()
        writer.writerows(row | {"device": name} for row in rows if row["device"] == column_device)
    write_text(out, text.getvalue())


def sources(key, ranks, in_node):
    """The source of each figure and how far it may be off: the fit's own error, else the difference among machines."""
    own = DEVICES[key]
    measured = key not in ("a100_80",)
    on_h100 = key == "h100_sxm"
    borrowed = f"as {own['as']}" if own.get("as") else ""
    # Attention and memory of every device come from one measured H100; the tables of products name no release.
    said = {"measured_with": f"torch {measured_h100()['device']['torch']}"}
    notes = [*([borrowed] if borrowed else []), *(["clock by published runs"] if "clock_ppm" in own else [])]
    return [
        {
            "figure": "matmul", "origin": "measured" if measured else "data_sheet",
            "off_ppm": (50_000 if not borrowed else 100_000) if measured else 150_000,
            **({"note": "; ".join(notes)} if notes else {}),
        },
        {"figure": "attention", "origin": "measured", "off_ppm": 100_000, **said}
        if on_h100
        else {
            "figure": "attention", "origin": "guess", "off_ppm": 300_000, "note": "as the H100 at its own peak", **said,
        },
        {"figure": "memory", "origin": "measured", "off_ppm": 150_000, "note": "kernels differ by that", **said}
        if on_h100
        else {
            "figure": "memory", "origin": "data_sheet", "off_ppm": 200_000,
            "note": "as much of the peak as the H100 reaches", **said,
        },
        {"figure": "kernel_overhead", "origin": "guess", "off_ppm": 500_000},
        {
            "figure": "host", "origin": "guess", "off_ppm": 500_000,
            "note": "typical of eager PyTorch on a current server core",
        },
        {"figure": "host_memory", "origin": "guess", "off_ppm": 300_000},
        {"figure": "host_link", "origin": "guess", "off_ppm": 100_000},
        *([{"figure": "collectives", "origin": "measured", "off_ppm": 40_000}] if measured else []),
        {
            "figure": "inner_link", "origin": "fitted" if measured else "data_sheet",
            "off_ppm": 100_000 if measured else 200_000,
        },
        *(
            [
                {
                    "figure": "network", "origin": "data_sheet", "off_ppm": 150_000,
                    "note": "90 % of the wire, NCCL's latencies",
                }
            ]
            if ranks > in_node
            else []
        ),
        {"figure": "compute_slowdown", "origin": "guess", "off_ppm": 500_000},
        {"figure": "communication_slowdown", "origin": "guess", "off_ppm": 500_000},
    ]


def document(key, name, ranks, in_node, gigabits):
    own = DEVICES[key]
    network = (
        ""
        if ranks <= in_node or (gigabits, in_node) in ((3200, 8), (1600, 8), (28_800, 72))
        else f", {gigabits} Gbit/s a node"
    )
    return {
        "schema": "shardplan.cluster/1",
        "name": f"{ranks} x {own['name'].rsplit(' ', 1)[0]}{network}",
        "ranks": ranks,
        **({"ranks_per_node": in_node} if in_node != 8 else {}),
        "device": {
            "name": own["name"], "memory_bytes": own["memory_bytes"], "context_bytes": 545_259_520,
            "memory_bytes_per_second": own["memory_bytes_per_second"], **kernels(key),
            "vector_flops_per_second": own["vector"], "matmul": matmul_rates(key),
            "kernel_overhead_ns": 2_000,
            "table_name": own["table_name"],
            "multiprocessors": own["multiprocessors"],
        },
        "host": HOST,
        "links": links(key, ranks, in_node, gigabits),
        "compute_rate_while_communicating_ppm": 900_000,
        "communication_rate_while_computing_ppm": 950_000,
        "host_link_bytes_per_second": 55_000_000_000 if own["nvlink"] >= 450 else 25_000_000_000,
        "sources": sources(key, ranks, in_node),
    }


def base_2023(document):
    """The document with attention of 2023 at half of the peak, and devices that differ."""
    device = document["device"]
    device["spread_ppm"] = SPREAD_PPM
    peaks = {rate["dtype"]: rate["flops_per_second"] for rate in device["matmul"]}
    for field in ("attention", "attention_backward"):
        device[field] = [
            {"dtype": rate["dtype"], "flops_per_second": peaks[rate["dtype"]], "half_rate_sequence": HALF_RATE_SEQUENCE}
            for rate in device[field]
        ]
    device["table_name"] = ""
    document["ranks"] = RUNS_RANKS
    document["name"] = f"{RUNS_RANKS} x {device['name']}, software of 2023"
    for source in document["sources"]:
        if source["figure"] in UNSURE_2023:
            source |= {"origin": "guess", "off_ppm": UNSURE_2023[source["figure"]], "note": "software of 2023"}
            source.pop("measured_with", None)
    return document


def of_40_gb(document):
    """The A100 of 40 GB: the part of its bandwidth that kernels reach is that of the A100 of 80 GB."""
    device = document["device"]
    reached = device["memory_bytes_per_second"] / DEVICES["a100_80"]["memory_bytes_per_second"]
    device |= A100_40 | {"memory_bytes_per_second": round(A100_40["memory_bytes_per_second"] * reached)}
    document["name"] = f"{RUNS_RANKS} x {device['name']}, software of 2023"
    for source in document["sources"]:
        source["note"] = "; ".join(filter(None, (source.get("note", ""), "as the A100 of 80 GB")))
    return document


def fit_runs(command, out):
    with tempfile.TemporaryDirectory() as folder:
        chosen = []
        for gpu, base in OF_2023:
            path = pathlib.Path(folder) / f"{gpu}_base.json"
            write_text(path, json.dumps(base_2023(documents.read(str(out / f"{base}.json")))))
            chosen.append(f"--cluster-of={gpu}={path}")
        subprocess.run(
            [command, "cost", str(RUNS), "--builder=shardplan.runs.mpt:build", "--fit-rows=8", "-o", folder, *chosen],
            check=True,
        )
        for gpu, _ in OF_2023:
            write_text(out / f"{gpu}_2023_{RUNS_RANKS}.json", (pathlib.Path(folder) / f"{gpu}.json").read_text())
        path = pathlib.Path(folder) / "a100_40gb.json"
        write_text(path, json.dumps(of_40_gb(documents.read(str(pathlib.Path(folder) / "a100_80gb.json")))))
        write_text(out / f"a100_40gb_2023_{RUNS_RANKS}.json", written(command, path))


def written(command, path):
    """A document as the command writes it."""
    question = json.dumps({"document": str(path)}) + "\n"
    answer = subprocess.run([command, "evaluate"], input=question, capture_output=True, text=True, check=True).stdout
    return json.loads(answer)["text"]


def main():
    runs = sys.argv[1:2] == ["--runs"]
    if len(sys.argv) != 3 + runs:
        sys.exit(__doc__)
    command, out = sys.argv[-2], pathlib.Path(sys.argv[-1])
    if runs:
        return fit_runs(command, out)
    with tempfile.TemporaryDirectory() as folder:
        for name, key, ranks, in_node, gigabits in CLUSTERS:
            own = DEVICES[key]
            base = pathlib.Path(folder) / f"{name}.json"
            write_text(base, json.dumps(document(key, name, ranks, in_node, gigabits)))
            tables = []
            for kind, path in (("collectives", COLLECTIVES), ("matmuls", MATMULS)):
                with open(path, newline="") as file:
                    measured = {row["device"] for row in csv.DictReader(file)}
                device = own["table_name"] if own["table_name"] in measured else own.get("as")
                if device not in measured:
                    continue
                table = pathlib.Path(folder) / f"{name}.{kind}.csv"
                renamed(path, table, device, own["table_name"])
                tables.append(table)
            target = out / f"{name}.json"
            if not tables:  # nothing to fit: only written as documents are
                write_text(target, written(command, base))
                continue
            as_other = f", as {own['as']}" if own.get("as") else ""
            subprocess.run(
                [
                    command, "cost", *map(str, tables), "--fit", str(base), "-o", str(target), "--source",
                    SOURCE + as_other,
                ],
                check=True,
            )


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Random small models and settings of both policies: `python tests/python/device/memory_random.py --cases 100 [--seed
N]` trains each on a device on which nothing computes and compares what PyTorch's own allocator says at points of the
last step, its peaks, and how often it called the driver, with `shardplan memory`. A case is made of its number alone.
--rehearsed: each is trained by `shardplan rehearse`, and what that reports of the steps is compared, too.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "tools" / "python")]

from conftest import build_folder, on_device  # noqa: E402
from shardplan_conformance import memory  # noqa: E402

FOLDER = ROOT / "tests" / "conformance" / "memory_cuda"
DEFAULT = FOLDER / "f1_small_flat.json"  # what a case does not say
PLAIN = {"policy": "fsdp2", "use_orig_params": True, "steps": 3}
ALLOCATORS = ("", "", "", "expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:64")


def make_case(seed: int) -> dict:
    draw = random.Random(seed)
    groups = draw.choice((1, 2, 4))
    heads = groups * draw.choice((1, 2, 4))
    width = heads * draw.choice((32, 64, 96, 128))
    fsdp1, world = draw.random() < 0.5, draw.choice((2, 4, 8, 64))
    hybrid = world > 2 and draw.random() < 0.3
    knobs = {
        "policy": "fsdp1" if fsdp1 else "fsdp2",
        "world": world,
        "replicate": 2 if hybrid else 1,
        "seq": draw.choice((64, 200, 384, 512, 1000, 1024, 2048, 3072, 5000)),
        "batch": draw.choice((1, 1, 2, 3)),
        "ac": draw.choice(("none", "block")),
        "mp": draw.choice(("bf16_fp32", "bf16_fp32", "bf16_bf16", "fp32")),
        "accum": draw.choice((1, 1, 2, 3)),
        "accum_sync": draw.random() < 0.5,
        "units": draw.choice(("block_root", "embed_block_head")),
        "optimizer": draw.choice(("adamw", "sgd", "sgdm")),
        "norm": draw.choice(("torch", "manual")),
        "loss": draw.choice(("fp32", "bf16")),
        "del_logits": draw.random() < 0.7,
        "device": draw.choice(("fast", "slow")),
        "alloc_conf": draw.choice(ALLOCATORS),
    }
    knobs["attn"] = "repeat" if knobs["mp"] == "fp32" else draw.choice(("gqa", "repeat"))
    knobs["opt"] = draw.choice(
        ("foreach", "fused", "for_loop") if knobs["optimizer"] == "adamw" else ("foreach", "for_loop")
    )
    if fsdp1:
        knobs["sharding"] = draw.choice(
            ("hybrid_shard", "hybrid_shard_zero2") if hybrid else ("full_shard", "full_shard", "shard_grad_op")
        )
        knobs["backward_prefetch"] = draw.choice(("pre", "post", "none"))
        knobs |= {name: draw.random() < 0.6 for name in ("forward_prefetch", "limit_all_gathers", "use_orig_params")}
    else:
        knobs |= {"reshard": draw.choice((None, True, False)), "accum_reshard": draw.random() < 0.7}
    sizes = {
        "dim": width, "layers": draw.choice((2, 3, 5)), "heads": heads, "kv_heads": groups,
        "vocab": draw.choice((1001, 5003, 32000, 50257)),
    }
    return {
        "case": f"memory{seed}", "knobs": knobs,
        "model": {**sizes, "ffn": draw.choice((2, 3, 4)) * width + draw.choice((0, 8, 40))},
    }


def _whole(case: dict) -> dict:
    recorded = json.loads(DEFAULT.read_text())
    knobs = {**recorded["knobs"], **PLAIN, **case["knobs"]}
    model = {**recorded["model"], **case["model"]}
    return {
        **case, "device": "software CUDA device", "knobs": knobs, "model": model, "rows": [], "peak": [],
        "columns": recorded["columns"],
    }


def _real(case: dict, path: pathlib.Path) -> dict:
    knobs = case["knobs"]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": knobs["alloc_conf"]} if knobs["alloc_conf"] else {}
    done = on_device(
        [
            sys.executable, str(ROOT / "tests" / "python" / "device" / "memory_of_training.py"), str(path),
            str(FOLDER / "model.py"),
        ],
        "null:slow" if knobs["device"] == "slow" else "null",
        SHARDPLAN_DEVICE_COUNT="1",
        SHARDPLAN_DEVICE_BYTES=str(knobs["gib"] << 30),
        **settings,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout + done.stderr[-3000:]
    return json.loads(found[0].removeprefix("FOUND "))


def _rehearsed(case: dict, path: pathlib.Path) -> dict:
    """The script's own figures, as _real; the report's of all steps have to be the same."""
    knobs, report = case["knobs"], path.with_name("report.json")
    program = [
        sys.executable, str(ROOT / "tests" / "python" / "device" / "memory_of_training.py"), str(path),
        str(FOLDER / "model.py"),
    ]
    options = [
        "--gpus", str(knobs["world"]), "--device-memory", f"{2 * knobs['gib']}GiB", "--steps", "0", "--report",
        str(report), "--quiet",
    ]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": knobs["alloc_conf"]} if knobs["alloc_conf"] else {}
    command = [str(build_folder() / "bin" / "shardplan"), "rehearse", *options, "--", *program]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and found, done.stdout + done.stderr[-3000:]
    real = json.loads(found[0].removeprefix("FOUND "))
    rows = [row for row in json.loads(report.read_text())["extensions"]["rehearse"]["phases"] if row["step"]]
    for what in ("allocated", "reserved"):
        reported = max(row[f"{what}_bytes"] for row in rows)
        assert reported == real["peaks"][what], f"the report says {reported} {what}, torch.cuda {real['peaks'][what]}"
    return real


def _row_difference(wanted: list[list], rows: list[dict]) -> str:
    """The first of the real rows that ours, of those events, differ from."""
    events = {row[0] for row in wanted}
    found = [row for row in rows if row["event"] in events]
    if len(found) != len(wanted):
        return f"{len(found)} rows instead of {len(wanted)}"
    for index, ((event, unit, *values), row) in enumerate(zip(wanted, found)):
        of = row["allocator"]
        ours = {name: of[f"{name}_bytes"] for name in ("requested", "allocated", "active", "reserved")} | {
            "segments": of["segments"]
        }
        differs = [
            f"{name} {mine} instead of {real}" for (name, mine), real in zip(ours.items(), values) if mine != real
        ]
        if (row["event"], row["unit"]) != (event, unit) or differs:
            return f"row {index}, {event} {unit} ({row['event']} {row['unit']}): {', '.join(differs)}"
    return ""


def difference(case: dict, folder: pathlib.Path, rehearsed: bool = False) -> str:
    """"" where all agree."""
    case = _whole(case)
    if rehearsed:
        case["knobs"]["device"] = "fast"  # how a rehearsal's device is
    path, trace = folder / "case.json", folder / "trace.json"
    path.write_text(json.dumps(case))
    real = (_rehearsed if rehearsed else _real)(case, path)
    memory.trace_case(FOLDER, case, trace)
    document = memory.compute(str(build_folder() / "bin" / "shardplan"), trace, case, folder)
    ours = document["allocator"]
    computed = {what: ours[f"peak_{what}_bytes"] for what in ("allocated", "active", "reserved")}
    computed |= {"device_allocs": ours["device_allocs"], "retries": ours["retries"]}
    differs = [
        f"{what} {computed[what]} instead of {wanted}"
        for what, wanted in real["peaks"].items()
        if computed[what] != wanted
    ]
    return "; ".join(filter(None, [*differs, _row_difference(real["rows"], document["rows"])]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rehearsed", action="store_true")
    arguments = parser.parse_args()
    agree = 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = difference(make_case(seed), pathlib.Path(folder), arguments.rehearsed)
            except (AssertionError, RuntimeError, subprocess.SubprocessError) as error:
                found = f"{type(error).__name__}: {str(error)[-300:]}"
        agree += found == ""
        if found:
            print(f"memory{seed}: {found}", flush=True)
    print(f"{agree} of {arguments.cases} cases agree")
    print(f"cases {arguments.cases}, failures {arguments.cases - agree}")
    return 0 if agree == arguments.cases else 1


if __name__ == "__main__":
    sys.exit(main())

"""PyTorch's own allocator under real FSDP2, on a device on which nothing computes (docs/device.md), next to what `shardplan memory` says."""

import json
import sys

import pytest
from conftest import ROOT, build_folder, on_device
from shardplan.conformance import memory

FOLDER = ROOT / "tests" / "conformance" / "memory_cuda"
CASES = {
    "64 ranks, accumulated": {"world": 64, "seq": 384, "accum": 2, "accum_sync": False, "opt": "fused"},
    "fp32": {"world": 4, "seq": 640, "batch": 2, "mp": "fp32", "attn": "repeat"},
}


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_those_of_the_real_allocator(name, tmp_path):
    recorded = json.loads((FOLDER / "f2_small_expandable.json").read_text())
    case = {"case": name, "device": "software CUDA device", "model": recorded["model"], "rows": [], "peak": [], "columns": recorded["columns"]}
    case["knobs"] = {**recorded["knobs"], "alloc_conf": "", "steps": 2, **CASES[name]}
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    program = ROOT / "tests" / "python" / "device" / "memory_of_training.py"
    done = on_device(
        [sys.executable, str(program), str(path), str(FOLDER / "model.py")],
        "null",
        SHARDPLAN_DEVICE_COUNT="1",
        SHARDPLAN_DEVICE_BYTES=str(case["knobs"]["gib"] << 30),
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout + done.stderr[-3000:]
    real = json.loads(found[0].removeprefix("FOUND "))
    memory.trace_case(FOLDER, case, tmp_path / "trace.json")
    ours = memory.compute(str(build_folder() / "bin" / "shardplan"), tmp_path / "trace.json", case, tmp_path)["allocator"]
    computed = {what: ours[f"peak_{what}_bytes"] for what in ("allocated", "active", "reserved")}
    assert {**computed, "device_allocs": ours["device_allocs"], "retries": ours["retries"]} == real

# SPDX-License-Identifier: Apache-2.0
"""shardplan memory and explain-memory: tables, pages, allocator settings, errors and exit codes."""

import json
import math
import re

import pytest
from conftest import ROOT

TRACE = ROOT / "examples" / "three_layers" / "trace.json"
GIVEN = ["--ranks", "8", "--policy", "fsdp2"]


@pytest.fixture(scope="module")
def plan(shardplan, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made = shardplan("plan", TRACE, "--cluster", "h100_sxm_8", "-q", "-o", path)
    assert made.returncode == 0, made.stderr
    return path


def peak_of(shardplan, *arguments):
    rows = shardplan("memory", *arguments, "--rows", "-", "-q")
    assert rows.returncode == 0, rows.stderr
    return json.loads(rows.stdout)["peak"]["total_bytes"]


def page_data(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1))


def test_a_trace_and_its_plan_have_the_same_memory(shardplan, plan):
    assert peak_of(shardplan, TRACE, *GIVEN) == peak_of(shardplan, plan)
    # cuBLAS's workspaces: one of each thread, and of 2.15 that of the product at the peak.
    for release, workspaces in (("2.11", 2), ("2.15", 1)):
        given = (TRACE, *GIVEN, "--pytorch", release)
        without = peak_of(shardplan, *given, "--no-kernel-temporaries")
        assert without == peak_of(shardplan, *given) - workspaces * 32 * 2**20
    table = shardplan("memory", plan)
    assert "cuda_context" in table.stdout
    assert "nccl_buffers shard (8)" in table.stdout
    assert re.search(r"^fits .* \(H100", table.stdout, re.M)
    assert "cuda_context" not in shardplan("memory", TRACE, *GIVEN).stdout


def test_parameters_of_no_unit_are_counted_outside(shardplan, tmp_path):
    trace = json.loads(TRACE.read_text())
    ignored = trace["parameters"][0]
    size = {"bfloat16": 2, "float32": 4}[ignored.get("dtype", "float32")] * math.prod(ignored["shape"])
    found = shardplan("memory", TRACE, *GIVEN, "--ignore", ignored["fqn"])
    assert found.returncode == 0, found.stderr
    rows = {name.strip(): int(value) for name, value in re.findall(r"^(.{28}) +(\d+) ", found.stdout, re.M)}
    assert rows["parameters of no unit"] == rows["their gradients, at most"] == size
    assert rows["their optimizer states"] == 2 * size
    nccl = rows["nccl_buffers shard (8)"]
    assert rows["total and outside"] == rows["total"] + nccl + 4 * size
    assert "of no unit" not in shardplan("memory", TRACE, *GIVEN).stdout


# ---- gradients that wait for their reduction ----

LAYER = 4096 * 4096  # elements of each of the three parameters, in bfloat16


def deferred_of(shardplan, *arguments):
    """(bytes, units, where) by --rows, and what the table says of it."""
    given = (TRACE, "--ranks", "8", *arguments)
    rows = shardplan("memory", *given, "--rows", "-", "-q")
    assert rows.returncode == 0, rows.stderr
    found = json.loads(rows.stdout).get("deferred_gradients")
    table = shardplan("memory", *given).stdout
    said = re.findall(
        r"^gradients that wait for their reduction: at most (\d+) bytes, ([\d.]+) GiB, of (\d+) units?, since (.*)$",
        table,
        re.M,
    )
    if found is None:
        assert "wait for" not in table
        return None
    ((size, gib, units, where),) = said
    assert (int(size), int(units), where) == (found["peak_bytes"], found["units"], found["at"])
    assert float(gib) == pytest.approx(found["peak_bytes"] / 2**30, abs=6e-4)
    return found["peak_bytes"], found["units"]


def strategy(tmp_path, **fields):
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps({"schema": "shardplan.strategy/1", "policy": "fsdp2", **fields}))
    return "--strategy", path


def micro_batches(*syncs):
    """A program: `syncs`, by micro-batch, the calls before its forward."""
    calls = []
    for number, before in enumerate(syncs):
        forward = [{"call": "forward", "microbatch": number}]
        calls += [*before, *forward, {"call": "backward", "microbatches": [number]}]
    return {"program": [[*calls, {"call": "optimizer_step"}, {"call": "zero_grad"}]]}


def sync(value, module=""):
    return {"call": "module", "method": "set_requires_gradient_sync", "module": module, "value": value}


@pytest.mark.parametrize("policy", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_without_synchronisation_the_gradients_of_all_units_wait(shardplan, policy, accumulate):
    given = ("--policy", policy, "--accumulate", accumulate, "--no-sync")
    assert deferred_of(shardplan, *given) == (3 * LAYER * 2, 3)
    wider = 4 if policy == "fsdp2" else 2  # FSDP1 keeps them as they were made
    assert deferred_of(shardplan, *given, "--param-dtype", "bfloat16", "--reduce-dtype", "float32") == (
        3 * LAYER * wider,
        3,
    )


@pytest.mark.parametrize("arguments", [(), ("--accumulate", 3), ("--policy", "fsdp1", "--accumulate", 2)])
def test_where_each_micro_batch_reduces_nothing_waits(shardplan, arguments):
    assert deferred_of(shardplan, *arguments) is None


def test_units_that_reduce_are_not_counted(shardplan, tmp_path):
    one_waits = micro_batches([sync(True), sync(False, "layers.1")], [sync(True)])
    assert deferred_of(shardplan, *strategy(tmp_path, **one_waits)) == (LAYER * 2, 1)
    all_but_one = micro_batches([sync(False), sync(True, "layers.1")], [], [sync(True)])
    assert deferred_of(shardplan, *strategy(tmp_path, **all_but_one)) == (2 * LAYER * 2, 2)


def test_half_reduced_gradients_wait(shardplan, tmp_path):
    """HSDP: reduced over the shards' ranks, they wait to be added across replicas. Likewise within a node."""
    reduces = {"call": "module", "method": "set_requires_all_reduce", "module": ""}
    late = micro_batches([{**reduces, "value": False}], [{**reduces, "value": True}])
    mesh = {"mesh": [{"name": "replicate", "size": 2}, {"name": "shard", "size": 4}]}
    assert deferred_of(shardplan, *strategy(tmp_path, **late, **mesh)) == (3 * LAYER * 2 // 4, 3)


def test_the_report_has_the_same(shardplan, tmp_path):
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    for more, wanted in (((), None), (("--no-sync",), 3 * LAYER * 2)):
        made = shardplan("plan", TRACE, "--cluster", "h100_sxm_8", "--accumulate", "2", *more, "-q", "-o", plan)
        assert made.returncode == 0, made.stderr
        assert shardplan("simulate", plan, "--report", report, "-q").returncode == 0
        assert json.loads(report.read_text())["memory"].get("deferred_gradient_bytes") == wanted


def test_what_does_not_fit_exits_1(shardplan, plan, tmp_path):
    cluster = json.loads((ROOT / "tools" / "clusters" / "h100_sxm_8.json").read_text())
    cluster["device"]["memory_bytes"] = cluster["device"]["context_bytes"] + (1 << 20)
    small = tmp_path / "small.json"
    small.write_text(json.dumps(cluster))
    found = shardplan("memory", plan, "--cluster", small)
    assert found.returncode == 1
    assert "does not fit" in found.stdout
    reserved = shardplan("memory", plan, "--cluster", small, "--reserved")
    assert reserved.returncode == 1
    assert "does not fit" in reserved.stdout
    assert "reserved: out of memory at" in reserved.stdout
    rows = {name.strip(): int(value) for name, value in re.findall(r"^(.{28}) +(\d+) ", reserved.stdout, re.M)}
    assert rows["total and outside"] > rows["total"]
    assert rows["reserved without a limit"] >= rows["total"]


def test_reserved_bytes_cover_the_peak_and_other_settings_are_tried(shardplan, plan):
    found = shardplan("memory", plan, "--reserved", "--map", "-")
    assert found.returncode == 0, found.stderr
    reserved = int(re.search(r"reserved at its peak +(\d+)", found.stdout).group(1))
    assert reserved >= peak_of(shardplan, plan)
    tried = dict(re.findall(r"^(\S+:\S+) +(\d+) +-?\d+ +\d+$", found.stdout, re.M))
    assert "expandable_segments:True" in tried
    assert len(tried) == 7
    # A setting that is tried gives what it gives when it is in force.
    forced = shardplan("memory", plan, "--alloc-conf", "roundup_power2_divisions:4")
    assert int(re.search(r"reserved at its peak +(\d+)", forced.stdout).group(1)) == int(
        tried["roundup_power2_divisions:4"]
    )
    assert "|####" in found.stdout


def test_pages_have_every_block_and_run(shardplan, plan, tmp_path):
    plot, memory_map = tmp_path / "plot.html", tmp_path / "map.html"
    assert shardplan("memory", plan, "--plot", plot, "--map", memory_map, "-q").returncode == 0
    drawn, mapped = page_data(plot.read_text()), page_data(memory_map.read_text())
    assert drawn["segments"] == []
    assert len(mapped["segments"]) > 0
    assert [b[:6] for b in drawn["blocks"]] == [b[:6] for b in mapped["blocks"]]
    # Blocks do not overlap in address while both are alive.
    placed = [b for b in mapped["blocks"] if b[7] > 0]
    for i, a in enumerate(placed):
        for b in placed[i + 1 :]:
            alive = a[4] < (b[5] if b[5] >= 0 else 1 << 60) and b[4] < (a[5] if a[5] >= 0 else 1 << 60)
            assert not alive or a[6] + a[7] <= b[6] or b[6] + b[7] <= a[6]
    # The sum of what is alive at the peak is the peak.
    at = drawn["peak"]
    alive = sum(b[0] for b in drawn["blocks"] if b[4] <= at and (b[5] < 0 or b[5] > at))
    assert alive == peak_of(shardplan, plan)
    for page in (plot, memory_map):
        assert not re.search(r"src=|https?:", page.read_text())


def test_explain_memory_sums_up_to_the_peak_and_names_knobs(shardplan, plan):
    found = json.loads(shardplan("explain-memory", plan, "--json", "-").stdout)
    assert found["peak_bytes"] == peak_of(shardplan, plan)
    assert sum(a["bytes"] for a in found["alive"]) == found["peak_bytes"]
    assert sum(u["at_peak_bytes"] for u in found["units"]) == found["peak_bytes"]
    assert all(0 <= a["knob_bytes"] <= a["bytes"] for a in found["alive"])
    shards = [a for a in found["alive"] if a["category"] == "param_sharded"]
    assert shards
    assert all(a["since"] == "before the steps" and a["until"] is None for a in shards)
    assert any("cpu_offload" in a["knob"] for a in shards)


def test_knobs_that_are_tried_have_the_peaks_of_such_plans(shardplan, plan, tmp_path):
    table = shardplan("explain-memory", plan, "--trace", TRACE)
    assert table.returncode == 0, table.stderr
    tried = dict(
        re.findall(
            r"^(\S.*?)  +(\d+) +[+-]\d+(?:  changes numbers)?$", table.stdout.split("planned again with")[1], re.M
        )
    )
    assert tried
    fused = tmp_path / "fused.json"
    made = shardplan("plan", TRACE, "--cluster", "h100_sxm_8", "-q", "-o", fused, "--optimizer", "adamw-fused")
    assert made.returncode == 0, made.stderr
    expected = peak_of(shardplan, fused)
    assert int(tried.get("optimizer implementation: fused", peak_of(shardplan, plan))) == expected


def test_errors_name_what_is_wrong(shardplan, plan, tmp_path):
    other = json.loads(TRACE.read_text())
    other["model"] = "another"
    (tmp_path / "other.json").write_text(json.dumps(other))
    found = shardplan("explain-memory", plan, "--trace", tmp_path / "other.json")
    assert found.returncode == 3
    assert "another trace" in found.stderr
    assert shardplan("memory", plan, "--alloc-conf", "nonsense:1").returncode == 2
    assert shardplan("memory", tmp_path / "none.json").returncode == 3
    assert shardplan("explain-memory", TRACE).returncode == 3
    assert shardplan("explain-memory").returncode == 2

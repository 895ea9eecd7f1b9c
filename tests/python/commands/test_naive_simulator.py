# SPDX-License-Identifier: Apache-2.0
"""The simulator agrees with one that is written from its page alone: times, every span, every sum, and memory."""

import json
import os
import subprocess

import naive_memory
import naive_simulator
import pytest
from conftest import ROOT, build_folder

# Rates without a common factor, groups that are not aligned to nodes, kernels shorter than their issue, and overlap
# that slows.
ODD = {
    "schema": "shardplan.cluster/1",
    "name": "odd",
    "ranks": 64,
    "ranks_per_node": 3,
    "device": {
        "name": "odd",
        "memory_bytes": 1 << 33,
        "memory_bytes_per_second": 1_234_567_891,
        "memory_efficiency_ppm": 777_777,
        "vector_flops_per_second": 98_765_432_1,
        "matmul": [
            {
                "dtype": "float32", "flops_per_second": 3_333_333_337,
                "efficiency": [{"flops": 7, "efficiency_ppm": 1234}, {"flops": 100_003, "efficiency_ppm": 654_321}],
            }
        ],
        "attention": [{"dtype": "float32", "flops_per_second": 2_222_222_223, "half_rate_sequence": 7}],
        "class_rates": [
            {"operator_class": "softmax", "memory_rate_ppm": 333_333},
            {"operator_class": "elementwise", "memory_rate_ppm": 1_234_567},
            {"operator_class": "loss", "memory_rate_ppm": 77_777},
        ],
        "memory_efficiency": [
            {"moved_bytes": 100, "efficiency_ppm": 55_555},
            {"moved_bytes": 77_777, "efficiency_ppm": 777_777},
        ],
        "kernel_overhead_ns": 97,
        "clock_ppm": 912_345,
        "spread_ppm": 23_457,
    },
    "host": {
        "operator_issue_ns": 113,
        "optimizer_issue_ns": 331,
        "collective_issue_ns": 1_009,
        "copy_issue_ns": 307,
        "allocate_ns": 41,
        "event_ns": 23,
        "trigger_ns": 503,
        "memory_bytes_per_second": 314_159_265,
        "launch_queue_depth": 5,
    },
    "links": [
        {
            "name": "inner", "latency_ns": 211, "bytes_per_second": 2_718_281_828, "base_latency_ns": 101,
            "protocols": [{"name": "LL", "latency_ns": 31, "rate_ppm": 333_333}], "algorithms": ["nvls"],
            "nvls_rate_ppm": 765_432,
        },
        {
            "name": "outer", "latency_ns": 1_999, "bytes_per_second": 1_618_033_988,
            "protocols": [{"name": "LL", "latency_ns": 401, "rate_ppm": 254_321}],
            "algorithms": ["tree", "pat", "nvls"], "pod_nodes": 2, "beyond_pod_rate_ppm": 612_345,
        },
    ],
    "collectives": [
        {
            "kind": "all_gather",
            "ranks": 2,
            "link": "inner",
            "points": [
                {"full_tensor_bytes": 100, "duration_ns": 977},
                {"full_tensor_bytes": 3_001, "duration_ns": 4_001},
            ],
        },
        {
            "kind": "all_gather",
            "ranks": 2,
            "concurrent_groups": 2,
            "link": "inner",
            "points": [
                {"full_tensor_bytes": 1, "duration_ns": 1_511},
                {"full_tensor_bytes": 500, "duration_ns": 1_511},
                {"full_tensor_bytes": 70_001, "duration_ns": 90_001},
            ],
        },
        {
            "kind": "reduce_scatter", "ranks": 4, "link": "outer",
            "points": [{"full_tensor_bytes": 0, "duration_ns": 0}, {"full_tensor_bytes": 4_099, "duration_ns": 21_001}],
        },
    ],
    "compute_rate_while_communicating_ppm": 876_543,
    "communication_rate_while_computing_ppm": 543_211,
    "host_link_bytes_per_second": 123_456_789,
}
# The same on a machine without a device: the host's thread runs what streams are given.
ON_THE_HOST = {**ODD, "name": "odd host", "host": {**ODD["host"], "runs_kernels": True}}
FIRST_SEED = int(os.environ.get("SHARDPLAN_SEED", "31000"))
RANDOM_PLANS = int(os.environ.get("SHARDPLAN_RANDOM_PLANS", "24"))


def memory_of(plan):
    """The figures of memory, from the naive walk: no cluster changes them."""
    document = naive_simulator.Document(plan)
    figures = {}
    for prefix, space in (("", "device"), ("host_", "host")):
        walk = naive_memory.profile(document, space)
        figures[prefix + "peak_bytes"] = walk.peak
        figures[prefix + "peak_by_category"] = {category: amount for category, amount in walk.peak_by.items() if amount}
        figures[prefix + "steady_bytes"] = sum(walk.now.values())
    return figures


def figures(document, machines, alone):
    """A report's figures of time, from the naive simulator."""
    last, plan = machines[-1], document.plan
    sums = last.sums
    communication = sums["communication"]
    total = sum(time for name, time in sums.items() if name[0] == "activity" and name[1] != "idle")
    groups = {(item.kind, item.group, item.source) for item in last.items if item.work == "collective"}
    return {
        "step_ns": last.end,
        "forward_ns": alone["forward"],
        "backward_ns": alone["backward"],
        "optimizer_ns": alone["optimizer"],
        "compute_ns": sums["compute"],
        "communication_ns": communication,
        "exposed_communication_ns": sums["exposed"],
        "overlap_ppm": 10**6
        - (
            naive_simulator.nearest(naive_simulator.Fraction(sums["exposed"] * 10**6, communication))
            if communication
            else 0
        ),
        "host_ns": sums["host"],
        "host_work_ns": sums["host_work"],
        "streams": [(s["name"], sums["busy", i], sums["operations", i]) for i, s in enumerate(document.streams)],
        "collectives": sorted(
            (
                kind, plan["communicators"][group]["name"], source, sums["busy", (kind, group, source)],
                sums["exposed", (kind, group, source)],
            )
            for kind, group, source in groups
        ),
        "activities": {
            name[1]: time
            for name, time in [*sums.items(), (("activity", "idle"), last.end - total)]
            if name[0] == "activity" and time
        },
        "units": [
            (sums["unit_forward", u], sums["unit_backward", u], sums["unit_exposed", u])
            for u in range(len(document.units))
        ],
    }


def reported(report):
    """The same from a report document."""
    memory = report["memory"]
    categories = lambda field: {
        c["category"]: c["size_bytes"]
        for c in memory.get(field, [])
        if c["category"] not in ("cuda_context", "nccl_buffers", "unmanaged")
    }  # noqa: E731
    fields = [
        "step_ns", "forward_ns", "backward_ns", "optimizer_ns", "compute_ns", "communication_ns",
        "exposed_communication_ns", "overlap_ppm", "host_ns",
    ]
    return {
        **{field: report[field] for field in fields},
        "host_work_ns": report.get("host_work_ns", 0),
        "streams": [(s["stream"], s["busy_ns"], s["operations"]) for s in report["streams"]],
        "collectives": sorted(
            (c["kind"], c["communicator"], c["cost_source"], c["busy_ns"], c["exposed_ns"])
            for c in report["collectives"]
        ),
        "activities": {entry["activity"]: entry["time_ns"] for entry in report.get("activities", [])},
        "units": [(u["forward_ns"], u["backward_ns"], u["exposed_ns"]) for u in report["units"]],
        "peak_bytes": memory["peak_bytes"],
        "peak_by_category": categories("peak_by_category"),
        "steady_bytes": memory["steady_bytes"],
        "host_peak_bytes": memory.get("host_peak_bytes", 0),
        "host_peak_by_category": categories("host_peak_by_category"),
        "host_steady_bytes": memory.get("host_steady_bytes", 0),
    }


def spans_of(machines, plan):
    """[stream or -1, step, trigger, instruction, start, end], the steps one after the other."""
    spans, offset = [], 0
    for step, machine in enumerate(machines):
        for stream, item, start, end in machine.spans:
            trigger, instruction = item.where
            own = stream is not None and stream >= len(plan["streams"])
            if instruction is not None and not (own and item.kind == "wait"):
                spans.append(
                    [-1 if stream is None else stream, step, trigger, instruction, start + offset, end + offset]
                )
        offset += machine.end
    return sorted(spans)


def autograd_adds_up(document):
    """Gradients wait for a later backward, and autograd widens and adds them up inside a segment, where its operators
    say. The naive walk follows the plan's instructions behind it, which hold no less at the peak; real PyTorch is the
    oracle of these plans (tests/python/device/memory_random.py)."""
    release = str(document.plan["strategy"].get("pytorch", "2.11"))
    late = tuple(map(int, release.split(".")[:2])) >= (2, 15)
    units = document.plan["units"]
    layouts = [
        units[document.at("unit", b["unit"])].get("layout", "per_parameter")
        for b in document.plan["buffers"]
        if b["role"] == "grad_unsharded_accumulated" and "unit" in b
    ]
    return late and "per_parameter" in layouts


def compare(name, plan, memory, cluster, report, spans):
    """The difference; "" if there is none."""
    document = naive_simulator.Document(plan, cluster)
    machines, alone = naive_simulator.simulate(document)
    naive, product = {**figures(document, machines, alone), **memory}, reported(report)
    for field, value in product.items():
        if field in ("peak_bytes", "peak_by_category") and autograd_adds_up(document):
            if product["peak_bytes"] > naive["peak_bytes"]:
                return (
                    f"{name} on {cluster['name']}: peak_bytes is {product['peak_bytes']}, by the page at most "
                    f"{naive['peak_bytes']}"
                )
        elif naive[field] != value:
            return f"{name} on {cluster['name']}: {field} is {value}, by the page {naive[field]}"
    mine = spans_of(machines, plan)
    for a, b in zip(mine, sorted(spans), strict=False):
        if a != b:
            return f"{name} on {cluster['name']}: span {b}, by the page {a}"
    return (
        "" if len(mine) == len(spans) else f"{name} on {cluster['name']}: {len(spans)} spans, by the page {len(mine)}"
    )


def ranks_differ(plan):
    """Whether matrices have owners among several ranks."""
    sizes = {group["name"]: group["size"] for group in plan["communicators"]}
    return any(
        sizes.get(exchange["communicator"], 2) > 1 and any("owner" in matrix for matrix in exchange["matrices"])
        for exchange in plan.get("exchanges", [])
    )


def test_agrees_on_every_plan_of_the_tests(tmp_path, record_property):
    program = build_folder() / "tests" / "simulator" / "simulator_suite_plans"
    if not program.exists():
        pytest.fail(f"{program} is not built")
    odd, host = tmp_path / "odd.json", tmp_path / "odd_host.json"
    odd.write_text(json.dumps(ODD))
    host.write_text(json.dumps(ON_THE_HOST))
    files = [ROOT / "tools" / "clusters" / "h100_sxm_64.json", odd, host]
    clusters = [json.loads(file.read_text()) for file in files]
    print(f"random plans: seeds from {FIRST_SEED}, {RANDOM_PLANS} of them")
    command = [program, tmp_path, str(FIRST_SEED), str(RANDOM_PLANS), *files]
    written = subprocess.run(command, capture_output=True, text=True, check=False)
    assert written.returncode == 0, written.stderr
    names = written.stdout.split("\n")[:-1]
    assert len(names) > 300
    record_property("cases", len(names))
    different, muon = [], 0
    for n, name in enumerate(names):
        plan = json.loads((tmp_path / f"{n}.plan.json").read_text())
        if ranks_differ(plan):
            continue  # this simulator has one rank: MuonTime in tests/planner has them all
        muon += bool(plan["strategy"].get("optimizer", {}).get("muon"))
        memory = memory_of(plan)
        for k, cluster in enumerate(clusters):
            if k > 0 and n % 2 != k - 1:  # of the odd clusters each with every second plan
                continue
            report, spans = (
                json.loads((tmp_path / f"{n}.{k}.{what}.json").read_text()) for what in ("report", "spans")
            )
            difference = compare(name, plan, memory, cluster, report, spans)
            if difference:
                different.append(difference)
    assert different == []
    assert muon > 0

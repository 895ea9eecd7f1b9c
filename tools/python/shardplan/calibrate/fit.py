# SPDX-License-Identifier: Apache-2.0
"""A cluster document from measurements."""

from __future__ import annotations

import collections
import csv
import io
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from shardplan import files
from shardplan.command import NoCommand, built_command

_MATMUL_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_SCHEMA = "shardplan.measured/1"
_CLUSTER_SCHEMA = "shardplan.cluster/1"
_NEEDED = {
    "matmul": ("dtype", "batch", "m", "n", "k", "duration_ns"),
    "attention": ("dtype", "batch", "heads", "seq", "head_size", "causal", "forward", "backward"),
    "memory": ("operator", "bytes_read", "bytes_written", "duration_ns"),
    "copies": ("direction", "size_bytes", "duration_ns"),
    "collectives": ("collective", "concurrent_groups", "ranks_per_group", "full_tensor_bytes", "duration_ns"),
    "host": ("what", "duration_ns"),
    "issue": ("what", "duration_ns"),
    "overlap": ("compute_rate_ppm",),
    "sustained": ("m", "dtype", "duration_ns"),
}


class BadMeasurements(Exception):
    """The file holds no measurements."""


def document(path: str) -> object:
    try:
        return json.loads(files.read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise BadMeasurements(f"{path}: cannot be read as measurements: {error}") from error


def checked(path: str, measured: object) -> dict:
    if not isinstance(measured, dict) or measured.get("schema") != _SCHEMA:
        found = measured.get("schema") if isinstance(measured, dict) else type(measured).__name__
        raise BadMeasurements(f"{path}: no measurements (found {found!r} at /schema, expected {_SCHEMA!r})")
    if not isinstance(measured.get("device"), dict) or not isinstance(measured["device"].get("memory_bytes"), int):
        raise BadMeasurements(
            f"{path}: /device/memory_bytes is missing (found {measured.get('device')!r}, expected an integer)"
        )
    for section, fields in _NEEDED.items():
        rows = measured.get(section, [])
        if not isinstance(rows, list):
            raise BadMeasurements(f"{path}: /{section} is no list (found {type(rows).__name__})")
        for i, row in enumerate(rows):
            missing = [field for field in fields if not isinstance(row, dict) or field not in row]
            if missing:
                raise BadMeasurements(f"{path}: /{section}/{i}/{missing[0]} is missing (expected {', '.join(fields)})")
    return measured


def cluster_text(measured: dict, base: str | None, name: str | None) -> str:
    """The document: rates and costs from here, tables and shapes fitted by `shardplan cost --fit`."""
    program = built_command("calibrate")
    with tempfile.TemporaryDirectory(prefix="shardplan-calibrate-") as folder:
        document = _document(measured, _base(base), name)
        tables = _tables(measured, document["device"]["table_name"], Path(folder))
        if not tables:
            return json.dumps(document, indent=2) + "\n"
        files.write_text(Path(folder) / "base.json", json.dumps(document))
        source = (
            f"shardplan calibrate, {measured['device'].get('name', 'device')}, torch "
            f"{measured['device'].get('torch', '')}"
        )
        arguments = [
            program, "cost", *tables, "--fit", str(Path(folder) / "base.json"), "-o", "-", "--source", source, "-q",
        ]
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        except OSError as error:
            raise NoCommand(f"cannot start {program}: {error}") from error
        if done.returncode != 0:
            raise BadMeasurements(done.stderr.strip())
        return done.stdout


def _base(path: str | None) -> dict:
    if path is None:
        return {}
    try:
        base = json.loads(files.read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise BadMeasurements(f"{path}: cannot be read as a cluster: {error}") from error
    found = base.get("schema") if isinstance(base, dict) else type(base).__name__
    if found != _CLUSTER_SCHEMA:
        raise BadMeasurements(f"{path}: no cluster (found {found!r} at /schema, expected {_CLUSTER_SCHEMA!r})")
    return base


def _document(measured: dict, base: dict, name: str | None) -> dict:
    described = measured["device"]
    ranks = measured.get("ranks", 1)
    on_gpu = described.get("kind") == "cuda"
    sources = {entry["figure"]: entry for entry in base.get("sources", [])}
    said = {"measured_with": f"torch {described['torch']}"} if described.get("torch") else {}

    def know(figure: str, rows: list[dict], note: str = "") -> None:
        sources[figure] = {
            "figure": figure, "origin": "measured", "off_ppm": _spread(rows), **({"note": note} if note else {}),
            **said,
        }

    device = base.get("device", {}) | {
        "name": described.get("name", "device"), "memory_bytes": described["memory_bytes"], "table_name": "measured",
    }
    if described.get("context_bytes"):
        device["context_bytes"] = described["context_bytes"]
    if described.get("multiprocessors"):
        device["multiprocessors"] = described["multiprocessors"]
    if rows := measured.get("memory", []):
        device |= memory_rates(rows) if on_gpu else memory_rates_of_cpu(rows)
        know("memory", rows)
        know("kernel_overhead", rows)
    if rows := measured.get("matmul", []):
        device["matmul"] = _matmul_rates(rows)
        know("matmul", rows)
    if (clock := clock_ppm(measured)) is not None:
        device["clock_ppm"] = clock
    if rows := measured.get("attention", []):
        device["attention"] = attention_rates(rows, "forward", 4)
        device["attention_backward"] = attention_rates(rows, "backward", 10)
        know("attention", [row["forward"] for row in rows] + [row["backward"] for row in rows])
    document = {
        "schema": _CLUSTER_SCHEMA,
        "name": name or f"{ranks} x {described.get('name', 'device')}",
        "ranks": ranks,
        "ranks_per_node": measured.get("ranks_per_node", ranks),
        "device": device,
        "host": base.get("host", {}) | (_host(measured) if on_gpu else _host_that_computes(measured, device)),
    }
    if measured.get("host"):
        know("host", [row for row in measured["host"] if "least_ns" in row])
    links = base.get("links", [])
    if measured.get("collectives"):
        links = [{"name": "nvlink" if on_gpu else "shared memory", "bytes_per_second": 1_000_000_000}, *links[1:]]
        know("collectives", measured["collectives"])
    document["links"] = links
    document["collectives"] = base.get("collectives", [])
    for field in (
        "compute_rate_while_communicating_ppm", "communication_rate_while_computing_ppm", "host_link_bytes_per_second",
    ):
        if field in base:
            document[field] = base[field]
    for row in measured.get("overlap", [])[-1:]:
        beside = f"beside {row.get('beside', '')}"
        document["compute_rate_while_communicating_ppm"] = _part(row["compute_rate_ppm"])
        know("compute_slowdown", [row.get("product", {})], beside)
        if "other_rate_ppm" in row:
            document["communication_rate_while_computing_ppm"] = _part(row["other_rate_ppm"])
            know("communication_slowdown", [row.get("other", {})], beside)
    if rows := measured.get("copies", []):
        best = {
            d: max((_rate(row["size_bytes"], row) for row in rows if row["direction"] == d), default=0)
            for d in ("to_device", "to_host")
        }
        document["host_link_bytes_per_second"] = min(rate for rate in best.values() if rate)
        know("host_link", rows)
    document["sources"] = [sources[figure] for figure in sources]
    return document


def _part(ppm: int) -> int:
    return max(1, min(1_000_000, ppm))


def _moved(row: dict) -> int:
    return row["bytes_read"] + row["bytes_written"]


def _rate(amount: int, row: dict) -> int:
    return round(amount * 1e9 / max(1, row["duration_ns"]))


def _spread(rows: list[dict]) -> int:
    """Half of the distance between least and most, as a part of the duration: the median of the rows."""
    parts = [
        (row["most_ns"] - row["least_ns"]) / 2 / row["duration_ns"]
        for row in rows
        if row.get("duration_ns", 0) > 0 and "most_ns" in row
    ]
    return min(1_000_000, round(1e6 * statistics.median(parts))) if parts else 0


def memory_rates(rows: list[dict]) -> dict:
    """Peak rate, the part of it that kernels reach by their bytes (the median of those within a factor of two), and the
    shortest kernel."""
    moved = [(_moved(row), row) for row in rows]
    peak = max(_rate(size, row) for size, row in moved)
    largest = max(size for size, _ in moved)
    # Small tensors stay in a cache: what is larger than it says what memory gives.
    peak = max((_rate(size, row) for size, row in moved if size > largest / 8), default=peak)
    octaves = collections.defaultdict(list)
    for size, row in moved:
        octaves[size.bit_length() - 1].append(min(1.0, _rate(size, row) / peak))
    curve = [
        {"moved_bytes": 1 << power, "efficiency_ppm": _part(round(1e6 * statistics.median(parts)))}
        for power, parts in sorted(octaves.items())
    ]
    return {
        "memory_bytes_per_second": peak,
        "memory_efficiency": curve,
        "kernel_overhead_ns": min(row["duration_ns"] for _, row in moved),
    }


_PLAIN = ("copy", "add")
# By class of operators, those that stand for it: on a core they are bound by arithmetic, and in a report's words by a
# lower rate of memory.
_CLASSES = {
    "normalization": ("layer_norm", "rms_norm"), "softmax": ("softmax",), "loss": ("softmax",),
    "elementwise": ("silu", "add"),
}
_ACTIVATIONS = (1 << 16, 1 << 23)  # bytes moved: what kernels of a model move that fits a core's time


def memory_rates_of_cpu(rows: list[dict]) -> dict:
    """A core's memory is what copies and sums reach. Other classes of operators reach a part of it: the median over
    sizes of activations."""
    plain = [row for row in rows if row["operator"] in _PLAIN]
    rates = memory_rates(plain or rows) | {"kernel_overhead_ns": min(row["duration_ns"] for row in rows)}
    usual = collections.defaultdict(list)  # by bytes moved
    for row in plain:
        usual[_moved(row).bit_length()].append(_rate(_moved(row), row))
    classes = []
    for name, operators in _CLASSES.items():
        parts = []
        for row in rows:
            moved = _moved(row)
            if (
                row["operator"] in operators
                and _ACTIVATIONS[0] <= moved <= _ACTIVATIONS[1]
                and usual[moved.bit_length()]
            ):
                parts.append(_rate(moved, row) / statistics.median(usual[moved.bit_length()]))
        if parts:
            classes.append({"operator_class": name, "memory_rate_ppm": max(1, round(1e6 * statistics.median(parts)))})
    return rates | ({"class_rates": classes} if classes else {})


def _matmul_rates(rows: list[dict]) -> list[dict]:
    rates = []
    for short, dtype in _MATMUL_DTYPES.items():
        fastest = [
            _rate(2 * row["batch"] * row["m"] * row["n"] * row["k"], row) for row in rows if row["dtype"] == short
        ]
        if fastest:
            rates.append({"dtype": dtype, "flops_per_second": max(fastest)})
    return rates


def attention_rates(rows: list[dict], which: str, matmuls: int) -> list[dict]:
    """Causal, with the FLOPs of both triangles, as traces count them."""
    rates = []
    for dtype in sorted({row["dtype"] for row in rows}):
        points = collections.defaultdict(list)
        for row in rows:
            if row["dtype"] == dtype and row["causal"]:
                flops = matmuls * row["batch"] * row["heads"] * row["seq"] ** 2 * row["head_size"]
                points[flops].append(_rate(flops, row[which]))
        if points:
            peak = max(max(found) for found in points.values())
            curve = [
                {"flops": flops, "efficiency_ppm": _part(round(1e6 * statistics.median(found) / peak))}
                for flops, found in sorted(points.items())
            ]
            rates.append({"dtype": dtype, "flops_per_second": peak, "efficiency": curve})
    return rates


def clock_ppm(measured: dict) -> int | None:
    """The part of the clock that a power limit leaves: the rate of one product after some time (median of the second
    half) over the fastest for a moment."""
    rows = measured.get("sustained", [])
    if not rows:
        return None
    fastest = [
        rate["flops_per_second"]
        for rate in _matmul_rates(measured.get("matmul", []))
        if rate["dtype"] == rows[-1]["dtype"]
    ]
    rates = [_rate(2 * row["m"] ** 3, row) for row in rows[len(rows) // 2 :]]
    return _part(round(1e6 * statistics.median(rates) / fastest[0])) if fastest else None


def _host(measured: dict) -> dict:
    by_name = {row["what"]: row["duration_ns"] for row in measured.get("host", [])}
    host = {}
    for field, what in (
        ("operator_issue_ns", "operator"),
        ("copy_issue_ns", "foreach_copy"),
        ("allocate_ns", "allocate"),
        ("trigger_ns", "hook"),
        ("optimizer_issue_ns", "optimizer_operator"),
    ):
        if what in by_name:
            host[field] = by_name[what]
    events = [by_name[what] for what in ("record", "wait") if what in by_name]
    if events:
        host["event_ns"] = round(statistics.mean(events))
    issue = [row["duration_ns"] for row in measured.get("issue", [])]
    if issue:
        host["collective_issue_ns"] = round(statistics.mean(issue))
    return host


def _host_that_computes(measured: dict, device: dict) -> dict:
    """A CPU rank: what one operator takes that does nothing is the shortest kernel and its issue. A copy is issued by
    doing it."""
    host = _host(measured) | {"runs_kernels": True, "copy_issue_ns": 0}
    if "operator_issue_ns" in host:
        host["operator_issue_ns"] = max(0, host["operator_issue_ns"] - device.get("kernel_overhead_ns", 0))
    if "memory_bytes_per_second" in device:
        host["memory_bytes_per_second"] = device["memory_bytes_per_second"]
    return host


def _tables(measured: dict, device: str, folder: Path) -> list[str]:
    written = []
    for section in ("collectives", "matmul"):
        rows = measured.get(section, [])
        if not rows:
            continue
        columns = _NEEDED[section]
        path = folder / f"{section}.csv"
        text = io.StringIO()
        csv.writer(text).writerows(
            [("device", *columns), *((device, *(row[column] for column in columns)) for row in rows)]
        )
        files.write_text(path, text.getvalue())
        written.append(str(path))
    return written

# SPDX-License-Identifier: Apache-2.0
"""`shardplan calibrate`: real measurements of this machine's CPU, whatever they are, become a cluster document that
simulates."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

COMMAND = build_folder() / "bin" / "shardplan"


def calibrate(*arguments, **environment):
    environment = os.environ | {"SHARDPLAN_PYTHON": sys.executable} | environment
    return subprocess.run(
        [COMMAND, "calibrate", *map(str, arguments)], capture_output=True, text=True, timeout=120, env=environment
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two ranks: collectives with Gloo, a few kernels, the host."""
    folder = tmp_path_factory.mktemp("calibrate")
    path, cluster = folder / "m.json", folder / "c.json"
    only = "host,matmul,memory,collectives,issue"
    done = calibrate(
        "--device", "cpu", "--ranks", 2, "--threads", 1, "--quick", "--seconds", 15, "--only", only, "--measured", path,
        "-o", cluster,
    )
    assert done.returncode == 0, done.stderr
    return path, cluster


def test_every_measurement_is_there(measured):
    document = json.loads(measured[0].read_text())
    assert document["whole"] and not document["failed"]
    assert document["ranks"] == 2
    for section in ("host", "matmul", "memory", "collectives", "issue"):
        assert document[section], section
        for row in document[section]:
            assert row["duration_ns"] >= 0
    assert {row["collective"] for row in document["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}


def test_the_cluster_says_what_was_measured(measured):
    document, cluster = (json.loads(path.read_text()) for path in measured)
    tables = {(t["kind"], t["ranks"]): t for t in cluster["collectives"]}
    assert set(tables) == {("all_gather", 2), ("reduce_scatter", 2), ("all_reduce", 2)}
    sizes = {row["full_tensor_bytes"] for row in document["collectives"]}
    assert {p["full_tensor_bytes"] for p in tables["all_gather", 2]["points"]} == sizes
    shapes = next(rate for rate in cluster["device"]["matmul"] if rate["dtype"] == "float32")["shapes"]
    rows = [row for row in document["matmul"] if row["dtype"] == "f32"]
    assert {s["output_elements"] for s in shapes} == {row["m"] * row["n"] for row in rows}
    by_name = {row["what"]: row["duration_ns"] for row in document["host"]}
    shortest = cluster["device"]["kernel_overhead_ns"]
    assert cluster["host"]["operator_issue_ns"] == max(0, by_name["operator"] - shortest)
    assert cluster["host"]["runs_kernels"] and shortest > 0
    assert {s["figure"] for s in cluster["sources"]} >= {"matmul", "memory", "host", "collectives"}
    assert {s["origin"] for s in cluster["sources"]} == {"measured"}
    assert {s["measured_with"] for s in cluster["sources"]} == {f"torch {document['device']['torch']}"}


def test_from_measurements_alone_gives_the_same_document(measured, tmp_path):
    again = tmp_path / "again.json"
    done = calibrate("--from", measured[0], "-o", again)
    assert done.returncode == 0, done.stderr
    assert again.read_bytes() == measured[1].read_bytes()


def test_a_plan_is_simulated_with_it_and_has_an_interval(measured, tmp_path):
    trace = ROOT / "examples" / "three_layers" / "trace.json"
    plan = tmp_path / "plan.json"
    made = subprocess.run(
        [COMMAND, "plan", trace, "--cluster", measured[1], "--policy", "fsdp2", "--unit", "layers.*", "-o", plan],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    done = subprocess.run([COMMAND, "simulate", plan, "--sensitivity"], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert "two times in three" in done.stdout
    assert "matmul" in done.stdout.split("two times in three")[1]


def test_what_fails_is_noted_and_the_rest_is_measured(tmp_path):
    """A rank that cannot join (its store's folder is gone) leaves the measurements of the device."""
    out = tmp_path / "m.json"
    environment = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
        "SHARDPLAN_CALIBRATE_STORE": str(tmp_path / "nowhere" / "deeper"),
    }
    done = calibrate(
        "--device", "cpu", "--quick", "--threads", 1, "--only", "host,collectives", "--seconds", 5, "--measured", out,
        **environment,
    )
    assert done.returncode == 1, done.stderr
    document = json.loads(out.read_text())
    assert [entry["what"] for entry in document["failed"]] == ["join"]
    assert document["host"] and not document["whole"]
    assert "collectives" not in document


def test_the_cluster_has_the_multiprocessors_of_the_measured_gpu(tmp_path):
    measured = json.loads((ROOT / "tools" / "clusters" / "measured" / "h200_sxm.json").read_text())
    measured["device"]["multiprocessors"] = 130
    (tmp_path / "m.json").write_text(json.dumps(measured))
    done = calibrate("--from", tmp_path / "m.json", "-o", tmp_path / "c.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "c.json").read_text())["device"]["multiprocessors"] == 130


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", ["cannot be read"]),
        ('{"schema": "shardplan.cluster/1"}', ["/schema", "shardplan.measured/1"]),
        (
            '{"schema": "shardplan.measured/1", "device": {"memory_bytes": 1}, "matmul": [{"m": 3}]}',
            ["/matmul/0", "dtype"],
        ),
        ('{"schema": "shardplan.measured/1", "device": {}}', ["memory_bytes"]),
    ],
)
def test_files_without_measurements_are_refused(tmp_path, text, words):
    path = tmp_path / "m.json"
    path.write_text(text)
    done = calibrate("--from", path, "-o", tmp_path / "c.json")
    assert done.returncode == 3, done.stderr
    for word in words:
        assert word in done.stderr


def test_usage():
    assert calibrate("--device", "cpu").returncode == 2
    assert calibrate("--only", "moon", "-o", "x.json").returncode == 2

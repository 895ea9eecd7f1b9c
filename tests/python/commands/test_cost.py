# SPDX-License-Identifier: Apache-2.0
"""`shardplan cost`: predictions from tables of measurements, and cluster documents fitted to them."""

import csv
import json
import math
import random
import re
import subprocess
from pathlib import Path

import pytest
from conftest import build_folder

COMMAND = build_folder() / "bin" / "shardplan"
ROOT = Path(__file__).resolve().parents[3]
COLLECTIVE_COLUMNS = [
    "device", "collective", "concurrent_groups", "ranks_per_group", "full_tensor_bytes", "duration_ns",
]
MATMUL_COLUMNS = ["device", "dtype", "batch", "m", "n", "k", "duration_ns"]
SEED = 20261


def cost(*arguments):
    return subprocess.run([COMMAND, "cost", *map(str, arguments)], capture_output=True, text=True)


def table(path, columns, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def ring(kind, ranks, size):
    """A machine of rings: 3 us a step, 200 bytes a nanosecond, and a local copy."""
    passes = 2 if kind == "all-reduce" else 1
    return round(8_000 + passes * ((ranks - 1) * 3_000 + size * (ranks - 1) / ranks / 200) + size / 1_500)


def ring_rows(scatter=0.0, device="ring"):
    noise = random.Random(SEED)
    rows = []
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        for ranks in (2, 4, 8, 16):
            for power in range(10, 33):
                time = ring(kind, ranks, 1 << power) * (math.exp(noise.gauss(0, scatter)) if power < 20 else 1)
                rows.append([device, kind, 16 // ranks, ranks, 1 << power, round(time)])
    return rows


def errors(text):
    """{class: (rows, median, mean)} of the last lines, in percent."""
    pattern = re.compile(r"^(\S.*?) +(\d+) rows +median +([\d.]+) % +mean +([\d.]+) %", re.M)
    return {name.strip(): (int(rows), float(median), float(mean)) for name, rows, median, mean in pattern.findall(text)}


def test_sizes_that_are_left_out_are_predicted(tmp_path):
    done = cost(table(tmp_path / "c.csv", COLLECTIVE_COLUMNS, ring_rows()), "--leave-out", "size")
    assert done.returncode == 0, done.stderr
    summary = errors(done.stdout)
    assert list(summary) == ["below 1 MiB", "1 MiB to 16 MiB", "from 16 MiB"]
    assert sum(rows for rows, _, _ in summary.values()) == len(ring_rows())
    assert summary["from 16 MiB"][1] < 1.5 and summary["from 16 MiB"][2] < 3
    assert done.stdout.rstrip().splitlines()[-1].startswith("from 16 MiB")


def test_numbers_of_ranks_that_are_left_out_are_predicted(tmp_path):
    done = cost(table(tmp_path / "c.csv", COLLECTIVE_COLUMNS, ring_rows()), "--leave-out", "group")
    assert done.returncode == 0, done.stderr
    assert "fitted" in done.stdout and "measured " not in done.stdout
    assert errors(done.stdout)["from 16 MiB"][2] < 5


def test_outliers_below_16_mib_do_not_spoil_their_neighbours(tmp_path):
    scattered = cost(table(tmp_path / "c.csv", COLLECTIVE_COLUMNS, ring_rows(scatter=0.4)), "--leave-out", "size")
    below = errors(scattered.stdout)["below 1 MiB"]
    # The errors are those of the points themselves: 27 % is the median of |exp(0.4 x)| - 1.
    assert 10 < below[1] < 45, f"seed {SEED}"
    assert errors(scattered.stdout)["from 16 MiB"][1] < 1.5


def test_the_only_number_of_ranks_cannot_be_left_out(tmp_path):
    rows = [row for row in ring_rows() if row[3] == 8]
    done = cost(table(tmp_path / "c.csv", COLLECTIVE_COLUMNS, rows), "--leave-out", "group")
    assert done.returncode == 0
    assert f"not predicted: {len(rows)} rows" in done.stdout


def grid_rows(device="grid"):
    def time(output, inner):
        return 5_000 + output / 500 + output * inner / 400_000

    shapes = [
        (b, m, n, k) for b in (1, 2) for m in (256, 512, 1024) for n in (256, 512, 1024) for k in (256, 512, 1024, 2048)
    ]
    return [
        [device, dtype, b, m, n, k, round(time(b * m * n, k) * (2 if dtype == "f32" else 1))]
        for dtype in ("bf16", "f32")
        for b, m, n, k in shapes
    ]


def test_shapes_that_are_left_out_are_predicted(tmp_path):
    done = cost(table(tmp_path / "m.csv", MATMUL_COLUMNS, grid_rows()), "--leave-out", "shape")
    assert done.returncode == 0, done.stderr
    summary = errors(done.stdout)
    assert list(summary) == ["grid bfloat16", "grid float32", "bfloat16", "float32"]
    for rows, median, mean in summary.values():
        assert rows == len(grid_rows()) // 2
        assert median < 1 and mean < 3


def test_a_cluster_is_fitted_and_predicts_what_it_is_from(tmp_path):
    base = {
        "schema": "shardplan.cluster/1",
        "name": "mine",
        "ranks": 16,
        "ranks_per_node": 16,
        "device": {
            "name": "d", "memory_bytes": 1, "table_name": "ring",
            "matmul": [{"dtype": "bfloat16", "flops_per_second": 1000}],
        },
        "links": [{"name": "inner", "bytes_per_second": 1}],
    }
    (tmp_path / "base.json").write_text(json.dumps(base))
    collectives = table(tmp_path / "c.csv", COLLECTIVE_COLUMNS, ring_rows() + ring_rows(device="other"))
    matmuls = table(tmp_path / "m.csv", MATMUL_COLUMNS, grid_rows("ring"))
    out = tmp_path / "fitted.json"
    done = cost(collectives, matmuls, "--fit", tmp_path / "base.json", "-o", out, "--source", "here")
    assert done.returncode == 0, done.stderr
    fitted = json.loads(out.read_text())
    assert len(fitted["collectives"]) == 12
    assert {t["source"] for t in fitted["collectives"]} == {"here"}
    assert len(fitted["device"]["matmul"][0]["shapes"]) == len({b * m * n for _, _, b, m, n, _, _ in grid_rows()})
    # 200 bytes a nanosecond and a copy: 15/16 of a byte takes 15/16/200 + 1/1500 ns.
    assert fitted["links"][0]["bytes_per_second"] == pytest.approx(15 / 16 / (15 / 16 / 200 + 1 / 1500) * 1e9, rel=0.01)
    assert fitted["links"][0]["latency_ns"] == pytest.approx(3_000, rel=0.05)
    again = cost(table(tmp_path / "own.csv", COLLECTIVE_COLUMNS, ring_rows()), "--cluster", out)
    assert errors(again.stdout)["from 16 MiB"][1] == 0


def fit(tmp_path, rows, *arguments, base="h100_sxm_64", columns=COLLECTIVE_COLUMNS):
    out = tmp_path / "mine.json"
    done = cost(table(tmp_path / "rows.csv", columns, rows), "--fit", base, "-o", out, *arguments)
    return done, (json.loads(out.read_text()) if done.returncode == 0 else None)


def shipped(name="h100_sxm_64"):
    return json.loads((ROOT / "tools/clusters" / f"{name}.json").read_text())


def ring_of(kind, ranks, nodes=1):
    """Rows of a slow machine."""
    return [
        ["h100-sxm", kind, 1, ranks, 1 << power, 100_000 + (1 << power) // (50 // nodes)] for power in range(20, 34)
    ]


def test_rows_of_another_device_are_refused_or_taken(tmp_path):
    rows = [["my_nodes", "all-reduce", 1, 8, 1 << power, 200_000 + (1 << power) // 100] for power in (24, 27, 30)]
    done, _ = fit(tmp_path, rows)
    assert done.returncode == 3 and not (tmp_path / "mine.json").exists()
    assert "my_nodes" in done.stderr and "h100-sxm" in done.stderr and "--device" in done.stderr
    done, document = fit(tmp_path, rows, "--device", "my_nodes")
    assert done.returncode == 0, done.stderr
    assert document["device"]["table_name"] == "my_nodes"
    (measured,) = [t for t in document["collectives"] if t["kind"] == "all_reduce" and t["ranks"] == 8]
    assert [p["duration_ns"] for p in measured["points"]] == [row[-1] for row in rows]
    # Some of them: the others are named.
    done, _ = fit(tmp_path, [["h100-sxm", *rows[0][1:]], *rows])
    assert done.returncode == 0 and "passed over  3 rows of device my_nodes" in done.stdout
    matmuls, _ = fit(tmp_path, [["abacus", "bf16", 1, 256, 256, 256, 9_000]], columns=MATMUL_COLUMNS)
    assert matmuls.returncode == 3 and "abacus" in matmuls.stderr


@pytest.mark.parametrize(
    ("kind", "ranks"), [("all-reduce", 16), ("all-gather", 32), ("reduce-scatter", 4), ("all-gather", 2)]
)
def test_what_nobody_measured_stays(tmp_path, kind, ranks):
    rows = ring_of(kind, ranks, max(1, ranks // 8))
    done, document = fit(tmp_path, rows)
    assert done.returncode == 0, done.stderr
    base = shipped()
    changed = [t for t in document["collectives"] if t not in base["collectives"]]
    assert len(changed) == 1 and changed[0]["ranks"] == ranks
    assert changed[0]["link"] == ("network" if ranks > 8 else "nvlink")
    assert changed[0].get("nodes", 1) == max(1, ranks // 8)
    document["collectives"] = base["collectives"]
    assert document == base  # neither links nor rates
    # The cost model finds the table, by the rule that put it there.
    again = cost(tmp_path / "rows.csv", "--cluster", tmp_path / "mine.json")
    assert errors(again.stdout)["from 16 MiB"][1] == 0 and f"measured {ranks} ranks" in again.stdout
    for line in ("changed", "stayed", "step"):
        assert re.search(f"^{line} ", done.stdout, re.M), done.stdout
    # Nine tables of two, four and eight ranks (the rows are of one group at once, those of two and four are not), and
    # two links.
    assert (
        len(re.findall("^stayed +all_|^stayed +reduce_", done.stdout, re.M)) == 9
        and len(re.findall("^stayed +link", done.stdout, re.M)) == 2
    )


def test_a_fit_says_how_the_step_of_a_node_moved(tmp_path):
    pattern = r"on (\d+) ranks: ([\d.]+) ms, was ([\d.]+) ms \(([-+][\d.]+) %\)"
    done, _ = fit(tmp_path, ring_of("all-reduce", 16, 2))
    assert [(r, by) for r, _, _, by in re.findall(pattern, done.stdout)] == [("8", "+0.0"), ("64", "+0.0")]
    # A tenth of the rate inside a node is felt on its ranks; the figure is that of simulate.
    done, _ = fit(tmp_path, ring_of("all-gather", 8) + ring_of("reduce-scatter", 8), base="h100_sxm_8")
    ((ranks, is_now, was, by),) = re.findall(pattern, done.stdout)
    assert ranks == "8" and float(by) > 5
    trace = ROOT / "tools/clusters/reference/llama_4_layers.json"
    for cluster, step in (("h100_sxm_8", was), (tmp_path / "mine.json", is_now)):
        plan = tmp_path / "plan.json"
        arguments = [
            COMMAND, "plan", trace, "--cluster", cluster, "--param-dtype", "bfloat16", "--reduce-dtype", "float32",
            "-o", plan, "-q",
        ]
        assert subprocess.run(arguments).returncode == 0
        told = subprocess.run([COMMAND, "simulate", plan], capture_output=True, text=True).stdout
        assert f"{step} ms" in re.search("^  step .*$", told, re.M)[0], told


def test_the_rows_of_known_devices_are_reported_beside_unknown_ones(tmp_path):
    rows = [["h100-sxm", "all-gather", 1, 8, 1 << 24, 150_000], ["my_nodes", "all-gather", 1, 8, 1 << 24, 150_000]]
    done = cost(table(tmp_path / "c.csv", COLLECTIVE_COLUMNS, rows))
    assert done.returncode == 0, done.stderr
    assert errors(done.stdout)["from 16 MiB"][0] == 1
    assert "no shipped cluster is of my_nodes: 1 rows" in done.stdout
    matmuls = [["h100-sxm", "bf16", 1, 512, 512, 512, 9_000], ["my_nodes", "bf16", 1, 512, 512, 512, 9_000]]
    done = cost(table(tmp_path / "m.csv", MATMUL_COLUMNS, matmuls))
    assert done.returncode == 0 and "my_nodes: 1 rows" in done.stdout and errors(done.stdout)["bfloat16"][0] == 1


def test_a_group_over_nodes_is_predicted_where_it_lies(tmp_path):
    rows = [
        ["h100-sxm", "all-reduce", 1, 16, 1 << 30, 7_000_000],
        ["h100-sxm", "all-to-all", 1, 16, 1 << 30, 7_000_000],
        ["h100-sxm", "send-recv", 1, 8, 1 << 30, 7_000_000],
    ]
    done = cost(table(tmp_path / "c.csv", COLLECTIVE_COLUMNS, rows))
    assert done.returncode == 0, done.stderr
    assert [" ".join(line.split()[8:10]) for line in done.stdout.splitlines()[1:4]] == [
        "alpha-beta network", "alpha-beta network", "alpha-beta nvlink",
    ]
    columns = [*COLLECTIVE_COLUMNS, "nodes"]
    done = cost(table(tmp_path / "n.csv", columns, [["h100-sxm", "all-gather", 1, 8, 1 << 30, 7_000_000, 2]]))
    assert "network" in done.stdout and done.returncode == 0
    done = cost(table(tmp_path / "n.csv", columns, [["h100-sxm", "all-gather", 1, 8, 1 << 30, 7_000_000, 9]]))
    assert done.returncode == 3 and "nodes" in done.stderr


def test_shipped_devices_answer_by_the_name_of_the_tables(tmp_path):
    row = ["h100-sxm", "bf16", 1, 1024, 1024, 1024, 10_000]
    done = cost(table(tmp_path / "m.csv", MATMUL_COLUMNS, [row]))
    assert done.returncode == 0, done.stderr
    unknown = cost(table(tmp_path / "u.csv", MATMUL_COLUMNS, [["abacus", *row[1:]]]))
    assert unknown.returncode == 3
    assert "abacus" in unknown.stderr and "h100-sxm" in unknown.stderr


@pytest.mark.parametrize(
    ("text", "arguments", "code", "words"),
    [
        ("device,collective\n", [], 3, ["/line/1", "concurrent_groups"]),
        (
            ",".join(COLLECTIVE_COLUMNS) + "\nd,all-gather,1,2,1024,x\n",
            ["--leave-out", "size"],
            3,
            ["/line/2", "duration_ns", "x"],
        ),
        (",".join(MATMUL_COLUMNS) + "\nd,bf16,1,2,3,4,5\n", ["--leave-out", "size"], 2, ["shape"]),
        (",".join(COLLECTIVE_COLUMNS) + "\nd,all-gather,1,2,1024,9\n", ["--leave-out", "shape"], 2, ["size or group"]),
        (",".join(COLLECTIVE_COLUMNS) + "\nd,all-gather,1,2,1024,9\n", ["--fit", "h100_sxm_8"], 2, ["-o"]),
        ("", [], 3, ["/line/1"]),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, arguments, code, words):
    path = tmp_path / "t.csv"
    path.write_text(text)
    done = cost(path, *arguments)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr
    assert not done.stdout


def test_a_missing_table_and_an_output_that_is_read(tmp_path):
    assert cost(tmp_path / "none.csv").returncode in (3, 4)
    path = table(tmp_path / "c.csv", COLLECTIVE_COLUMNS, ring_rows())
    assert cost(path, "--fit", "h100_sxm_8", "-o", path).returncode == 2

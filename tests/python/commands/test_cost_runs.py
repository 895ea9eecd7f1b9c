# SPDX-License-Identifier: Apache-2.0
"""`shardplan cost RUNS.csv --builder`: training runs predicted, and few figures of a cluster fitted to them."""

import csv
import json
import math
import re
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

sys.path.insert(0, str(ROOT / "tools" / "python"))
from shardplan.runs import fit, table
from shardplan.runs.figures import FIGURES, scaled

COMMAND = build_folder() / "bin" / "shardplan"
MPT = "shardplan.runs.mpt:build"
COLUMNS = [
    "gpu", "gpus", "model", "n_layers", "d_model", "n_heads", "sequence", "micro_batch", "micro_batches", "sharding",
    "activation_checkpointing", "tokens_per_second_per_gpu",
]
ROW = ["h100_sxm", 8, "1b", 24, 2048, 16, 2048, 14, 1, "full_shard", "false", 45455]
# Rows of MosaicML's benchmark tables for llm-foundry; the shipped documents were fitted to none of them.
PUBLISHED = [
    ["h100_80gb", 256, "7b", 32, 4096, 32, 2048, 6, 1, "full_shard", "false", 10119],
    ["h100_80gb", 8, "3b", 32, 2560, 20, 8192, 3, 6, "full_shard", "false", 16578],
    ["a100_80gb", 8, "7b", 32, 4096, 32, 8192, 8, 2, "full_shard", "true", 3206],
    ["a100_80gb", 8, "350m", 24, 1024, 16, 1024, 64, 2, "full_shard", "false", 64813],
]


def cost(*arguments, cwd=None):
    return subprocess.run([COMMAND, "cost", *map(str, arguments)], capture_output=True, text=True, cwd=cwd)


def written(path, rows, columns=COLUMNS):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def changed(column, value):
    return [value if name == column else cell for name, cell in zip(COLUMNS, ROW, strict=True)]


BAD_ROWS = [
    ("gpus", "0", "gpus is not a number (found 0, expected an integer from 1 to 1048576)"),
    ("gpus", "8.5", "gpus is not a number (found 8.5"),
    ("sequence", "2k", "sequence is not a number (found 2k"),
    ("micro_batch", "-1", "micro_batch is not a number (found -1"),
    ("micro_batches", "", "micro_batches is not a number (found "),
    (
        "tokens_per_second_per_gpu", "nan",
        "tokens_per_second_per_gpu is not a number (found nan, expected a number above 0)",
    ),
    ("tokens_per_second_per_gpu", "0", "tokens_per_second_per_gpu is not a number (found 0"),
    ("sharding", "zero3", "sharding is not known (found zero3, expected one of full_shard, shard_grad_op, no_shard)"),
    (
        "activation_checkpointing", "often",
        "activation_checkpointing is not known (found often, expected true or false)",
    ),
    ("gpu", "", "gpu is empty (found nothing, expected a name)"),
]


@pytest.mark.parametrize(("column", "value", "message"), BAD_ROWS)
def test_a_bad_cell_is_named_with_its_line(tmp_path, column, value, message):
    path = written(tmp_path / "runs.csv", [ROW, changed(column, value)])
    with pytest.raises(table.BadTable) as raised:
        table.read(str(path))
    assert str(raised.value).startswith(f"{path}: /line/3: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "/line/1: the table is empty"),
        (",".join(COLUMNS) + "\n", "/line/1: the table has no rows"),
        (",".join(COLUMNS[1:]) + "\n", "/line/1: column gpu is missing"),
        (",".join([*COLUMNS, "gpus"]) + "\n", "/line/1: column gpus is there twice"),
        (
            ",".join(COLUMNS) + "\n1,2\n",
            "/line/2: the row has another number of cells than there are columns (found 2, expected 12)",
        ),
    ],
)
def test_a_bad_table_is_said_to_be_one(tmp_path, text, message):
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(table.BadTable, match=re.escape(message)):
        table.read(str(tmp_path / "runs.csv"))


def test_cells_are_numbers_words_and_text(tmp_path):
    (run,) = table.read(str(written(tmp_path / "runs.csv", [ROW])))
    assert run.cells["n_layers"] == 24 and run.cells["activation_checkpointing"] is False and run.cells["model"] == "1b"


def test_a_builder_is_asked_once_for_what_it_reads():
    asked = table.Asked({"sequence": 4, "gpus": 8})
    assert asked["sequence"] == 4 and asked.answers == {"sequence": 4}
    assert dict(**asked) == {"sequence": 4, "gpus": 8} and asked.answers == {"sequence": 4, "gpus": 8}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 3, "needs the builder of their models"),
        (("--fit-rows", "8"), 2, "--builder makes their models"),
        (("--builder", MPT, "-o", "fitted"), 2, "--fit-rows says to how many rows"),
        (("--builder", MPT, "--fit-rows", "none"), 2, "expected a number of rows"),
        (("--builder", MPT, "--fit-rows", "8", "--figures", "luck"), 2, "no such figure (found luck"),
        (
            ("--builder", MPT, "--fit-rows", "8", "--figures", "clock,matmul,attention,memory,host"),
            2,
            "expected 4 figures or fewer",
        ),
        (("--builder", MPT, "--leave-out", "size"), 2, "is fitted by --fit-rows"),
        (("--builder", MPT, "--cluster-of", "h100_sxm"), 2, "expected GPU=FILE or GPU=NAME"),
        (
            ("--builder", MPT, "--cluster-of", "h100_sxm=abacus"),
            3,
            "/line/2: no cluster is called so: --cluster-of h100_sxm=NAME names one (found abacus, expected",
        ),
        (("--builder", "no_such_package:build"), 3, 'no module "no_such_package"'),
        (("--builder", "shardplan.runs.mpt:absent"), 3, 'has no "absent"'),
        (("--builder", "broken:build"), 3, "/line/2: the builder's model cannot be traced"),
    ],
)
def test_wrong_arguments_are_explained(tmp_path, arguments, code, words):
    (tmp_path / "broken.py").write_text("def build(row):\n    return row['colour']\n")
    path = written(tmp_path / "runs.csv", [ROW])
    done = cost(path, *arguments, cwd=tmp_path)
    assert done.returncode == code and words in done.stderr, done.stderr
    assert done.stdout == "" and not (tmp_path / "fitted").exists()


def test_fitted_figures_are_those_that_made_the_table(tmp_path):
    """The simulator itself makes the runs, on a cluster of which three figures are others."""
    truth = {"matmul": 0.8, "attention": 0.5, "memory": 0.75}
    base = json.loads((ROOT / "tools" / "clusters" / "h100_sxm_8.json").read_text())
    base["collectives"] = []
    (tmp_path / "base.json").write_text(json.dumps(base))
    (tmp_path / "truth.json").write_text(json.dumps(scaled(base, truth)))
    rows = [
        ["gpu", 8, "-", 2, width, 16, sequence, max(1, 32768 // sequence), 2, "full_shard", "false", 1]
        for width in (1024, 4096)
        for sequence in (512, 4096, 32768)
    ]
    made = cost(
        written(tmp_path / "runs.csv", rows), "--builder", MPT, "--cluster-of", f"gpu={tmp_path / 'truth.json'}", "-q"
    )
    assert made.returncode == 0, made.stderr
    measured = [int(line.split()[-2]) for line in made.stdout.splitlines()[1:] if line.lstrip()[0:1].isdigit()]
    written(tmp_path / "runs.csv", [[*row[:-1], rate] for row, rate in zip(rows, measured, strict=True)])
    arguments = [
        tmp_path / "runs.csv", "--builder", MPT, "--cluster-of", f"gpu={tmp_path / 'base.json'}", "--fit-rows", "4",
        "--figures", "matmul,attention,memory", "-q",
    ]
    fitted = [cost(*arguments, "-o", tmp_path / name) for name in ("first", "second")]
    assert all(done.returncode == 0 for done in fitted), fitted[0].stderr
    factors = {name: float(factor) for name, factor in re.findall(r"^  (\w+) +x ([\d.]+)", fitted[0].stdout, re.M)}
    assert factors.keys() == truth.keys()
    assert all(abs(math.log(factors[name] / truth[name])) < 0.05 for name in truth), factors
    assert "the blame is mostly that of" in fitted[0].stdout
    last = fitted[0].stdout.splitlines()[-1]
    assert re.match(r"gpu +other rows +2 rows +median +0\.\d%", last), last
    assert fitted[0].stdout == fitted[1].stdout
    assert (tmp_path / "first" / "gpu.json").read_bytes() == (tmp_path / "second" / "gpu.json").read_bytes()
    sources = json.loads((tmp_path / "first" / "gpu.json").read_text())["sources"]
    assert {
        s["figure"] for s in sources if s["origin"] == "fitted" and "4 training runs of runs.csv" in s.get("note", "")
    } == {"matmul", "attention", "memory"}


def test_one_odd_run_does_not_move_the_figures():
    document = {
        "device": {"memory_bytes_per_second": 10**12, "matmul": [{"dtype": "bfloat16", "flops_per_second": 10**15}]}
    }

    def predict(made, rows):
        device = made["device"]
        return [
            -math.log(
                1 / device["matmul"][0]["flops_per_second"] * 1e15
                + (row + 1) * 1e11 / device["memory_bytes_per_second"]
            )
            for row in rows
        ]

    rows = list(range(8))
    measured = predict(scaled(document, {"matmul": 0.7, "memory": 0.9}), rows)
    measured[3] -= 0.4
    found = fit.fit(document, ["matmul", "memory"], rows, measured, predict)
    assert [round(figure.factor, 1) for figure in found.figures] == [0.7, 0.9]
    assert fit.chosen(document, ["matmul", "memory"], rows, 3, predict) == fit.chosen(
        document, ["matmul", "memory"], rows, 3, predict
    )
    assert {0, 7} <= set(fit.chosen(document, ["matmul", "memory"], rows, 3, predict))


def test_a_figure_that_no_row_tells_stays():
    document = {"device": {"memory_bytes_per_second": 10**12}, "links": [{}, {"bytes_per_second": 10**9}]}
    found = fit.fit(
        document,
        ["memory", "network"],
        [0],
        [math.log(0.5)],
        lambda made, rows: [math.log(made["device"]["memory_bytes_per_second"] / 1e12) for _ in rows],
    )
    memory, network = found.figures
    assert memory.told and abs(memory.factor - 0.5) < 0.02
    assert not network.told and network.factor == 1


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_without_change_leaves_the_document(name):
    document = json.loads((ROOT / "tools" / "clusters" / "h100_sxm_64.json").read_text())
    assert scaled(document, {name: 1.0}) == document
    assert scaled(document, {name: 0.8}) != document


def test_the_shipped_clusters_predict_published_runs(tmp_path):
    done = cost(written(tmp_path / "runs.csv", PUBLISHED), "--builder", MPT)
    assert done.returncode == 0, done.stderr
    assert "4 rows traced" in done.stderr
    summary = re.findall(
        r"^(\S+) +rows +(\d+) rows +median +([\d.]+)% +90th percentile +([\d.]+)% +worst +([\d.]+)%", done.stdout, re.M
    )
    assert [(gpu, rows) for gpu, rows, *_ in summary] == [("h100_80gb", "2"), ("a100_80gb", "2")]
    assert all(float(worst) < 8 for *_, worst in summary), done.stdout

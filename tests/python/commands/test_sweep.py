# SPDX-License-Identifier: Apache-2.0
"""`shardplan sweep`: every combination once, whatever happens to the process, and the border of what fits."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, build_folder

sys.path.insert(0, str(ROOT / "tools" / "python"))
from shardplan.sweep.configurations import Configuration, groups_of, part_of, product
from shardplan.sweep.page import front, page
from shardplan.sweep.rows import Rows
from shardplan.sweep.solve import solve

COMMAND = build_folder() / "bin" / "shardplan"
TRACE = ROOT / "examples" / "three_layers" / "trace.json"
GRID = ["--ranks", "2,4,8", "--policy", "fsdp1,fsdp2", "--vary", "checkpoint=-|layers.*"]
PLAN = ["--", "--unit", "layers.*"]
SEED = 715


def arguments(*more, plan=PLAN):
    return [COMMAND, "sweep", *map(str, more), *plan]


def sweep(*more, plan=PLAN):
    environment = os.environ | {"SHARDPLAN_PYTHON": sys.executable}
    return subprocess.run(arguments(*more, plan=plan), capture_output=True, text=True, env=environment, timeout=100)


def rows_of(path):
    with open(path, newline="") as file:
        return sorted(tuple(row.items()) for row in csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "whole.csv"
    done = sweep(TRACE, *GRID, "-o", path)
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def test_every_combination_is_there_once_and_as_the_commands_say(whole, tmp_path):
    rows = [dict(row) for row in rows_of(whole[0])]
    assert len(rows) == 12
    assert len({(row["ranks"], row["policy"], row["checkpoint"]) for row in rows}) == 12
    assert not any(row["error"] for row in rows)
    plan = tmp_path / "p.json"
    for row in (rows[0], rows[-1]):
        checkpoint = ["--checkpoint", row["checkpoint"]] if row["checkpoint"] != "-" else []
        subprocess.run(
            [
                COMMAND, "plan", TRACE, "--ranks", row["ranks"], "--policy", row["policy"], *checkpoint, "--unit",
                "layers.*", "-q", "-o", plan,
            ],
            check=True,
        )
        report = tmp_path / "r.json"
        subprocess.run([COMMAND, "simulate", plan, "-q", "--report", report], check=True, stdout=subprocess.DEVNULL)


        assert row["step_ms"] == f"{json.loads(report.read_text())['step_ns'] / 1e6:.3f}"


def test_the_best_that_fits_is_marked(whole):
    rows = [dict(row) for row in rows_of(whole[0])]
    best = max(rows, key=lambda row: float(row["tokens_per_second"]))
    marked = [line for line in whole[1].splitlines() if line.startswith("*")]
    assert len(marked) == 1 and best["step_ms"] in marked[0]


def test_a_killed_sweep_goes_on(whole, tmp_path):
    path = tmp_path / "rows.csv"
    environment = os.environ | {"SHARDPLAN_PYTHON": sys.executable}
    process = subprocess.Popen(
        arguments(TRACE, *GRID, "-o", path, "--jobs", 1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not path.exists() or path.read_bytes().count(b"\n") < 4):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = path.read_bytes()
    assert 4 <= before.count(b"\n") <= 13
    path.write_bytes(before + b"half,of,a,li")
    done = sweep(TRACE, *GRID, "-o", path)
    assert done.returncode == 0, done.stderr
    assert set(before.splitlines()) <= set(path.read_bytes().splitlines())
    assert path.read_bytes() == whole[0].read_bytes()


def test_part_of_a_line_goes_where_nothing_is_left_to_do(whole, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(whole[0].read_bytes() + b"half,of,a,li")
    done = sweep(TRACE, *GRID, "-o", path)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == whole[0].read_bytes()


def test_parts_together_are_the_whole(whole, tmp_path):
    parts = [tmp_path / f"{i}.csv" for i in (1, 2, 3)]
    for i, part in enumerate(parts, 1):
        assert sweep(TRACE, *GRID, "-o", part, "--part", f"{i}/3").returncode == 0
    merged = tmp_path / "merged.csv"
    done = sweep("--merge", *parts, "-o", merged, plan=[])
    assert done.returncode == 0, done.stderr
    assert rows_of(merged) == rows_of(whole[0])


def test_what_the_planner_refuses_is_a_row_with_its_reason(tmp_path):
    path = tmp_path / "rows.csv"
    done = sweep(TRACE, "--ranks", "2,4", "--vary", "unit=layers.*|no.such", "-o", path, plan=[])
    assert done.returncode == 0, done.stderr
    wrong = [dict(row) for row in rows_of(path) if dict(row)["error"]]
    assert len(wrong) == 2 and all("no.such" in row["error"] for row in wrong)
    assert "no.such" in done.stdout


def test_a_budget_decides_what_fits(tmp_path):
    assert sweep(TRACE, "--ranks", "2", "--budget", "1MiB").returncode == 1
    assert sweep(TRACE, "--ranks", "2", "--budget", "70GiB").returncode == 0


def test_the_fewest_ranks_that_fit(whole, tmp_path):
    """Reserved memory falls from 0.88 GiB on one rank to 0.71 on four; the budget, asked of the commands themselves,
    lies between two numbers of ranks."""
    path = tmp_path / "rows.csv"
    done = sweep(TRACE, "--solve", "min-ranks", "--budget", "0.72GiB", "-o", path)
    assert done.returncode == 0, done.stderr
    found = next(dict(row) for row in rows_of(path))
    assert found["fits"] == "yes" and int(found["ranks"]) > 1
    fewer = tmp_path / "fewer.csv"
    assert sweep(TRACE, "--ranks", int(found["ranks"]) - 1, "--budget", "0.72GiB", "-o", fewer).returncode == 0
    assert int(found["cache_releases"]) == 0 < int(dict(rows_of(fewer)[0])["cache_releases"]), (
        "one rank fewer fits with releases only"
    )


def test_what_no_number_of_ranks_fits_says_why():
    """From memory of `whole` bytes and `shared` that ranks divide: it ends where more ranks cannot help, and never
    where they do."""
    numbers = random.Random(SEED)
    for _ in range(200):
        whole, shared, budget = numbers.randrange(1, 100), numbers.randrange(1, 10_000), numbers.randrange(1, 200)
        asked = []

        def evaluate(c, whole=whole, shared=shared, budget=budget, asked=asked):
            asked.append(int(c["ranks"]))
            needs = whole + shared / int(c["ranks"])
            return {
                "fits": "yes" if needs <= budget else "no", "cache_releases": 0, "reserved_gib": f"{needs:.3f}",
                "budget_gib": budget, "why": "",
            }

        answer, results = solve("min-ranks", configuration(source="m", ranks="1"), evaluate)
        least = next((n for n in range(1, 20_000) if whole + shared / n <= budget), None)
        if answer is not None:
            assert int(answer["ranks"]) == least, f"seed {SEED}"
        else:
            assert budget <= whole and "more ranks do not help" in results["why"] and max(asked) <= 1 << 24, (
                f"seed {SEED}: {whole} {shared} {budget}"
            )
            assert budget == whole or max(asked) <= 1 << 15, f"seed {SEED}: {whole} {shared} {budget}"
    alone, results = solve(
        "min-ranks",
        configuration(source="m", ranks="1"),
        lambda c: {"fits": "no", "why": "activations alone exceed the budget"},
    )
    assert alone is None and results["why"] == "activations alone exceed the budget"


def test_activations_that_no_device_holds_are_told_at_once(tmp_path):
    path = tmp_path / "rows.csv"
    done = sweep(TRACE, "--solve", "min-ranks", "--memory-budget", "0.2GiB", "-o", path)
    assert done.returncode == 1, done.stderr
    assert "nothing fits: activations alone exceed the budget: " in done.stdout and " bytes)" in done.stdout
    several = sweep(TRACE, "--policy", "fsdp1,fsdp2", "--solve", "min-ranks", "--budget", "0.2GiB")
    assert several.stdout.count("nothing fits (policy fsdp") == 2


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        ([], 2, "SOURCE"),
        ([TRACE, "--batch", "0"], 2, "positive"),
        ([TRACE, "--solve", "max-batch", "--batch", "2"], 2, "--batch"),
        ([TRACE, "--part", "4/3"], 2, "I/N"),
        ([TRACE, "--budget", "80 parsecs"], 2, "80GiB"),
        ([TRACE, "--vary", "unit"], 2, "FLAG"),
        ([TRACE, "--vary", "parallelism.tensor_parallel_degree=1,2"], 2, "expected torchtitan:MODULE:CONFIG"),
        (["torchtitan:llama3", "--vary", "activation_checkpoint="], 2, "a key of torchtitan's"),
        (["--merge", TRACE, "-o", "/dev/null"], 3, "another sweep"),
    ],
)
def test_wrong_usage(more, code, word, tmp_path):
    done = sweep(*more, plan=[])
    assert done.returncode == code, done.stderr
    assert word in done.stderr


def test_rows_of_another_sweep_are_left_alone(whole, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(whole[0].read_bytes())
    done = sweep(TRACE, "--ranks", "2", "-o", path)
    assert done.returncode == 3 and "another sweep" in done.stderr
    assert path.read_bytes() == whole[0].read_bytes()


def test_the_page_marks_what_no_other_beats(whole, tmp_path):
    """The front from all pairs; the best that fits ringed; names as text, whatever they hold."""
    rows = [dict(row) for row in rows_of(whole[0])]
    path = tmp_path / "page.html"
    done = sweep("--merge", whole[0], "-o", tmp_path / "merged.csv", "--html", path, plan=[])
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    assert text.count("<svg") == 2 and text.count("class='best'") == 2
    points = [(float(row["step_ms"]), float(row["needed_gib"])) for row in rows]
    beaten = [any(p[0] <= q[0] and p[1] <= q[1] and p != q for p in points) for q in points]
    assert {points[i] for i in front(points)} == {p for p, b in zip(points, beaten, strict=True) if not b}
    assert text.count("<tr") == 1 + len(rows)
    hostile = page([row | {"source": "<script>x</script>"} for row in rows], ["source"], 2.5)
    assert "<script>" not in hostile and "price of a million tokens" in hostile


def test_the_parquet_file_has_the_rows_with_types(whole, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    done = sweep("--merge", whole[0], "-o", tmp_path / "merged.csv", "--parquet", path, plan=[])
    assert done.returncode == 0, done.stderr
    table = pq.read_table(path)
    with open(whole[0], newline="") as file:
        rows = list(csv.DictReader(file))
    assert table.column_names == list(rows[0])
    for written, row in zip(table.to_pylist(), rows, strict=True):
        assert (written["ranks"], written["policy"]) == (int(row["ranks"]), row["policy"])
        assert written["step_ms"] == float(row["step_ms"]) and written["fits"] is (row["fits"] == "yes")
        assert written["error"] is None


def test_no_output_takes_the_place_of_another(whole, tmp_path):
    path = tmp_path / "one"
    for more in (["-o", path, "--parquet", path], ["-o", path, "--html", path], ["--parquet", TRACE]):
        done = sweep(TRACE, *more, plan=[])
        assert done.returncode == 2 and not path.exists(), done.stderr


def test_fronts_of_random_points():
    numbers = random.Random(SEED)
    for _ in range(200):
        points = [(numbers.randrange(8), numbers.randrange(8)) for _ in range(numbers.randrange(1, 12))]
        unbeaten = {q for q in points if not any(p[0] <= q[0] and p[1] <= q[1] and p != q for p in points)}
        kept = [points[i] for i in front(points)]
        assert set(kept) == unbeaten and len(kept) == len(set(kept)), f"seed {SEED}: {points}"


def test_one_process_answers_as_the_commands_do(tmp_path):
    """Everything that is kept between questions: other ranks, clusters, flags and traces, and back."""
    strategy = tmp_path / "strategy.json"
    subprocess.run(
        [COMMAND, "plan", TRACE, "--unit", "layers.*", "--write-strategy", strategy, "-q", "-o", tmp_path / "p.json"],
        check=True,
    )
    variants = [
        ["--ranks", ranks, "--cluster", cluster, *more]
        for more in (
            ["--unit", "layers.*"],
            ["--unit", "layers.*", "--reshard-after-forward", "false"],
            ["--strategy", str(strategy), "--policy", "fsdp1"],
        )
        for ranks in ("2", "8", "1")
        for cluster in ("h100_sxm_8", "a100_80_64")
    ]
    questions = [[str(TRACE), *variant] for variant in variants + variants[:3]] + [
        [str(TRACE), "--unit", "no.such"],
        ["absent.json"],
    ]
    done = subprocess.run(
        [COMMAND, "evaluate"],
        input="".join(json.dumps(q) + "\n" for q in questions),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(questions)
    for question, answer in zip(questions[:-2], answers[:-2], strict=True):
        plan, report = tmp_path / "q.json", tmp_path / "r.json"
        subprocess.run([COMMAND, "plan", *question, "-q", "-o", plan], check=True)
        subprocess.run([COMMAND, "simulate", plan, "--no-verify", "-q", "--report", report], capture_output=True)
        expected = json.loads(report.read_text())
        assert answer["step_ns"] == expected["step_ns"], question
        assert all(
            answer[name] == expected["memory"][name]
            for name in ("peak_bytes", "reserved_bytes", "cache_releases", "fits")
        ), question
    assert "no.such" in answers[-2]["error"] and "absent.json" in answers[-1]["error"]
    with open("/dev/full", "w") as full:
        told = subprocess.run(
            [COMMAND, "evaluate"], input=json.dumps(questions[0]) + "\n", stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert told.returncode == 4 and "standard output" in told.stderr
    assert subprocess.run([COMMAND, "evaluate"], input="{}\n", capture_output=True, text=True).returncode == 3


@pytest.mark.parametrize("flags", [[], ["--reshard-after-forward", "false"]])
def test_a_plan_on_another_cluster_is_the_one_that_is_made_for_it(tmp_path, flags):
    """Memory of the device's libraries goes by the device: cuBLAS's workspace differs."""
    reports = []
    for made_for, on in (("a100_80_64", "h100"), ("h100", "h100")):
        plan, report = tmp_path / "plan.json", tmp_path / "report.json"
        subprocess.run(
            [COMMAND, "plan", "llama-3.1-8b", "--cluster", made_for, "--ranks", "8", *flags, "-q", "-o", plan],
            check=True,
        )
        subprocess.run([COMMAND, "simulate", plan, "--cluster", on, "-q", "--report", report], capture_output=True)
        reports.append({name: value for name, value in json.loads(report.read_text()).items() if name != "plan_digest"})
    assert reports[0] == reports[1]


def configuration(**values):
    return Configuration(tuple(values.items()))


def test_parts_are_disjoint_and_whole():
    everything = product({"source": ["a"], "ranks": [str(n) for n in range(1, 24)]})
    for count in range(1, 9):
        parts = [c for i in range(1, count + 1) for c in part_of(everything, f"{i}/{count}")]
        assert sorted(c.values for c in parts) == sorted(c.values for c in everything)


def test_groups_are_disjoint_and_whole_and_share_plans():
    everything = product(
        {
            "source": ["a", "b"], "ranks": ["2", "4"], "cluster": ["x", "y"], "policy": ["fsdp1", "fsdp2"],
            "unit": ["u", "v"],
        }
    )
    for workers in (1, 2, 7):
        groups = groups_of(everything, workers)
        together = [c for group in groups for c in group]
        assert sorted(c.values for c in together) == sorted(c.values for c in everything)
        changes = sum(
            a.replace("cluster", "") != b.replace("cluster", "") for a, b in zip(together, together[1:], strict=False)
        )
        assert changes == len(everything) // 2 - 1  # each plan once, for both clusters
    assert groups_of([], 2) == []


def test_releases_of_the_cache_fit_where_they_are_allowed():
    def evaluate(c):
        return {"fits": "yes" if int(c["batch"]) <= 40 else "no", "cache_releases": max(0, int(c["batch"]) - 20)}

    for releases, most in ((False, "20"), (True, "40")):
        answer, _ = solve("max-batch", configuration(source="m", batch="1"), evaluate, releases)
        assert answer["batch"] == most


def test_bisection_finds_the_border():
    """Against trying every value, for any border."""
    numbers = random.Random(SEED)
    for border in [0, 1, 2, 3, *(numbers.randrange(4, 5_000) for _ in range(200))]:
        asked = []

        def evaluate(c, border=border, asked=asked):
            asked.append(int(c["batch"]))
            return {"fits": "yes" if int(c["batch"]) <= border else "no", "cache_releases": 0, "value": c["batch"]}

        answer, results = solve("max-batch", configuration(source="m", batch="1"), evaluate)
        assert (int(answer["batch"]) if answer else 0) == border, f"seed {SEED}"
        assert results["value"] == str(max(1, border))
        assert len(asked) == len(set(asked)) <= 2 * border.bit_length() + 2
        least, _ = solve(
            "min-ranks",
            configuration(source="m", ranks="1"),
            lambda c, b=border: {"fits": "yes" if int(c["ranks"]) > b else "no", "cache_releases": 0},
        )
        assert int(least["ranks"]) == border + 1
    assert solve("min-ranks", configuration(source="m", ranks="1"), lambda c: {"fits": "no"}, most=64)[0] is None
    sequence, _ = solve(
        "max-seq",
        configuration(source="m", seq="1"),
        lambda c: {"fits": "yes" if int(c["seq"]) <= 5_000 else "no", "cache_releases": 0},
    )
    assert sequence["seq"] == str(5_000 // 128 * 128)


def test_all_is_the_same_however_many_work_at_it(tmp_path):
    written = []
    for jobs in ("1", "3"):
        page, rows = tmp_path / f"{jobs}.html", tmp_path / f"{jobs}.csv"
        done = sweep(TRACE, *GRID, "--jobs", jobs, "--html", page, "-o", rows, "-q")
        assert done.returncode == 0, done.stderr
        written.append((page.read_bytes(), rows.read_bytes(), done.stdout))
    assert written[0] == written[1]


def test_rows_get_the_order_in_which_they_were_asked_for(tmp_path):
    path = tmp_path / "rows.csv"
    asked = [configuration(source="m", ranks=str(ranks)) for ranks in (1, 2, 3)]
    rows = Rows(str(path), ["source", "ranks"])
    rows.add([(asked[1], {"fits": "yes"})])
    rows.add([(asked[2], {}), (asked[0], {})])
    rows.close(asked)
    assert [dict(row)["ranks"] for row in csv.DictReader(path.read_text().splitlines())] == ["1", "2", "3"]
    assert list(Rows(str(path), ["source", "ranks"]).done) == asked

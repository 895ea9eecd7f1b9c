# SPDX-License-Identifier: Apache-2.0
"""`shardplan calibrate --from measured.json`: figures that made a step are found in it, each one or several, and what
it does not tell stays."""

import json
import math
import pathlib
import gzip
import re
import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "tools" / "python"))
from shardplan.runs.figures import scaled  # noqa: E402

PROFILES = pathlib.Path(__file__).resolve().parent / "profiles"
FLAGS = ("--unit", "blocks.*", "--param-dtype", "bfloat16", "--reduce-dtype", "float32", "--optimizer", "adamw")


@pytest.fixture(scope="module")
def plan(shardplan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    trace = folder / "trace.json"
    trace.write_bytes(gzip.decompress((PROFILES / "large_trace.json.gz").read_bytes()))
    done = shardplan(
        "plan", trace, "--cluster", "h100_sxm_64_100g", "--ranks", "16", *FLAGS, "-q", "-o", folder / "plan.json"
    )
    assert done.returncode == 0, done.stderr
    return folder / "plan.json"


def measured_on(shardplan, plan, factors, path):
    """The report of the plan's step on a cluster whose figures are so many times as fast."""
    document = json.loads(shardplan("show", plan, "--json").stdout)["cluster"]
    cluster = path.with_suffix(".cluster.json")
    cluster.write_text(json.dumps(scaled({**document, "schema": "shardplan.cluster/1"}, factors)))
    done = shardplan("simulate", plan, "--cluster", cluster, "-q", "--report", "-")
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    report["measured"] = {"device": "a GPU", "rank": 0, "ranks": 1, "steps_ns": [report["step_ns"]]}
    path.write_text(json.dumps(report))
    return path


def said(text):
    """Without the lines of progress, which depend on the clock."""
    return [line for line in text.splitlines() if "clusters tried" not in line]


def factors_in(text):
    return {
        match[1]: (float(match[2]), match[3])
        for match in re.finditer(r"^  (\w+) +x ([\d.]+) \(.*?\): (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize(
    "factors",
    [{}, {"matmul": 0.7}, {"matmul": 0.85, "memory": 0.9, "network": 0.5}, {"matmul": 1.2, "network": 2.0}],
    ids=lambda factors: "_".join(factors) or "none",
)
def test_the_figures_that_made_a_step_are_found(factors, shardplan, plan, tmp_path):
    report = measured_on(shardplan, plan, factors, tmp_path / "measured.json")
    done = shardplan("calibrate", "--from", report, "--plan", plan, "-o", tmp_path / "fitted.json")
    assert done.returncode == 0, done.stderr
    found = factors_in(done.stderr)
    for name, (factor, words) in found.items():
        if "do not tell" not in words:
            assert math.log(factor) == pytest.approx(math.log(factors.get(name, 1)), abs=0.06), (name, done.stderr)
        else:
            assert name not in factors
    if factors:
        most = max(factors, key=lambda name: abs(math.log(factors[name])))
        assert f"the blame is mostly that of {most} " in done.stderr
    else:
        assert "no figure is to blame" in done.stderr
    # The fitted cluster predicts the step.
    fitted = json.loads(
        shardplan("simulate", plan, "--cluster", tmp_path / "fitted.json", "-q", "--report", "-").stdout
    )
    assert fitted["step_ns"] == pytest.approx(json.loads(report.read_text())["step_ns"], rel=0.02)
    compared = shardplan("compare", plan, report, "--cluster", tmp_path / "fitted.json", "-q")
    assert compared.returncode == 0, compared.stderr
    again = shardplan("calibrate", "--from", report, "--plan", plan, "-o", tmp_path / "again.json")
    assert (
        said(again.stderr) == said(done.stderr)
        and (tmp_path / "again.json").read_bytes() == (tmp_path / "fitted.json").read_bytes()
    )


def test_only_what_is_asked_is_changed(shardplan, plan, tmp_path):
    report = measured_on(shardplan, plan, {"matmul": 0.8, "attention": 0.8}, tmp_path / "measured.json")
    done = shardplan(
        "calibrate", "--from", report, "--plan", plan, "--figures", "clock", "--name", "mine", "-o",
        tmp_path / "fitted.json",
    )
    assert done.returncode == 0, done.stderr
    assert factors_in(done.stderr).keys() == {"clock"}
    made = json.loads((tmp_path / "fitted.json").read_text())
    assert made["name"] == "mine" and made["device"]["clock_ppm"] < 900_000
    assert {source["origin"] for source in made["sources"] if source["figure"] == "matmul"} == {"fitted"}


def test_a_real_profile(shardplan, tmp_path):
    """Eight layers of width 2048 on one H200: a product of odd width is what the shipped cluster predicts too fast."""
    trace = tmp_path / "trace.json"
    trace.write_bytes(gzip.decompress((PROFILES / "large_trace.json.gz").read_bytes()))
    plan, measured, fitted = tmp_path / "plan.json", tmp_path / "measured.json", tmp_path / "fitted.json"
    for line in (
        ("plan", trace, "--cluster", "h200_8", "--ranks", "1", *FLAGS, "-q", "-o", plan),
        ("import-profile", PROFILES / "large_fsdp2_rank0.json.gz", "--plan", plan, "-q", "-o", measured),
        ("calibrate", "--from", measured, "--plan", plan, "-o", fitted),
        ("compare", plan, measured, "--json", tmp_path / "before.json", "-q"),
        ("compare", plan, measured, "--cluster", fitted, "--json", tmp_path / "after.json", "-q"),
    ):
        done = shardplan(*line)
        assert done.returncode == 0, done.stderr
    before, after = (json.loads((tmp_path / name).read_text()) for name in ("before.json", "after.json"))
    error = [abs(one["predicted_ns"] / one["measured_ns"] - 1) for one in (before, after)]
    assert error[1] < 0.05 and error[1] < error[0] / 2


def test_wrong_pairs_are_refused(shardplan, plan, tmp_path):
    report = measured_on(shardplan, plan, {}, tmp_path / "measured.json")
    out = tmp_path / "out.json"

    def refused(code, *arguments):
        done = shardplan("calibrate", "--from", *arguments, "-o", out)
        assert done.returncode == code and not out.exists(), done.stderr
        return done.stderr

    assert "found no --plan" in refused(3, report)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**json.loads(report.read_text()), "plan_digest": "sha256:" + "0" * 64}))
    assert "/plan_digest" in refused(3, other, "--plan", plan)
    simulated = {name: value for name, value in json.loads(report.read_text()).items() if name != "measured"}
    other.write_text(json.dumps(simulated))
    assert "found a simulated report" in refused(3, other, "--plan", plan)
    other.write_text(json.dumps({**json.loads(report.read_text()), "operators": [{"kind": 1}]}))
    assert "/operators/0" in refused(3, other, "--plan", plan)
    assert "no such figure" in refused(2, report, "--plan", plan, "--figures", "speed")
    assert "two outputs" not in refused(3, report, tmp_path / "nowhere.json", "--plan", plan)

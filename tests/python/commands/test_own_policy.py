# SPDX-License-Identifier: Apache-2.0
"""--policy-library: libraries that misbehave are errors that name them; a plan of another policy is read without its
library."""

import json
import pathlib
import subprocess

import pytest
from conftest import ROOT, build_folder

EXAMPLE = ROOT / "examples" / "three_layers"
SOURCES = pathlib.Path(__file__).parent / "own_policy"
BAD_INPUT, USAGE = 3, 2


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> pathlib.Path:
    """The folder of the libraries, built against an installed package."""
    folder = tmp_path_factory.mktemp("own_policy")
    installed = folder / "installed"
    for words in (
        ["cmake", "--install", str(build_folder()), "--prefix", str(installed)],
        ["cmake", "-S", str(SOURCES), "-B", str(folder / "build"), "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={installed}"],
        ["cmake", "--build", str(folder / "build")],
    ):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build"


@pytest.fixture
def plan(shardplan, tmp_path):
    """Plans three layers by a library; gives the result, and the plan's path."""

    def run(*words):
        return shardplan(
            "plan", EXAMPLE / "trace.json", "--cluster", EXAMPLE / "cluster.json", "--unit", "layers.*", "-q", "-o",
            tmp_path / "plan.json", *words,
        )

    return run


def test_a_library_that_is_not_there_or_is_none(plan, tmp_path):
    text = tmp_path / "text.so"
    text.write_text("no library\n")
    for path, says in (
        (tmp_path / "missing.so", "there is no such file"),
        (text, "cannot be loaded"),
        (tmp_path, "cannot be loaded"),
    ):
        done = plan("--policy-library", path)
        assert done.returncode == BAD_INPUT
        assert done.stderr.startswith(f"shardplan: error: {path}: {says}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("taken", "its policy is called fsdp2, which is built in"),
        ("throws", "its policy is not described, an exception is thrown: no description today"),
        ("unmade", "policy unmade has nothing that makes it"),
        ("twice", "two knobs of policy twice are called a"),
        ("none", "has no policy: SHARDPLAN_POLICY(...) is in none of its files"),
        ("old", "was built for another shardplan: build it again (found shardplan 0.1.0 with headers 000000000000"),
    ],
)
def test_a_policy_that_cannot_be_used(libraries, plan, name, says):
    path = libraries / f"{name}.so"
    done = plan("--policy-library", path)
    assert done.returncode == BAD_INPUT
    assert done.stderr.startswith(f"shardplan: error: {path}: {says}"), done.stderr


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("throws", "it has thrown an exception: no schedule today"),
        ("counts", "the policy's state does not repeat from step to step"),
        ("has no stream", "wait is issued on stream 9, which Stream() has not given"),
        ("gathers nothing", "its plan does not verify: use_before_unshard"),
    ],
)
def test_a_policy_that_makes_a_mistake(libraries, plan, mistake, says):
    path = libraries / "careless.so"
    done = plan("--policy-library", path, "--policy-knob", f"mistake={mistake}")
    assert done.returncode == BAD_INPUT
    assert done.stderr.startswith(f"shardplan: error: {path}: policy careless ({path}): {says}"), done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy-knob", "speed=3"], "found speed=3, expected one of mistake="),
        (["--policy-knob", "mistake"], "found mistake, expected one of mistake="),
        (["--policy-knob", "share=much"], "found share=much, expected a value like that of share=0.5"),
        (["--policy-knob", "share=inf"], "found share=inf"),
        (["--policy-knob", "quick=1"], "found quick=1"),
        (["--policy", "fsdp2"], "excludes"),
    ],
)
def test_words_that_make_no_sense_with_a_library(libraries, plan, words, says):
    done = plan("--policy-library", libraries / "careless.so", *words)
    assert done.returncode == USAGE
    assert says in done.stderr


def test_a_knob_without_a_library_makes_no_sense(plan):
    done = plan("--policy-knob", "a=1")
    assert (done.returncode, done.stderr) == (USAGE, "shardplan: error: --policy-knob is of --policy-library FILE\n")


def test_only_policies_that_are_built_in_are_searched(libraries, shardplan):
    done = shardplan(
        "optimize", EXAMPLE / "trace.json", "--memory-budget", "device", "--policy-library", libraries / "careless.so",
        "-q",
    )
    assert done.returncode == USAGE and "--policy-library" in done.stderr


def test_strategies_and_plans_are_read_without_the_library(libraries, plan, shardplan, tmp_path):
    strategy = tmp_path / "strategy.json"
    done = plan(
        "--policy-library", libraries / "careless.so", "--policy-knob", "share=2", "--policy-knob", "quick=true",
        "--skip", "verify", "--write-strategy", strategy,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(strategy.read_text())["policy_knobs"] == {"quick": True, "share": 2}
    assert shardplan("validate", strategy).stdout == f"{strategy}: strategy: policy careless, 2 unit rules\n"

    made = tmp_path / "plan.json"
    knobs = {"mistake": "gathers nothing", "quick": True, "share": 2}
    assert json.loads(made.read_text())["strategy"]["policy_knobs"] == knobs, "a plan has every knob"
    text = tmp_path / "plan.txt"
    text.write_text(shardplan("show", made).stdout)
    assert shardplan("show", text, "--json").stdout == made.read_text()
    assert shardplan("diff", made, text).returncode == 0
    assert shardplan("validate", made).returncode == 1, "it gathers nothing"

    done = plan("--strategy", strategy)
    assert done.returncode == BAD_INPUT
    assert (
        done.stderr
        == (
            f"shardplan: error: {strategy}: /policy: unknown policy (found careless, expected fsdp2, fsdp1 or one of "
            "a library (--policy-library))\n"
        )
    )


def test_a_strategy_gives_knobs_and_flags_go_over_them(libraries, plan, tmp_path):
    strategy = tmp_path / "strategy.json"
    strategy.write_text(
        json.dumps(
            {
                "schema": "shardplan.strategy/1", "policy": "careless",
                "policy_knobs": {"share": 0.25, "mistake": "throws"},
            }
        )
    )
    done = plan(
        "--strategy", strategy, "--policy-library", libraries / "careless.so", "--policy-knob", "mistake=none",
        "--skip", "verify",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["strategy"]["policy_knobs"] == {
        "mistake": "none", "quick": False, "share": 0.25,
    }

    strategy.write_text(
        json.dumps({"schema": "shardplan.strategy/1", "policy": "careless", "policy_knobs": {"shares": 1}})
    )
    done = plan("--strategy", strategy, "--policy-library", libraries / "careless.so")
    assert done.returncode == BAD_INPUT
    assert (
        done.stderr.startswith(f"shardplan: error: {strategy}: /policy_knobs/shares: policy careless (")
        and "expected mistake, share, quick" in done.stderr
    )


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"policy": "fsdp2", "policy_knobs": {"a": 1}}, "/policy_knobs: fsdp2 is built in and has a block of its own"),
        ({"policy": ""}, "/policy: a policy has a name"),
        ({"policy": "own", "policy_knobs": {"a": [1]}}, "/policy_knobs/a: wrong type"),
        (
            {"policy": "own", "setup": [{"method": "unshard", "module": ""}]},
            "/setup/0/method: own does not know this call",
        ),
    ],
)
def test_strategies_that_are_refused(shardplan, tmp_path, document, says):
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps({"schema": "shardplan.strategy/1", **document}))
    done = shardplan("validate", path)
    assert done.returncode == BAD_INPUT and says in done.stderr, done.stderr

# SPDX-License-Identifier: Apache-2.0
"""A plan that measures itself: `shardplan.torch.profile` and `shardplan run --profile`, next to what the plan has and
the simulator says."""

import collections
import json
import pathlib
import sys

import jsonschema
import pytest
from conftest import ROOT, build_folder, plans_in

sys.path.append(str(ROOT / "tests" / "python" / "adapter"))

if not (build_folder() / "bin" / "shardplan-run").exists():
    pytest.skip("no executor in this build", allow_module_level=True)

import self_profiled  # noqa: E402
from adapter_workers import run_on_ranks  # noqa: E402
from profiled import BATCH, SEQUENCE  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
POLICIES = ("fsdp2", "fsdp1")


@pytest.fixture(scope="module")
def made(shardplan, tmp_path_factory):
    """By policy, the plan of the GPT on two ranks."""
    folder = tmp_path_factory.mktemp("plans")
    done = shardplan(
        "trace", "profiled:profiled_gpt", "--batch", str(BATCH), "--seq", str(SEQUENCE), "--dtype", "float32", "-o",
        folder / "trace.json", cwd=str(HERE),
    )
    assert done.returncode == 0, done.stderr
    for policy in POLICIES:
        done = shardplan(
            "plan", folder / "trace.json", "--cluster", "h200_8", "--ranks", "2", "--policy", policy, "--unit",
            "blocks.*", "--optimizer", "adamw", "-q", "-o", folder / f"{policy}.json",
        )
        assert done.returncode == 0, done.stderr
    return {policy: folder / f"{policy}.json" for policy in POLICIES}


@pytest.fixture
def on_ranks(tmp_path):
    def run(function, *arguments):
        with plans_in(tmp_path / "kept"), pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
            outcomes = run_on_ranks(2, tmp_path / "ranks", function, *map(str, arguments))
        assert all(outcome and outcome[0] == "returned" for outcome in outcomes), outcomes
        return [outcome[1] for outcome in outcomes]

    return run


def planned(plan: pathlib.Path) -> list[str]:
    """Kinds of the instructions of the steady step, in their order."""
    document = json.loads(plan.read_text())
    step = document["steps"][document.get("steady_step", 0)]
    return [instruction["kind"] for trigger in step["triggers"] for instruction in trigger.get("instructions", [])]


def simulated(shardplan, plan: pathlib.Path) -> dict:
    return json.loads(shardplan("simulate", plan, "--report", "-", "-q").stdout)


def check(report: dict, plan: pathlib.Path, expected: dict) -> None:
    """Checks that every report of a plan that measured itself has to pass."""
    jsonschema.validate(report, json.loads((ROOT / "schemas" / "json" / "report.schema.json").read_text()))
    assert report["plan_digest"] == expected["plan_digest"]
    assert [one["kind"] for one in report["instructions"]] == planned(plan)
    facts = ("kind", "communicator", "count", "full_tensor_bytes")
    assert [[entry[f] for f in facts] for entry in report["collectives"]] == [
        [entry[f] for f in facts] for entry in expected["collectives"]
    ]
    assert report["measured"]["collectives_beside_plan"] == report["measured"]["collectives_missing"] == 0
    # Work of an instruction follows the call, and all of it is in the streams' sums.
    by_stream = collections.defaultdict(list)
    for one in report["instructions"]:
        assert 0 <= one["host_begin_ns"] <= one["host_end_ns"] <= report["step_ns"], one
        if "stream" in one:
            assert one["host_begin_ns"] <= one["begin_ns"] <= one["end_ns"], one
            by_stream[one["stream"]].append((one["begin_ns"], one["end_ns"]))
    assert {entry["stream"]: entry["operations"] for entry in report["streams"]} == {
        stream: len(spans) for stream, spans in by_stream.items()
    }
    busy = {one["kind"]: 0 for one in report["collectives"]}
    for one in report["instructions"]:
        if one["kind"] in busy:
            busy[one["kind"]] += one["end_ns"] - one["begin_ns"]
    assert busy == {entry["kind"]: entry["busy_ns"] for entry in report["collectives"]}
    # Units have what classes of operators have, but for the loss, which is in no unit.
    of_classes = sum(entry["busy_ns"] for entry in report["operators"] if entry["phase"] != "optimizer")
    of_units = sum(unit["forward_ns"] + unit["backward_ns"] for unit in report["units"])
    assert of_classes == of_units + report["measured"]["unassigned_ns"]
    assert report["forward_ns"] + report["backward_ns"] + report["optimizer_ns"] <= 1.01 * report["step_ns"]
    memory = report["memory"]
    assert memory["peak_bytes"] == sum(entry["size_bytes"] for entry in memory["peak_by_category"])
    assert memory["peak_bytes"] >= max(one["allocated_bytes"] for one in report["instructions"])


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_measure_themselves(policy, made, on_ranks, shardplan, tmp_path):
    outcomes = on_ranks(self_profiled.profiled_steps, made[policy], tmp_path)
    # 1 of warm-up, 3 and 3, and the one that ends the last.
    assert outcomes == 2 * [{"steps": 8, "equal": True, "same": True}]
    expected = simulated(shardplan, made[policy])
    for name in ("rank0", "rank1", "both"):
        report = json.loads((tmp_path / f"{name}.json").read_text())
        check(report, made[policy], expected)
        measured = report["measured"]
        assert (
            measured["device"] == "CPU"
            and measured["rank"] == int(name == "rank1")
            and measured["ranks"] == 1 + (name == "both")
        )
        assert (
            len(measured["steps_ns"]) == len(measured["unrecorded_steps_ns"]) == 3
            and report["step_ns"] in measured["steps_ns"]
        )
        assert all(unit["forward_ns"] > 0 and unit["backward_ns"] > 0 for unit in report["units"]), report["units"]
        assert min(report["forward_ns"], report["backward_ns"], report["optimizer_ns"]) > 0
        assert 0 <= measured.get("waiting_ns", 0) <= sum(entry["busy_ns"] for entry in report["collectives"])
        assert any(note.startswith("recording costs") for note in report["notes"]), report["notes"]
        # The plan's buffers are as large as the simulator has them at their largest.
        simulated_peak = {entry["category"]: entry["size_bytes"] for entry in expected["memory"]["peak_by_category"]}
        found = {entry["category"]: entry["size_bytes"] for entry in report["memory"]["peak_by_category"]}
        assert found["param_sharded"] == simulated_peak["param_sharded"]


def test_misuse_is_named(made, on_ranks):
    for said in on_ranks(self_profiled.misuse, made["fsdp2"]):
        assert (
            said["steps"]
            == "ValueError: shardplan.torch.profile: steps: found 0, expected a whole number of at least 1"
        )
        assert (
            said["warmup"]
            == "ValueError: shardplan.torch.profile: warmup: found -1, expected a whole number of at least 0"
        )
        assert said["float"].startswith("ValueError: shardplan.torch.profile: steps: found 2.0")
        assert said["bool"].startswith("ValueError: shardplan.torch.profile: steps: found True")
        assert said["no plan"] == "ValueError: shardplan: no plan is applied to this Linear"
        assert "profiled already" in said["nested"] and "entered once" in said["entered again"]
        assert "when the context has ended" in said["early report"]
        assert said["too short"].startswith("RuntimeError: shardplan.torch.profile: no step was recorded")


def test_off_means_off(made, on_ranks):
    for found in on_ranks(self_profiled.off, made["fsdp2"]):
        assert found == {"before": (0, ""), "after": (0, ""), "steps": [1, 2]}


def test_steps_that_are_given_up_are_not_in_it(made, on_ranks):
    for found in on_ranks(self_profiled.given_up, made["fsdp2"]):
        assert found["steps"] == 2 and found["instructions"] == len(planned(made["fsdp2"]))
        assert any("recorded steps left the plan or were given up" in note for note in found["notes"]), found["notes"]


def test_the_loops_own_exception_is_not_hidden(made, on_ranks):
    assert on_ranks(self_profiled.failing, made["fsdp2"]) == 2 * ["KeyError: \"the loop's own\""]


def test_a_model_that_changes_plans(made, on_ranks):
    for found in on_ranks(self_profiled.following_another_plan, made["fsdp2"]):
        assert found["steps"] == 2 and "blocks.0" not in found["reduced"] and "blocks.1" in found["reduced"]


# ---- shardplan run --profile ----


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_measures_itself(policy, made, shardplan, tmp_path):
    output = tmp_path / "measured.json"
    done = shardplan(
        "run", made[policy], "--device", "cpu", "--steps", "5", "--compute-scale", "1", "--profile", output
    )
    assert done.returncode == 0, done.stderr
    assert "waiting for communication" in done.stdout
    report = json.loads(output.read_text())
    check(report, made[policy], simulated(shardplan, made[policy]))
    assert report["measured"]["ranks"] == 2 and len(report["measured"]["steps_ns"]) == 2
    assert report["optimizer_ns"] > 0


def test_a_replay_allocates_what_is_simulated(made, shardplan, tmp_path):
    """The peak of all memory, to the byte, and the plan's buffers in it by category."""
    output = tmp_path / "measured.json"
    done = shardplan(
        "run", made["fsdp2"], "--device", "cpu", "--steps", "4", "--compute-scale", "0", "--profile", output
    )
    assert done.returncode == 0, done.stderr
    measured, expected = json.loads(output.read_text())["memory"], simulated(shardplan, made["fsdp2"])["memory"]
    assert measured["peak_bytes"] == expected["peak_bytes"]
    sizes = {entry["category"]: entry["size_bytes"] for entry in expected["peak_by_category"]}
    found = {entry["category"]: entry["size_bytes"] for entry in measured["peak_by_category"]}
    assert found.pop("grad_unsharded", 0) <= sizes["grad_unsharded"]  # those of a segment are the model's until it ends
    assert found.pop("model") > 0 and found == {category: sizes[category] for category in found}


def test_what_cannot_be_recorded_is_refused(made, shardplan, tmp_path):
    plan = made["fsdp2"]
    copy = tmp_path / "plan.json"
    copy.write_bytes(plan.read_bytes())
    for arguments, code, said in (
        (["--device", "virtual", "--profile", tmp_path / "x.json"], 2, "expected cpu or cuda"),
        (["--profile", "-"], 2, "two outputs are one file"),
        (["--profile", tmp_path / "no" / "x.json"], 4, "cannot write"),
        (["--profile", tmp_path], 4, ""),
    ):
        done = shardplan("run", plan, "--steps", "3", *arguments)
        assert done.returncode == code and said in done.stderr, (arguments, done.returncode, done.stderr)
    done = shardplan("run", copy, "--profile", copy)
    assert done.returncode == 2 and "an output is a file that is read" in done.stderr, done.stderr
    assert copy.read_bytes() == plan.read_bytes() and sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_names_may_hold_anything(made, shardplan, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(made["fsdp2"].read_text().replace("blocks.0", r"bl\"o\nck\u202e\\"))
    done = shardplan(
        "run", plan, "--device", "cpu", "--steps", "2", "--compute-scale", "0", "--no-verify", "--profile",
        tmp_path / "out.json",
    )
    assert done.returncode == 0, done.stderr
    names = {one["unit"] for one in json.loads((tmp_path / "out.json").read_text())["instructions"]}
    assert 'bl"o\nck\u202e\\' in names and "blocks.1" in names


def test_recordings_are_read_as_data_of_others(made, shardplan, tmp_path):
    """A recording is read by import-profile, too: what is wrong in it is named."""
    runtime = '{"schema":"shardplan.recording/'
    for name, text, said in (
        ("cut", runtime + '1","steps":[', "is the file whole?"),
        ("other", runtime + '2"}', "found shardplan.recording/2, expected shardplan.recording/1"),
        ("plan", runtime + '1","plan_digest":"sha256:0"}', "a recording of another plan"),
        (
            "nothing",
            runtime + f'1","plan_digest":"{simulated(shardplan, made["fsdp2"])["plan_digest"]}","steps":[]}}',
            "no step was recorded",
        ),
        (
            "odd", runtime + f'1","plan_digest":"{simulated(shardplan, made["fsdp2"])["plan_digest"]}","steps":[7]}}',
            "no recording of this version",
        ),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        done = shardplan("import-profile", path, "--plan", made["fsdp2"], "-o", tmp_path / "out.json", "-q")
        assert done.returncode == 3 and said in done.stderr and str(path) in done.stderr, (name, done.stderr)
        assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("behind_ns", [0, 40, 95, 1000])
def test_a_device_that_is_behind_the_host_has_the_same_step_later(behind_ns):
    """The host of a GPU issues a step while the device is still at the one before: what the device did is looked at
    where it did it."""
    from shardplan.import_profile import report
    from shardplan.import_profile.kineto import Collective, Profile, Work
    from shardplan.import_profile.parts import Part, Parts

    planned = [
        ("communication", "all_gather", 0, 10),
        ("forward", "segment", 10, 30),
        ("backward", "segment", 30, 75),
        ("optimizer", "optimizer", 80, 100),
    ]
    profile = Profile("made up", 0, 1, "a GPU", 0, [(0, 100), (100, 200)], [], [], [], [])
    for begin, launched in ((0, 0), (100, 100)):
        for place, (phase, kind, start, end) in enumerate(planned):
            collective = Collective("all_gather", (0,), 8) if kind == "all_gather" else None
            times = begin + behind_ns + start, begin + behind_ns + end, 0, kind, launched + place
            profile.work.append(
                Work(*times, collective=collective, part=Part(phase, "layers.0", kind), stream_name="compute")
            )
    for step in report.steps_of(profile, Parts(profile, ["layers.0"])):
        assert step.device_begin_ns - step.begin_ns == behind_ns and len(step.work) == len(step.running) == 4
        activities = {entry["activity"]: entry["time_ns"] for entry in report._activities(step)}
        assert activities == {"all_gather": 10, "forward": 20, "backward": 45, "optimizer": 20, "idle": 5}
        assert report._passes(step) == {"forward": 30, "backward": 45, "optimizer": 25}
        assert [(span["begin_ns"], span["duration_ns"]) for span in report._timeline(step)] == [
            (0, 10),
            (10, 20),
            (30, 45),
            (80, 20),
        ]

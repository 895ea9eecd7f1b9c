# SPDX-License-Identifier: Apache-2.0
"""tools/nightly with series that take no time: how it divides a night, goes on, counts, and ends."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import nightly
import nightly_series
import nightly_state
import pytest
from conftest import ROOT
from nightly_parts import Count, Ended, Outcome, Step, exit_code, junit, last_line, run_steps
from nightly_run import Night, Series

HERE = pathlib.Path(__file__).resolve().parent


class Clock:
    """Parts take what they are said to."""

    def __init__(self, seconds_a_case: dict[str, float], how: str = "done", failures: int = 0) -> None:
        self.now, self.per_case, self.how, self.failures = 0.0, seconds_a_case, how, failures
        self.ran: list[tuple[str, int, int]] = []

    def __call__(self) -> float:
        return self.now

    def run(self, steps, limit_s, folder, root, stopped) -> Outcome:
        name, position, count = steps
        self.ran.append(steps)
        seconds = self.per_case[name] * count
        how = self.how
        if seconds > limit_s:
            seconds, how = limit_s, "over time"
        self.now += seconds
        return Outcome(how, Count(count, self.failures), seconds)


def series(name: str, **fields) -> Series:
    return Series(name, name, lambda part: (name, part.position, part.count), **{"count": 10, "most": 1000, **fields})


def night(tmp_path, all_series, clock, minutes=30.0) -> Night:
    return Night(all_series, minutes, tmp_path, tmp_path, run=clock.run, clock=clock, say=lambda text: None)


def test_time_is_divided_equally_and_the_night_ends(tmp_path):
    clock = Clock({"slow": 5.0, "quick": 0.01, "middle": 1.0})
    one = night(tmp_path, [series("slow"), series("quick"), series("middle", first=700)], clock, 45)
    one.run_all()
    assert 45 * 60 - 100 < clock.now <= 45 * 60
    seconds = [row.seconds for row in one.rows.values()]
    assert max(seconds) - min(seconds) < 100
    sizes = [count for name, _, count in clock.ran if name == "quick"]
    assert sizes[:4] == [10, 40, 160, 640] and set(sizes[4:]) == {1000}
    assert ("middle", 700, 10) in clock.ran and ("middle", 710, 40) in clock.ran


def test_what_a_series_leaves_goes_to_the_others(tmp_path):
    clock = Clock({"short": 1.0, "endless": 1.0})
    one = night(tmp_path, [series("short", length=lambda: 25), series("endless")], clock)
    one.run_all()
    assert one.rows["short"].seconds == 25 and one.rows["endless"].seconds > 30 * 60 - 25 - 100
    assert [ran for ran in clock.ran if ran[0] == "short"] == [("short", 0, 10), ("short", 10, 15)]
    assert (one.places["short"].position, one.places["short"].round) == (0, 1)


def test_it_goes_on_where_it_was_and_first_with_who_had_less(tmp_path):
    clock = Clock({"a": 9.0, "b": 1.0, "c": 9.0})
    all_series = [series("a", first=5), series("b"), series("c")]
    night(tmp_path, all_series, clock, 2).run_all()
    assert {name for name, _, _ in clock.ran} == {"a"}  # with 30 s left none begins that has never run
    on = clock.ran[-1][1] + clock.ran[-1][2]
    clock.ran, clock.now = [], 0.0
    night(tmp_path, all_series, clock, 5).run_all()
    assert [(name, position) for name, position, _ in clock.ran[:3]] == [("b", 0), ("c", 0), ("a", on)]


def test_a_night_without_time_begins_nothing(tmp_path):
    clock = Clock({"a": 100.0})
    night(tmp_path, [series("a")], clock, 0.5).run_all()
    assert clock.ran == []


def test_a_part_that_the_nights_end_cuts_is_run_again(tmp_path):
    clock = Clock({"a": 1.0})
    one = night(tmp_path, [series("a", first=3)], clock, 1)
    clock.per_case["a"] = 1000.0
    one.run_all()
    assert len(clock.ran) == 1 and clock.now == 60
    assert one.places["a"].position == 3 and one.rows["a"].count == Count() and one.failures() == 0


def test_a_part_over_its_own_time_fails_and_the_next_is_smaller(tmp_path):
    clock = Clock({"a": 100.0}, failures=1)
    one = night(tmp_path, [series("a")], clock, 20)
    one.run_all()
    assert clock.ran[0] == ("a", 0, 10) and clock.ran[1] == ("a", 10, 1)
    assert one.rows["a"].seconds >= 600 and one.failures() == len(clock.ran)


def test_a_build_goes_on_and_is_a_part_of_its_series(tmp_path):
    clock = Clock({"a": 1.0})
    built = []

    def run(steps, limit_s, folder, root, stopped):
        if isinstance(steps, list):
            built.append(limit_s)
            seconds = 600 if len(built) < 3 else 50
            clock.now += seconds
            return Outcome("over time" if len(built) < 3 else "done", Count(len(built) < 3, len(built) < 3), seconds)
        return clock.run(steps, limit_s, folder, root, stopped)

    clock_run = Night(
        [series("a", build=("tools/build", "dev"))], 30, tmp_path, tmp_path, run=run, clock=clock, say=lambda text: None
    )
    clock_run.run_all()
    assert len(built) == 3 and clock.ran[0] == ("a", 0, 10)
    assert clock_run.failures() == 0 and clock_run.rows["a"].parts == 3 + len(clock.ran)


def test_a_build_that_fails_ends_its_series(tmp_path):
    clock = Clock({"b": 1.0})

    def run(steps, limit_s, folder, root, stopped):
        return (
            Outcome("done", Count(1, 1), 5)
            if isinstance(steps, list)
            else clock.run(steps, limit_s, folder, root, stopped)
        )

    one = Night(
        [series("a", build=("false",)), series("b")], 3, tmp_path, tmp_path, run=run, clock=clock, say=lambda text: None
    )
    one.run_all()
    assert one.rows["a"].parts == 1 and one.failures() == 1 and len(clock.ran) > 1
    assert "| a | 1 | 1 | 1 | 5 | its build |" in one.table()


def test_the_table_tells_all(tmp_path):
    clock = Clock({"a": 1.0, "b": 2.0}, failures=2)
    one = night(tmp_path, [series("a", length=lambda: 30), series("b", first=100, most=20)], clock, 2)
    one.run_all()
    text = one.write_table().read_text()
    assert text == (tmp_path / f"{one.begun:%Y-%m-%d-%H%M}.md").read_text()
    assert "| a | 2 | 30 | 4 | 30 | 0, round 1 |" in text
    cases = sum(count for name, _, count in clock.ran if name == "b")
    assert f"| b | {len(clock.ran) - 2} | {cases} | {2 * len(clock.ran) - 4} | {2 * cases} | {100 + cases} |" in text
    assert text.splitlines()[-1].startswith(f"| all | {len(clock.ran)} | ")
    assert len(list((tmp_path / "failures").iterdir())) == len(clock.ran)


def test_the_state_is_written_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    nightly_state.save(path, {"a": nightly_state.Place(position=7)})

    def fails(*_):
        raise OSError("the machine stops")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="stops"):
        nightly_state.save(path, {"a": nightly_state.Place(position=8)})
    assert nightly_state.load(path)["a"].position == 7


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"format": "other", "series": {}}',
        '{"format": "shardplan.nightly/1", "series": {"a": {"at": 3}}}',
    ],
)
def test_a_state_that_is_none_is_bad_input(tmp_path, text, capsys):
    (tmp_path / "state.json").write_text(text)
    assert nightly.main(["--list"], [series("a")], tmp_path) == 3
    assert "state.json is no state" in capsys.readouterr().err


# ---- with processes ----


def ran(tmp_path, *steps, limit_s=60.0, stopped=lambda: False):
    return run_steps(list(steps), limit_s, tmp_path, ROOT, stopped)


def script(text: str) -> list[str]:
    return ["bash", "-c", text]


def test_cases_and_failures_are_read_from_the_last_line(tmp_path):
    assert ran(tmp_path, Step(script("echo x; echo cases 7, failures 2; exit 1"), last_line)).count == Count(7, 2)
    assert ran(
        tmp_path,
        Step(script("echo cases 7, failures 0"), last_line),
        Step(script("echo cases 5, failures 1"), last_line),
    ).count == Count(12, 1)


@pytest.mark.parametrize("text", ["echo 7 cases", "true", "echo cases 7, failures 0; echo more"])
def test_who_does_not_say_how_many_has_failed(tmp_path, text):
    assert ran(tmp_path, Step(script(text), last_line)).count == Count(1, 1)


def test_a_wrong_exit_code_is_a_failure_whatever_is_said(tmp_path):
    assert ran(tmp_path, Step(script("echo cases 7, failures 0; exit 3"), last_line)).count == Count(7, 1)
    assert ran(tmp_path, Step(script("kill -SEGV $$"), exit_code(9))).count == Count(1, 1)
    assert ran(tmp_path, Step(script("true"), exit_code(9))).count == Count(9)


def test_junit_of_pytest_gtest_and_ctest(tmp_path):
    text = """<testsuites><testsuite>
      <testcase name="plain"/><testcase name="many"><properties><property name="cases" \
value="12"/></properties></testcase>
      <testcase name="bad"><failure message="x"/></testcase><testcase name="worse"><error/></testcase>
      <testcase name="skipped"><skipped/></testcase><testcase name="left" status="notrun"/><testcase name="attribute" \
cases="3"/>
    </testsuite></testsuites>"""
    (tmp_path / "found.xml").write_text(text)
    assert junit("found.xml")(Ended(1, "", tmp_path)) == Count(18, 2)
    assert junit("none.xml")(Ended(0, "", tmp_path)) == Count(1, 1)


def test_a_part_over_time_is_killed_with_all_that_it_started(tmp_path):
    # A child, and one of another session whose parent has ended.
    text = (
        f"sleep 1000 & echo $! >>{tmp_path}/pids; setsid bash -c 'setsid sleep 1000 & echo $! >>{tmp_path}/pids'; "
        "trap '' TERM; wait"
    )
    nightly.adopt_orphans()
    outcome = ran(
        tmp_path, Step(script(text), exit_code()), Step(script(f"touch {tmp_path}/next"), exit_code()), limit_s=1.0
    )
    assert outcome.how == "over time" and outcome.count == Count(1, 1) and outcome.seconds < 20
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 and not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)
    assert not (tmp_path / "next").exists()


def test_children_have_the_default_dispositions(tmp_path):
    """Also where the night was started with signals ignored, as nohup and a shell's background do."""
    text = "grep SigIgn /proc/self/status >$OUT/ignored"
    code = main_with(
        tmp_path, [text], 'Series("a", "a", steps, 1, 1, length=lambda: 1)', before="trap '' INT QUIT HUP; exec "
    )
    assert code.wait(60) == 0
    assert (
        int((tmp_path / "ignored").read_text().split()[1], 16)
        & (1 << signal.SIGINT - 1 | 1 << signal.SIGQUIT - 1 | 1 << signal.SIGHUP - 1)
        == 0
    )


def main_with(tmp_path, commands: list[str], series_text: str, before: str = "exec ") -> subprocess.Popen:
    """A night of its own process: `steps` are the commands."""
    program = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import pathlib, nightly
from nightly_parts import Step, exit_code
from nightly_run import Series
def steps(part):
    return [Step(["bash", "-c", text], exit_code(), {{"OUT": {str(tmp_path)!r}}}) for text in {commands!r}]
sys.exit(nightly.main(["5"], [{series_text}], pathlib.Path({str(tmp_path / "out")!r})))
"""
    file = tmp_path / "program.py"
    file.write_text(program)
    return subprocess.Popen(["bash", "-c", f"{before}{sys.executable} {file}"], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_night_its_children_and_writes_the_table(tmp_path, number):
    process = main_with(
        tmp_path,
        ["echo $$ >$OUT/pid; [ -e $OUT/first ] && sleep 1000; touch $OUT/first"],
        'Series("a", "a", steps, 1, 1)',
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "state.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # the second part sleeps
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert not pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    assert json.loads((tmp_path / "out" / "state.json").read_text())["series"]["a"]["position"] == 1
    (table,) = (tmp_path / "out").glob("*.md")
    assert "| a | 1 | 1 | 0 |" in table.read_text() and "stopped after" in output


def test_failures_are_the_exit_code_and_kept(tmp_path):
    process = main_with(tmp_path, ["echo it was so; exit 1"], 'Series("a", "a", steps, 1, 1, length=lambda: 2)')
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "| a | 2 | 2 | 2 |" in output
    kept = sorted((tmp_path / "out" / "failures").iterdir())
    assert (
        len(kept) == 2
        and "it was so" in (kept[0] / "output.txt").read_text()
        and "exit 1" in (kept[0] / "output.txt").read_text()
    )


def test_a_wrong_name_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        nightly.main(["--only", "fuzz,fuzzz"])
    assert ended.value.code == 2 and "there is no series 'fuzzz'; there are conformance, " in capsys.readouterr().err


def test_every_series_of_the_table_makes_its_steps(tmp_path, monkeypatch):
    """Series that need no build."""
    from nightly_run import Part

    monkeypatch.setattr(nightly_series, "fuzz_targets", lambda preset: ["plan"])
    monkeypatch.setattr(
        nightly_series,
        "sanitized_items",
        lambda preset: [("test", "A.B/c+1"), ("fuzz", "plan"), ("command", "test_x.py")],
    )
    names = [one.name for one in nightly_series.ALL]
    assert len(set(names)) == len(names)
    for one in nightly_series.ALL:
        steps = one.steps(Part(one.first, one.count, 0, tmp_path))
        assert steps and all(
            isinstance(word, str) for step in steps for word in [*step.command, *step.environment.values()]
        ), one.name
        assert one.count <= one.most and one.limit_s <= 600
        for step in steps:
            for word in step.command:
                if word.startswith(("tests/", "tools/")):
                    assert (ROOT / word).exists() or word == "test_x.py", word
    assert nightly_series.exactly(["A.B/c+1"]) == "^(A\\.B/c\\+1)$"

# SPDX-License-Identifier: Apache-2.0
"""A night: divides its time among the series, remembers how far each came, and writes the table."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import shutil
import time
from collections.abc import Callable

import nightly_state
from nightly_parts import Count, Outcome, Step, exit_code, run_steps
from nightly_state import Place

PART_LIMIT_S = 600.0  # of any part
PART_AIM_S = 90.0
UNKNOWN_S = 45.0  # a series that has never run is not begun with less time left
LEAST_S = 10.0  # with less left no part begins
MOST_GROWTH = 4  # of a part's count over the last one's
SLACK = 1.25  # a part may take so much longer than the last one of that size


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a series: `count` positions or, in a series that goes on by one, a size."""

    position: int
    count: int
    round: int
    folder: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Series:
    """length: the number of positions of a finite series, which then begins again; None: positions are seeds, and there
    are always more.
    by_one: a part is one position, whatever its count. `most` bounds the count. build: brings what the series runs up
    to date."""

    name: str
    what: str
    steps: Callable[[Part], list[Step]]
    count: int
    most: int
    first: int = 0
    length: Callable[[], int] | None = None
    by_one: bool = False
    build: tuple[str, ...] = ()
    limit_s: float = PART_LIMIT_S


@dataclasses.dataclass
class Row:
    """A row of the table. covered: positions, until a finite series has run once as a whole."""

    parts: int = 0
    count: Count = Count()
    seconds: float = 0.0
    built: bool = False
    over: bool = False  # nothing more of it tonight
    covered: int = 0


class Night:
    """state: the file that remembers. clock: seconds; tests have their own."""

    def __init__(
        self,
        series: list[Series],
        minutes: float,
        out: pathlib.Path,
        root: pathlib.Path,
        *,
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = print,
        run: Callable[..., Outcome] = run_steps,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.series, self.out, self.root, self.stopped, self.say, self.run, self.clock = (
            series, out, root, stopped, say, run, clock,
        )
        self.begun = datetime.datetime.now()
        self.end = clock() + 60 * minutes
        self.minutes = minutes
        self.state = out / "state.json"
        self.places = nightly_state.load(self.state)
        self.rows = {one.name: Row() for one in series}
        self.before = {one.name: self.place(one).last_night_s for one in series}
        for one in series:
            self.place(one).last_night_s = 0.0

    def place(self, series: Series) -> Place:
        return self.places.setdefault(series.name, Place(position=series.first))

    def run_all(self) -> None:
        """Parts until the time is over, or nothing is left to do. The table is written after each."""
        while not self.stopped():
            chosen = self.choose()
            if chosen is None:
                break
            self.run_part(chosen)
            self.write_table()
        self.write_table()

    def left(self) -> float:
        return self.end - self.clock()

    def choose(self) -> Series | None:
        """The one with the least time tonight; of those the one with the least time last night. None: no part fits."""
        fitting = [one for one in self.series if not self.rows[one.name].over and self.fits(one)]
        return min(fitting, key=lambda one: (self.rows[one.name].seconds, self.before[one.name]), default=None)

    def fits(self, series: Series) -> bool:
        left = self.left()
        if left < LEAST_S:
            return False
        place = self.place(series)
        if place.seconds == 0 or (series.build and not self.rows[series.name].built):
            return left >= UNKNOWN_S
        least = place.seconds if series.by_one and series.most == 1 else place.seconds / max(1, place.count)
        return least * SLACK <= left

    def count(self, series: Series) -> int:
        """The count of the next part, which takes PART_AIM_S, or the time that is left, at the last part's pace."""
        place = self.place(series)
        if place.seconds == 0:
            return series.count
        aim = min(PART_AIM_S, self.left() / SLACK)
        wanted = int(aim * max(1, place.count) / max(place.seconds, 0.01))
        return max(1, min(wanted, MOST_GROWTH * max(1, place.count), series.most))

    def run_part(self, series: Series) -> None:
        row, place = self.rows[series.name], self.place(series)
        folder = self.out / "part"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if series.build and not row.built:
            self.build(series, folder)
            return
        count = self.count(series)
        length = None
        if series.length is not None:
            length = series.length()
            if place.position >= length:  # it has become shorter
                place.position = 0
            count = min(count, length - place.position)
        part = Part(place.position, count, place.round, folder)
        outcome = self.run(
            series.steps(part), min(series.limit_s, max(LEAST_S, self.left())), folder, self.root, self.stopped
        )
        if outcome.how == "over time" and self.left() <= 0:
            outcome = dataclasses.replace(outcome, how="stopped")  # the night is over, not the part's own time
        self.note(series, f"{part.position}", outcome, count)
        if outcome.how == "stopped":
            row.over = True
            return
        moved = 1 if series.by_one else count
        place.position += moved
        place.count, place.seconds = count, outcome.seconds
        row.covered += moved
        if length is not None:
            if place.position >= length:
                place.position, place.round = 0, place.round + 1
            row.over = row.covered >= length
        nightly_state.save(self.state, self.places)

    def build(self, series: Series, folder: pathlib.Path) -> None:
        """A part of its own. One that the limit ends is no failure: the next goes on with it."""
        row = self.rows[series.name]
        outcome = self.run(
            [Step(list(series.build), exit_code(0))],
            min(series.limit_s, max(LEAST_S, self.left())),
            folder,
            self.root,
            self.stopped,
        )
        if outcome.how == "done" and outcome.count.failures == 0:
            row.built = True
        if outcome.how == "over time":
            outcome = dataclasses.replace(outcome, how="build goes on", count=Count())
        row.over = outcome.count.failures > 0
        self.note(series, "build", outcome, 1)
        nightly_state.save(self.state, self.places)

    def note(self, series: Series, where: str, outcome: Outcome, count: int) -> None:
        row, place = self.rows[series.name], self.place(series)
        row.seconds += outcome.seconds
        place.last_night_s = row.seconds
        if outcome.how == "stopped":
            self.say(f"{series.name:16} {where:>10}: stopped after {outcome.seconds:.0f} s, not counted")
            return
        row.parts += 1
        row.count += outcome.count
        how = "" if outcome.how == "done" else f", {outcome.how}"
        self.say(
            f"{series.name:16} {where:>10} x {count}: {outcome.count.cases} cases, {outcome.count.failures} failures, "
            f"{outcome.seconds:.0f} s{how}"
        )
        if outcome.count.failures > 0:
            self.keep(series, where)

    def keep(self, series: Series, where: str) -> None:
        """All that the part has left, with its commands and what they said."""
        kept = self.out / "failures" / f"{self.begun:%Y-%m-%d-%H%M}-{series.name}-{where}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.move(self.out / "part", kept)
        self.say(f"{'':16} kept in {kept}")

    def failures(self) -> int:
        return sum(row.count.failures for row in self.rows.values())

    def table(self) -> str:
        lines = [
            f"# Nightly series, {self.begun:%Y-%m-%d %H:%M}, {self.minutes:g} minutes",
            "",
            "| series | parts | cases | failures | seconds | goes on at |",
            "|---|---|---|---|---|---|",
        ]
        for one in self.series:
            row, place = self.rows[one.name], self.place(one)
            on = f"{place.position}" + (f", round {place.round}" if one.length is not None else "")
            on = "its build" if one.build and row.parts and not row.built else on
            lines.append(
                f"| {one.name} | {row.parts} | {row.count.cases} | {row.count.failures} | {row.seconds:.0f} | {on} |"
            )
        rows = self.rows.values()
        total = sum((row.count for row in rows), Count())
        lines.append(
            f"| all | {sum(row.parts for row in rows)} | {total.cases} | {total.failures} | "
            f"{sum(row.seconds for row in rows):.0f} | |"
        )
        return "\n".join(lines) + "\n"

    def write_table(self) -> pathlib.Path:
        path = self.out / f"{self.begun:%Y-%m-%d-%H%M}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.table())
        return path

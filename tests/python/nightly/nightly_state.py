# SPDX-License-Identifier: Apache-2.0
"""The place where each series goes on: a file that is written anew, as a whole, after every part."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

FORMAT = "shardplan.nightly/1"


@dataclasses.dataclass
class Place:
    """The place of a series. `seconds` and `count`: its last part's, which tell how long the next one takes."""

    position: int = 0
    round: int = 0  # how often a finite series has begun again
    count: int = 0
    seconds: float = 0.0
    last_night_s: float = 0.0


class BadState(Exception):
    """The file is there and is not a state."""


def load(path: pathlib.Path) -> dict[str, Place]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, not {FORMAT}")
        return {name: Place(**fields) for name, fields in document["series"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadState(
            f"{path} is no state of nightly series ({error}); without the file all of them begin anew"
        ) from error


def save(path: pathlib.Path, places: dict[str, Place]) -> None:
    """A reader sees the old file or the new one, whenever this ends."""
    document = {"format": FORMAT, "series": {name: dataclasses.asdict(place) for name, place in sorted(places.items())}}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with beside.open("w") as file:
        file.write(json.dumps(document, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)

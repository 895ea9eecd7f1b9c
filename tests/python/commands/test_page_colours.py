# SPDX-License-Identifier: Apache-2.0
"""The colours of the pages can be told apart by everybody: each pair as it is and as people without one kind of cones
see it, in light and dark."""

import itertools
import json
import math
import re

import pytest
from conftest import ROOT

PAGE = ROOT / "simulator" / "src" / "report" / "page"
ACTIVITIES = ("forward", "backward", "optimizer", "all_gather", "reduce_scatter", "all_reduce", "copy")
LEAST = 0.05  # in OKLab, where about 0.02 is the least that is seen side by side

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009),
# severity 1, of linear RGB.
SEEN = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def times(matrix, vector):
    return tuple(sum(m * v for m, v in zip(row, vector)) for row in matrix)


def oklab(colour: str, seen) -> tuple[float, ...]:
    """Ottosson's OKLab of a colour as `seen`: distances in it are differences that people see."""
    encoded = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in encoded]
    linear = [min(1.0, max(0.0, c)) for c in times(seen, linear)]
    cones = times(
        (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        ),
        linear,
    )
    return times(
        (
            (0.2104542553, 0.7936177850, -0.0040720468),
            (1.9779984951, -2.4285922050, 0.4505937099),
            (0.0259040371, 0.7827717662, -0.8086757660),
        ),
        [c ** (1 / 3) for c in cones],
    )


def difference(one: str, other: str, seen) -> float:
    return math.dist(oklab(one, seen), oklab(other, seen))


def schemes() -> dict[str, dict[str, str]]:
    light, dark = (PAGE / "report.css").read_text().split("@media (prefers-color-scheme: dark)", 1)
    return {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part))
        for name, part in (("light", light), ("dark", dark.split("* {")[0]))
    }


SCHEMES, CATEGORIES = schemes(), json.loads((PAGE / "categories.json").read_text())


def test_the_measure_knows_what_looks_alike():
    assert difference("#ff0000", "#ff0000", SEEN["all cones"]) == 0
    assert difference("#c04040", "#6b6b00", SEEN["all cones"]) > 2 * difference(
        "#c04040", "#6b6b00", SEEN["deuteranopia"]
    )


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_categories_of_memory_differ_in_colour_or_are_hatched(scheme, seen):
    colours = SCHEMES[scheme]
    for (one, a), (other, b) in itertools.combinations(CATEGORIES.items(), 2):
        hues = colours[f"{a[0]}-{a[1]}"], colours[f"{b[0]}-{b[1]}"]
        assert a[2] != b[2] or difference(*hues, SEEN[seen]) >= LEAST, f"{one} {hues[0]} and {other} {hues[1]}"


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_activities_differ_from_each_other_and_all_from_the_page(scheme, seen):
    colours = SCHEMES[scheme]
    for one, other in itertools.combinations(ACTIVITIES, 2):
        assert difference(colours[one], colours[other], SEEN[seen]) >= LEAST, (one, other)
    for name in [*ACTIVITIES, *(f"{family}-{shade}" for family, shade, *_ in CATEGORIES.values())]:
        assert difference(colours[name], colours["card"], SEEN[seen]) >= 2 * LEAST, name


def test_every_category_has_a_colour_and_says_what_it_is(shardplan):
    made = shardplan(
        "memory", ROOT / "examples" / "three_layers" / "trace.json", "--ranks", 8, "--policy", "fsdp2", "--rows", "-",
        "-q",
    )
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout)
    assert set(told["categories"]) <= set(CATEGORIES)
    assert set(CATEGORIES) - set(told["categories"]) <= {"nccl_buffers", "grad_host"}
    assert len({says for *_, says in CATEGORIES.values()}) == len(CATEGORIES)

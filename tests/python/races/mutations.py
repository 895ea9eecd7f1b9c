# SPDX-License-Identifier: Apache-2.0
"""Takes each edge of FSDP2 and FSDP1 out (edges.py), one at a time, and prints whether the proof finds a race:

    python tests/python/races/mutations.py [NAME ...] [--kind fsdp2] [--json FILE]
    python tests/python/races/mutations.py --tables --json FILE      the tables of docs/internals/race-figures.md

Exit code 1: an edge that is not implied is not found, an implied one is, without those beside it nothing is, or no
setting comes by.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Iterator

from edges import EDGES, KNOWN, Edge
from proofs import of_settings

RANKS = 4


def judged(edge: Edge) -> dict:
    """The proof without the edge. If it is implied: also the races without it and those beside it that are not there
    without those beside it alone."""
    begun = time.monotonic()
    alone = of_settings(edge.kind, RANKS, edge.cases, (edge.name,))
    result = {"name": edge.name, "alone": alone.verdict, "races": list(alone.races), "trained": alone.trained}
    result["reached"] = edge.name in alone.reached
    result["as_expected"] = result["reached"] and alone.verdict == ("none" if edge.implied else "races")
    if edge.implied and edge.beside:
        together = of_settings(edge.kind, RANKS, edge.cases, (edge.name, *edge.beside))
        others = of_settings(edge.kind, RANKS, edge.cases, edge.beside)
        more = together.reports - others.reports
        result.update(together=together.verdict, others=others.verdict, more=more.total())
        result["as_expected"] &= more.total() > 0 and others.verdict in ("races", "none")
    result["seconds"] = round(time.monotonic() - begun, 1)
    return result


def known() -> int:
    wrong = 0
    for name, (edge, cases, wanted) in KNOWN.items():
        found = of_settings(EDGES[edge].kind, RANKS, cases, (edge,))
        first = found.races[0].partition(": ")[2] if found.races else ""
        print(f"| {name} | {edge} | {', '.join(cases)} | {found.verdict} | {first} |", flush=True)
        wrong += found.verdict != wanted
    return 1 if wrong else 0


def _shortly(race: str) -> str:
    """A report's first line for a table's cell."""
    said = race.partition(": ")[2]
    for words, fewer in (
        (", and nothing orders them", ""),
        (", without waiting for it", ""),
        ("a block, which in another run may be one that was freed while", "what may be freed while"),
        ("memory that was freed while", "what is freed while"),
        (" may still read", " still reads"),
        (" may still write", " still writes"),
    ):
        said = said.replace(words, fewer)
    return said


def tables(results: dict) -> Iterator[str]:
    """The lines of the page. Raises KeyError where an edge has no result."""
    implied = [edge for edge in EDGES.values() if edge.implied]
    yield from ("| | edges | found | implied |", "|---|---|---|---|")
    for kind in ("fsdp2", "fsdp1"):
        every = sum(edge.kind == kind for edge in EDGES.values())
        others = sum(edge.kind == kind for edge in implied)
        yield f"| {kind.upper()} | {every} | {every - others} | {others} |"
    for kind in ("fsdp2", "fsdp1"):
        yield from ("", f"### {kind.upper()}: found", "", "| edge | of | race |", "|---|---|---|")
        for edge in EDGES.values():
            if edge.kind == kind and not edge.implied:
                race = results[edge.name]["races"][0]
                yield f"| `{edge.name}` | `{_function(edge)}` | {_shortly(race)} |"
    yield from ("", "### Implied", "", "| edge | of | in its place | with these out as well | more races |")
    yield "|---|---|---|---|---|"
    for edge in implied:
        beside = ", ".join(f"`{name}`" for name in edge.beside)
        more = results[edge.name]["more"] if edge.beside else ""
        yield f"| `{edge.name}` | `{_function(edge)}` | {edge.implied} | {beside} | {more} |"


def _function(edge: Edge) -> str:
    owner, _, name = edge.where.rpartition(".")
    return edge.where if owner.startswith("_") else name


def line(edge: Edge, result: dict) -> str:
    if not result["reached"]:
        said = "NO SETTING COMES BY"
    elif result["alone"] == "races":
        said = f"found: {result['races'][0].partition(': ')[2]}"
    elif result["alone"] == "none":
        said = f"implied: {edge.implied or 'NOT EXPLAINED'}"
        if edge.beside:
            said += f"; without {', '.join(edge.beside)}: {result['together']}, {result['more']} of this edge"
    else:
        said = result["alone"][-300:].replace("\n", " ")
    return f"| {edge.name} | `{edge.where}` | {said} | {result['trained']}/{len(edge.cases)} | {result['seconds']} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--kind", choices=("fsdp2", "fsdp1"))
    parser.add_argument("--known", action="store_true", help="the faults that PyTorch had, instead")
    parser.add_argument("--tables", action="store_true", help="prints what the file of --json has, and ends")
    parser.add_argument("--list", action="store_true", help="prints the names, and ends")
    parser.add_argument("--json", type=pathlib.Path, help="results are added to this file")
    options = parser.parse_args()
    chosen = [EDGES[name] for name in options.names] or [e for e in EDGES.values() if options.kind in (None, e.kind)]
    if options.list:
        print(*(edge.name for edge in chosen), sep="\n")
        return 0
    if options.known:
        return known()
    if options.tables:
        print(*tables(json.loads(options.json.read_text())), sep="\n")
        return 0
    results = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    wrong = []
    for edge in chosen:
        result = judged(edge)
        results[edge.name] = result
        if not result["as_expected"]:
            wrong.append(edge.name)
        print(line(edge, result), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    if wrong:
        print("not as expected:", *wrong)
    print(f"cases {len(chosen)}, failures {len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

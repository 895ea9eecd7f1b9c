# SPDX-License-Identifier: Apache-2.0
"""Settings that PyTorch trains as it is (settings.py), each of which has to be free of races:

    python tests/python/races/clean.py                      all that have a name
    python tests/python/races/clean.py --seeds 0 150        random ones of FSDP2 and FSDP1

A report that one of PyTorch's own faults explains (PYTORCHS) is counted apart. Exit code 1: there are others.
"""

from __future__ import annotations

import argparse
import re
import sys

from proofs import Proof, of_settings

NAMED = [
    *(("fsdp2", ranks) for ranks in (2, 3, 4)), *(("fsdp1", ranks) for ranks in (1, 2, 3, 4)), ("ddp", 2),
]  # fmt: skip
RANDOM = [("fsdp2", 2), ("fsdp2", 4), ("fsdp1", 2), ("fsdp1", 4)]
# faults.py has a script for each.
PYTORCHS = {
    "a forward between backward and step reads offloaded parameters, which the step writes": (
        r"the host .* writes what copy to the device reads[^|]*flat_param_to"
    ),
    "a gradient that is None is zeroed on a stream that no other one waits for": r"memset[^|]*_writeback_tensor",
}


def explained(report: str) -> bool:
    return any(re.search(pattern, report.replace("\n", " ")) for pattern in PYTORCHS.values())


def judged(kind: str, ranks: int, seeds: list[int]) -> tuple[Proof, list[str]]:
    """The proof, and its reports that nothing explains."""
    more = ("--seeds", *map(str, seeds)) if seeds else ()
    proof = of_settings(kind, ranks, more=more)
    return proof, sorted(report for report in proof.reports if not explained(report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs=2, type=int, default=[], help="random settings: the first and behind the last")
    options = parser.parse_args()
    cases = failures = 0
    for kind, ranks in RANDOM if options.seeds else NAMED:
        proof, reports = judged(kind, ranks, options.seeds)
        cases += proof.trained
        failures += len(reports)
        if proof.verdict not in ("races", "none") or proof.trained == 0 or "not looked at" in proof.text:
            failures += 1
            print(*proof.failed, proof.text[-2000:], sep="\n")
        known = len(proof.reports) - len(reports)
        print(f"| {kind} | {ranks} | {proof.trained} | {proof.accesses} | {len(reports)} | {known} |", flush=True)
        print(*reports, sep="\n", end="")
    print(f"cases {cases}, failures {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

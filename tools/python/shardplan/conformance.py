# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.conformance`, what `shardplan conformance` runs: the package shardplan_conformance of the
repository's tests."""

from __future__ import annotations

import sys

from shardplan.command import EXIT_USAGE, run, tests_of_repository
from shardplan.terminal import complain


def main() -> int:
    folder = tests_of_repository("shardplan_conformance")
    if folder is None:
        complain(
            "shardplan conformance",
            "a command of the source repository: it needs tests/python/shardplan_conformance of a checkout",
        )
        return EXIT_USAGE
    sys.path.append(str(folder))  # behind the folder of the user's cases
    from shardplan_conformance.cli import main as compare

    return compare()


if __name__ == "__main__":
    run("shardplan conformance", main)

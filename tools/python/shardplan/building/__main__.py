# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.building ARGUMENT...`: shardplan-run of the torch at hand, compiled where it is not yet. `shardplan run` calls it."""

import importlib.util
import os
import sys

from shardplan.building import NotBuilt, built
from shardplan.command import EXIT_ENVIRONMENT
from shardplan.installing import how_to_install


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        print(f"shardplan run: ranks need torch, which is not installed: {how_to_install('torch')}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    try:
        program = built().program
    except NotBuilt as error:
        print(f"shardplan run: {error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.building ARGUMENT...`: shardplan-run of the torch at hand, compiled where it is not yet.
`shardplan run` calls it."""

import os
import sys

from shardplan.building import NotBuilt, built
from shardplan.command import EXIT_ENVIRONMENT


def main() -> int:
    try:
        program = built().program
    except NotBuilt as error:
        print(f"shardplan run: {error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

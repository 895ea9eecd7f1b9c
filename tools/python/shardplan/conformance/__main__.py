"""`python -m shardplan.conformance`, what `shardplan conformance` runs."""

import sys

from shardplan.conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())

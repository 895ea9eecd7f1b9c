"""`python -m shardplan.tracer`."""

import sys

from shardplan.tracer.cli import main

if __name__ == "__main__":
    sys.exit(main())

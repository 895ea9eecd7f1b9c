# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.runs`: `shardplan cost RUNS.csv --builder ...`."""

from shardplan.command import run
from shardplan.runs.cli import main

if __name__ == "__main__":
    run("shardplan cost", main)

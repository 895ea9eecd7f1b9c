# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.sweep`."""

from shardplan.command import run
from shardplan.sweep.cli import main

if __name__ == "__main__":
    run("shardplan sweep", main)

# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.rehearse`."""

from shardplan.command import run
from shardplan.rehearse.cli import main

if __name__ == "__main__":
    run("shardplan rehearse", main)

# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.conformance`, what `shardplan conformance` runs."""

from shardplan.command import run
from shardplan.conformance.cli import main

if __name__ == "__main__":
    run("shardplan conformance", main)

# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.tracer`."""

from shardplan.command import run
from shardplan.tracer.cli import main

if __name__ == "__main__":
    run("shardplan trace", main)

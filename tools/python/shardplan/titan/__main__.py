# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.titan`."""

from shardplan.command import run
from shardplan.titan.cli import main

if __name__ == "__main__":
    run("shardplan torchtitan", main)

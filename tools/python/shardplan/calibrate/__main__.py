# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.calibrate`."""

from shardplan.calibrate.cli import main
from shardplan.command import run

if __name__ == "__main__":
    run("shardplan calibrate", main)

# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.doctor`."""

from shardplan.command import run
from shardplan.doctor.cli import main

if __name__ == "__main__":
    run("shardplan doctor", main)

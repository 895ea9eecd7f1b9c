# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.import_profile`."""

from shardplan.command import run
from shardplan.import_profile.cli import main

if __name__ == "__main__":
    run("shardplan import-profile", main)

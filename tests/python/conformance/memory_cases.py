# SPDX-License-Identifier: Apache-2.0
"""Figures that the tests of recorded memory compare."""

import pathlib

from conftest import build_folder

from shardplan_conformance import memory


def compute_all(folder: pathlib.Path, cases: list[dict], tmp_path_factory) -> dict[str, dict]:
    """The output of `memory --rows` for every case of the folder, by its name."""
    program = str(build_folder() / "bin" / "shardplan")
    result = {}
    for case in cases:
        made = tmp_path_factory.mktemp("case")
        memory.trace_case(folder, case, made / "trace.json")
        result[case["case"]] = memory.compute(program, made / "trace.json", case, made)
    return result

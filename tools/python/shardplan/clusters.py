# SPDX-License-Identifier: Apache-2.0
"""Clusters by name, as --cluster of the commands takes them: a file, a shipped document, or a device."""

from __future__ import annotations

import json
import subprocess

from shardplan.command import built_command


class BadCluster(ValueError):
    """There is no such cluster, or it is no cluster document."""


def document_of(cluster: str, ranks: int | None, command: str) -> tuple[str, dict]:
    """Its path and what `shardplan evaluate` answers about it: `text`, `nccl_buffer_bytes`. command: that asks. Raises
    BadCluster, NoCommand."""
    path = _answer({"cluster": cluster, "ranks": ranks or 0}, command)["path"]
    return path, _answer({"document": path}, command)


def _answer(question: dict, command: str) -> dict:
    """The answer of `shardplan evaluate`, which knows the shipped clusters and reads a document as every command
    does."""
    asked = subprocess.run(
        [built_command(command), "evaluate"],
        input=json.dumps(question) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    answer = json.loads(asked.stdout.splitlines()[0]) if asked.stdout else {"error": asked.stderr.strip()}
    if "error" in answer:
        raise BadCluster(str(answer["error"]).replace("cluster: shardplan: error: ", ""))
    return answer

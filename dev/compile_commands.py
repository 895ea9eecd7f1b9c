# SPDX-License-Identifier: Apache-2.0
"""How a unity build compiles each file of our sources: dev/check_alone and dev/mutate compile it alone."""

import json
import pathlib
import re
import shlex


def of_sources(build: pathlib.Path) -> list[tuple[str, list[str]]]:
    """(source, the command of its library without ccache, the file and the output), once for each library that has
    it."""
    found = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        words = words[next(at for at, word in enumerate(words) if not word.endswith("ccache")) : words.index("-o")]
        file = pathlib.Path(entry["file"])
        sources = (
            re.findall(r'#include "(.*\.cc)"', file.read_text()) if file.name.startswith("unity_") else [entry["file"]]
        )
        found += [(source, words) for source in sources]
    return sorted(found)

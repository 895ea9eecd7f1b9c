# SPDX-License-Identifier: Apache-2.0
"""dev/check_docs finds what a page names and the tree has not."""

import re
import subprocess

import pytest
from conftest import ROOT, build_folder


def check(*pages):
    return subprocess.run([ROOT / "dev" / "check_docs", *pages], capture_output=True, text=True, check=False)


def test_the_pages_of_the_tree_name_only_what_exists():
    result = check()
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "text, fault",
    [
        ("`schemas/src/no_such_folder`", "there is no schemas/src/no_such_folder"),
        ("`no_such_source.cc:Function`", "there is no no_such_source.cc"),
        ("`shardplan simulat plan.json`", "there is no command shardplan simulat"),
        ("```sh\ntools/shardplan memory plan.json --reserve\n```", "there is no flag --reserve"),
        ("`ctest --preset debug`", "there is no preset debug"),
        ("[a page](no-such-page.md)", "there is no page no-such-page.md"),
    ],
)
def test_what_does_not_exist_is_named_with_its_line(tmp_path, text, fault):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n`tools/build dev` and `shardplan memory plan.json --reserved` exist.\n{text}\n")
    result = check(page)
    assert result.returncode == 1
    line = 5 if text.startswith("```") else 4
    assert result.stdout.splitlines() == [f"{page}:{line}: {fault}", "docs: 1 pages, 1 names of what does not exist"]


def flags_of_commands():
    """Flags that the pages give to each command: {"memory": {"--rows": "docs/reference/memory.md", ...}, ...}; a line
    that ends in a backslash goes on. Flags with dots are torchtitan's."""
    flags: dict[str, dict[str, str]] = {}
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text().replace("\\\n", " ")
        for command, rest in re.findall(
            r"(?:^|[`\s])shardplan ([a-z][a-z-]+)((?: [^`\n|#;&]*)?)", re.sub(r"tools/shardplan", "shardplan", text)
        ):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+(?![\w.-])", rest.split(" -- ")[0]):
                flags.setdefault(command, {})[flag] = page.name
    return flags


def test_every_flag_that_a_page_gives_to_a_command_is_one_of_it(shardplan):
    flags = flags_of_commands()
    assert {"trace", "plan", "simulate", "memory", "conformance", "run"} <= flags.keys()
    for command, given in flags.items():
        if command == "run" and not (build_folder() / "bin" / "shardplan-run").exists():
            continue  # a build without the executor
        help_text = shardplan(command, "--help").stdout
        for flag, page in given.items():
            assert re.search(rf"{re.escape(flag)}\b", help_text), f"{page}: shardplan {command} has no {flag}"

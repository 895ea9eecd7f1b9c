# SPDX-License-Identifier: Apache-2.0
"""docs/ as a site: it builds without a warning (a link that leads nowhere is one), has every page and every command,
and fetches nothing."""

import html.parser
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

if importlib.util.find_spec("material") is None:
    pytest.skip("no mkdocs-material", allow_module_level=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "html"
    environment = {**os.environ, "SHARDPLAN_BUILD": str(build_folder()), "SHARDPLAN_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, ROOT / "dev" / "site", folder], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Fetched(html.parser.HTMLParser):
    """Files that a browser fetches to show the page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.found.append(given.get("src") or "")
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.found.append(given.get("href") or "")


def test_every_page_is_there_and_fetches_nothing_from_elsewhere(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    there = {path.relative_to(site) for path in site.rglob("*.html")}
    assert {path for path in pages if path.name != "README.html"} <= there
    for page in there:
        parser = Fetched()
        parser.feed((site / page).read_text())
        assert not [source for source in parser.found if re.match(r"(\w+:)?//", source)], page


def test_the_navigation_names_every_page(site):
    index = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        where = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert page.name == "README.md" or f'href="{where}"' in index, where


def test_the_commands_page_has_the_help_of_each(site, shardplan):
    page = (site / "reference" / "commands.html").read_text()
    listed = set(re.findall(r'<h3 id="shardplan-([a-z-]+)"', page))
    told = {
        line.split()[0]
        for line in shardplan("--help").stdout.splitlines()
        if re.match(r"  [a-z][a-z-]+ {2,}[A-Z]", line)
    }
    assert told and listed == told
    assert "--memory-budget" in page


def test_search_finds_words_of_the_pages(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    text = " ".join(entry["text"] for entry in index["docs"])
    assert "reshard_after_forward" in text and "expandable_segments" in text

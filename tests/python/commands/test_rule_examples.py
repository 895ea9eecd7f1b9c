# SPDX-License-Identifier: Apache-2.0
"""docs/reference/rules.md: an example of every rule, and each is what the verifier says."""

import re
import subprocess
import sys

from conftest import ROOT, build_folder

SCRIPT = ROOT / "dev" / "rule_examples.py"


def test_the_page_is_what_the_verifier_says(monkeypatch):
    monkeypatch.setenv("SHARDPLAN_BUILD", str(build_folder()))
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (
        done.stdout + done.stderr + "\ndocs/reference/rules.md is another one: .venv/bin/python dev/rule_examples.py"
    )


def test_every_rule_has_an_example():
    rules = {
        name
        for heading in re.findall(r"^### (.*)$", (ROOT / "docs" / "reference" / "verifier.md").read_text(), re.M)
        for name in heading.split(", ")
    }
    sections = re.split(r"^## ", (ROOT / "docs" / "reference" / "rules.md").read_text(), flags=re.M)[1:]
    assert {section.splitlines()[0] for section in sections} == rules
    for section in sections:
        name = section.splitlines()[0]
        assert re.search(rf"^The verifier:\n```\n{name}: ", section, re.M), name
        assert re.search(r"^[-+] ", section, re.M) or re.search(r"^[-+]\w", section, re.M), name

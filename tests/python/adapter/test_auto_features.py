# SPDX-License-Identifier: Apache-2.0
"""sp.auto besides a plain port: arguments of fully_shard, plans that are kept, the search, setters that make plans,
errors. The page that says what to write in place of each argument and method has all of them."""

import inspect
import re

import auto_features
import pytest
from adapter_workers import run_on_ranks
from conftest import ROOT, plans_in
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto_features")
    with plans_in(folder / "plans"):
        results = [{} for _ in range(2)]
        left = auto_features.NAMES
        while left:
            for rank, outcome in enumerate(
                run_on_ranks(2, folder / f"ranks{len(left)}", auto_features.run, left, str(folder))
            ):
                results[rank].update(
                    outcome[1] if outcome and outcome[0] == "returned" else {left[0]: f"died: {outcome}"}
                )
            left = [name for name in left if not all(name in result for result in results)]
        return results


@pytest.mark.parametrize("name", auto_features.NAMES)
def test_feature(outcomes, name):
    for rank, results in enumerate(outcomes):
        assert results[name] in ("", (0.0, "")), f"rank {rank}: {results[name]}"


# ---- docs/guide/migration.md ----

PAGE = (ROOT / "docs" / "guide" / "migration.md").read_text(encoding="utf-8")


def section(title: str) -> set[str]:
    """The names in the first columns of a section's tables."""
    body = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def public(kind: type) -> set[str]:
    return {
        name
        for name, value in vars(kind).items()
        if not name.startswith("_") and callable(getattr(value, "__func__", value))
    } | {name for name, value in vars(kind).items() if isinstance(value, property) and not name.startswith("_")}


def test_the_page_has_every_argument_and_method():
    arguments = {"fully_shard's arguments": fully_shard, "FullyShardedDataParallel": FullyShardedDataParallel.__init__}
    for title, function in arguments.items():
        wanted = set(inspect.signature(function).parameters) - {"self"}
        assert wanted <= section(title), wanted - section(title)
    assert public(FSDPModule) == section("FSDPModule's methods")
    assert public(FullyShardedDataParallel) <= section("FullyShardedDataParallel"), public(
        FullyShardedDataParallel
    ) - section("FullyShardedDataParallel")


def test_the_tests_that_the_page_names_are_there():
    ids = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "python" / "adapter").glob("*.py")}
    settings = ids["equivalence_settings.py"] + ids["auto_features.py"] + ids["test_auto_features.py"]
    for file, name in re.findall(r"\| `(test_\w+\.py)`(?: (\w+))? \|", PAGE):
        assert file in ids, file
        assert not name or name in settings, name

# SPDX-License-Identifier: Apache-2.0
"""Checks by dev/release of the tree, of the wheels and of the page on an index."""

import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path += [str(ROOT / "cmake"), str(ROOT / "dev" / "torch_release")]
import publish  # noqa: E402
import wheel_metadata  # noqa: E402

ADDRESS = "https://example.org/shardplan"


@pytest.mark.parametrize(("line", "absolute", "without_address"), [
    (
        "see [installing](docs/guide/packaging.md#wheels).",
        f"see [installing]({ADDRESS}/blob/v1.2.3/docs/guide/packaging.md#wheels).",
        "see installing.",
    ),
    ("![One step](docs/images/step.svg)", f"![One step]({ADDRESS}/raw/v1.2.3/docs/images/step.svg)", ""),
    ("[`code` of it](tools)", f"[`code` of it]({ADDRESS}/blob/v1.2.3/tools)", "`code` of it"),
    (
        "[here](#what-it-is), [there](https://example.com/a)",
        "[here](#what-it-is), [there](https://example.com/a)",
        "[here](#what-it-is), [there](https://example.com/a)",
    ),
    ("`[code](stays)`", "`[code](stays)`", "`[code](stays)`"),
    ("```\n[code](stays)\n```", "```\n[code](stays)\n```", "```\n[code](stays)\n```"),
])  # fmt: skip
def test_links_of_the_page_lead_to_the_tag(line, absolute, without_address):
    assert wheel_metadata.index_page(line, ADDRESS, "1.2.3") == absolute
    assert wheel_metadata.index_page(line, None, "1.2.3") == without_address


def test_the_readme_has_no_relative_link_on_an_index():
    readme = (ROOT / "README.md").read_text()
    assert "docs/images/step.svg" in wheel_metadata.relative_links(readme)
    for address in (ADDRESS, None):
        assert wheel_metadata.relative_links(wheel_metadata.index_page(readme, address, "1.2.3")) == []


@pytest.mark.parametrize(("citation", "address"), [
    ("repository-code: https://example.org/shardplan/\n", ADDRESS),
    ("title: x\nrepository-code: \"https://example.org/shardplan\"\n", ADDRESS),
    ("title: x\n", None),
])  # fmt: skip
def test_the_address_is_that_of_the_citation(citation, address):
    assert wheel_metadata.repository(citation) == address


def tree(
    folder: pathlib.Path,
    changelog: str = "# Changelog\n\n## 1.2.3 (2026-11-28)\n",
    cited: str = "1.2.3",
    date: str = "2026-11-28",
) -> pathlib.Path:
    (folder / "CMakeLists.txt").write_text("project(shardplan VERSION 1.2.3 LANGUAGES CXX)\n")
    (folder / "CITATION.cff").write_text(f"version: {cited}\ndate-released: {date}\n")
    package = folder / "tools" / "python" / "shardplan"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    return folder


def test_a_tree_names_one_version(tmp_path):
    assert publish.disagreements(tree(tmp_path), "1.2.3") == []


@pytest.mark.parametrize(("changed", "said"), [
    ({"cited": "1.2.2"}, "CITATION.cff has version 1.2.2, not 1.2.3"),
    ({"date": "2026-11-27"}, "CITATION.cff is released on 2026-11-27, and CHANGELOG.md says 2026-11-28"),
    (
        {"changelog": "## Unreleased\n- new\n\n## 1.2.3 (2026-11-28)\n"},
        "CHANGELOG.md has changes under Unreleased: name them ## 1.2.3 (YYYY-MM-DD)",
    ),
    ({"changelog": "# Changelog\n\n## 1.2.3\n"}, "CHANGELOG.md has no entry ## 1.2.3 (YYYY-MM-DD)"),
])  # fmt: skip
def test_a_tree_that_is_not_of_the_version_is_named(tmp_path, changed, said):
    if "changelog" in changed:
        changed = {"changelog": f"# Changelog\n\n{changed['changelog'].removeprefix('# Changelog')}"}
    assert publish.disagreements(tree(tmp_path, **changed), "1.2.3") == [said]


def test_two_wheels_are_the_same_to_the_byte():
    one = {"a.py": b"1", "b": b"2", "x.dist-info/RECORD": b"of a and b"}
    assert publish.differences(one, dict(one)) == []
    assert publish.differences(one, {**one, "a.py": b"3", "x.dist-info/RECORD": b"of others"}) == ["a.py differs"]
    assert publish.differences(one, {**one, "c": b""}) == ["c is in one alone"]
    assert publish.differences(one, {**one, "x.dist-info/RECORD": b"of others"}) == ["x.dist-info/RECORD differs"]


def test_what_an_index_or_a_type_checker_misses_in_a_wheel_is_named():
    head = (
        "Name: shardplan\n"
        + "".join(f"Classifier: {name}\n" for name in publish._CLASSIFIERS)
        + "".join(f"Provides-Extra: {name}\n" for name in publish._EXTRAS)
    )
    good = {
        "shardplan/py.typed": b"",
        "_shardplan-stubs/__init__.pyi": b"",
        "shardplan-1.2.3.dist-info/METADATA": f"{head}\n# shardplan\n".encode(),
    }
    assert publish.lacks(good) == []
    bad = {
        "_shardplan-stubs/__init__.pyi": b"",
        "shardplan-1.2.3.dist-info/METADATA": (
            f"{head.replace('Provides-Extra: parquet', 'X: y')}\n[a](docs/a.md)\n".encode()
        ),
    }
    assert publish.lacks(bad) == [
        "no shardplan/py.typed", "no extra parquet", "its page links to docs/a.md, which an index does not have",
    ]
    assert publish.lacks({**good, "shardplan-1.2.3.dist-info/METADATA": head.encode()}) == ["no page"]


def test_a_person_is_told_what_an_index_does_not_take():
    files = [
        pathlib.Path(name)
        for name in (
            "shardplan-1.2.3.tar.gz", "shardplan-1.2.3-py3-none-any.whl",
            "shardplan_torch-1.2.3+torch2.15-cp311-cp311-linux_x86_64.whl",
        )
    ]
    tag, upload, attach = publish.left_to_a_person("1.2.3", files, ADDRESS)
    assert (
        "v1.2.3" in tag
        and upload == "twine upload shardplan-1.2.3.tar.gz shardplan-1.2.3-py3-none-any.whl"
        and attach.endswith(files[2].name)
    )
    assert "repository-code" in publish.left_to_a_person("1.2.3", files, None)[0]


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "usage: dev/release"),
    (["0.3.0", "--jobs", "0"], "--jobs: expected a positive number"),
    (["0.0.9"], "CMakeLists.txt has version"),
])  # fmt: skip
def test_wrong_usage_and_another_version_end_with_2(arguments, said):
    done = subprocess.run(
        [sys.executable, ROOT / "dev" / "release", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and said in done.stderr

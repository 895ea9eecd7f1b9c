# SPDX-License-Identifier: Apache-2.0
"""Checks by dev/release of a tree and of the files that are published, and steps that it leaves to a person."""

from __future__ import annotations

import pathlib
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

from running import last_line, run
from versions import EnvironmentProblem
from wheel import ROOT, Core, Failed, clean_environment

sys.path.append(str(ROOT / "cmake"))
import wheel_metadata  # noqa: E402

_TYPED = ("shardplan/py.typed", "_shardplan-stubs/__init__.pyi")
_CLASSIFIERS = (
    "Typing :: Typed", "Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3.10",
    "Programming Language :: Python :: 3.14",
)
_EXTRAS = ("torch", "huggingface", "parquet")


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else "none"


def versions(root: pathlib.Path) -> dict[str, str]:
    """File -> the version that it names."""
    citation = (root / "CITATION.cff").read_text()
    return {
        "CMakeLists.txt": wheel_metadata.project_version((root / "CMakeLists.txt").read_text()),
        "CITATION.cff": _found(r"^version: (\S+)$", citation),
        "tools/python/shardplan/__init__.py": _found(
            r'^__version__ = "(.*)"', (root / "tools/python/shardplan/__init__.py").read_text()
        ),
        "CHANGELOG.md": _found(r"^## (\d\S*)", (root / "CHANGELOG.md").read_text()),
    }


def disagreements(root: pathlib.Path, version: str) -> list[str]:
    """Why the tree is not that of the version, one line each."""
    lines = [f"{file} has version {found}, not {version}" for file, found in versions(root).items() if found != version]
    changelog, citation = (root / "CHANGELOG.md").read_text(), (root / "CITATION.cff").read_text()
    if "\n## Unreleased" in changelog:
        lines.append(f"CHANGELOG.md has changes under Unreleased: name them ## {version} (YYYY-MM-DD)")
    date = _found(rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)$", changelog)
    if date == "none":
        lines.append(f"CHANGELOG.md has no entry ## {version} (YYYY-MM-DD)")
    elif (released := _found(r"^date-released: (\S+)$", citation)) != date:
        lines.append(f"CITATION.cff is released on {released}, and CHANGELOG.md says {date}")
    return lines


def members(archive: pathlib.Path) -> dict[str, bytes]:
    """Files of a wheel."""
    with zipfile.ZipFile(archive) as files:
        return {name: files.read(name) for name in files.namelist() if not name.endswith("/")}


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Members that are in one of them alone, or are not the same bytes. RECORD has the hashes of the others: it counts
    where they are the same."""
    lines = [f"{name} is in one alone" for name in sorted(one.keys() ^ other.keys())]
    lines += [f"{name} differs" for name in sorted(one.keys() & other.keys()) if one[name] != other[name]]
    records = [line for line in lines if ".dist-info/RECORD" in line]
    return records if records == lines else [line for line in lines if line not in records]


def _metadata(files: dict[str, bytes]) -> tuple[str, str]:
    """The head, and the page."""
    (metadata,) = (body.decode() for name, body in files.items() if name.endswith(".dist-info/METADATA"))
    head, _, page = metadata.partition("\n\n")
    return head, page


def page_of(files: dict[str, bytes]) -> str:
    """The page that an index shows for a wheel."""
    return _metadata(files)[1]


def lacks(files: dict[str, bytes]) -> list[str]:
    """Parts that an index and a type checker need and the wheel without torch lacks."""
    head, page = _metadata(files)
    lines = [f"no {name}" for name in _TYPED if name not in files]
    lines += [f"no classifier {name}" for name in _CLASSIFIERS if f"\nClassifier: {name}" not in head]
    lines += [f"no extra {name}" for name in _EXTRAS if f"\nProvides-Extra: {name}" not in head]
    if not page.strip():
        lines.append("no page")
    return lines + [
        f"its page links to {target}, which an index does not have" for target in wheel_metadata.relative_links(page)
    ]


def left_to_a_person(version: str, files: list[pathlib.Path], address: str | None) -> list[str]:
    """Steps that only a person may decide or has the right to do, in order."""
    # A wheel of shardplan-torch names its torch in a local version (+torch2.15), and PyPI takes no local version.
    index = [str(file) for file in files if not file.name.startswith("shardplan_torch")]
    own = [str(file) for file in files if file.name.startswith("shardplan_torch")]
    lines = (
        []
        if address
        else [
            "name the address of the sources in CITATION.cff (repository-code), commit, and run this again: until "
            "then the page on the index has no pictures and no links"
        ]
    )
    lines += [
        f"git tag -a v{version} -m 'shardplan {version}' && git push origin v{version}",
        f"twine upload {' '.join(index)}",
    ]
    return lines + (
        [f"attach to the page of the release, which PyPI does not take because of their local version: {' '.join(own)}"]
        if own
        else []
    )


@dataclass
class FromSdist(Core):
    """The sdist, and the wheel that it builds."""

    name, title = "sdist", "from the sdist"
    sdist: pathlib.Path | None = None

    def stages(self) -> dict[str, Callable[[], None]]:
        return {"prepare": self._prepare, "sdist": self._pack, "build": self._build}

    def _pack(self) -> None:
        """The sdist is unpacked where the wheel is built."""
        packed, unpacked = self.folder / "packed", self.folder / "unpacked"
        for folder in (packed, unpacked):
            shutil.rmtree(folder, ignore_errors=True)
        code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
        if (
            run(
                [self._program("builder", "python"), "-c", code, packed],
                self._log("sdist"),
                ROOT,
                clean_environment(),
                alone=True,
            )
            != 0
        ):
            raise Failed(f"there is no sdist: {self._said('sdist')}")
        (self.sdist,) = packed.glob("*.tar.gz")
        with tarfile.open(self.sdist) as files:
            files.extractall(unpacked, filter="data")
        (self.source,) = unpacked.iterdir()


def check_pages(files: list[pathlib.Path], page: str, folder: pathlib.Path) -> list[str]:
    """The findings of `twine check --strict`, and whether the page renders as an index renders it; twine does not try
    that for Markdown. The environment is made in the folder, and the page is left there: page.html."""
    log, programs = folder / "pages.log", folder / "pages" / "bin"
    for command in (
        [sys.executable, "-m", "venv", folder / "pages"],
        [programs / "pip", "install", "--quiet", "twine", "readme_renderer[md]"],
    ):
        if run(command, log, ROOT) != 0:
            raise EnvironmentProblem(f"no twine: {last_line(log)} ({log})")
    (folder / "page.md").write_text(page)
    lines = []
    if (
        run([programs / "python", "-m", "readme_renderer", "-o", folder / "page.html", folder / "page.md"], log, ROOT)
        != 0
    ):
        lines.append(f"the page does not render: {last_line(log)} ({log})")
    if run([programs / "twine", "--no-color", "check", "--strict", *files], log, ROOT) != 0:
        lines += [line.strip() for line in log.read_text().splitlines() if re.search("FAILED|ERROR|WARNING", line)]
    return lines

# SPDX-License-Identifier: Apache-2.0
"""How what is missing is installed: by the scripts of a checkout, else by pip."""

import importlib.util
import re
from pathlib import Path

TORCH_RELEASES = ((2, 11), (2, 15))  # the first and the last that are supported


def in_checkout() -> bool:
    return (Path(__file__).resolve().parents[2] / "setup").is_file()


def how_to_install(what: str) -> str:
    """what: "torch", "huggingface" or "parquet", an extra of the package."""
    return "tools/setup" if in_checkout() else f"pip install 'shardplan[{what}]'"


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def why_no_torch() -> str:
    """Why there is no torch to work with, and what to install. "": it is there, and imported now. One that is newer
    than what is supported may do."""
    if not has_torch():
        return f"torch is not installed: {how_to_install('torch')}"
    try:
        import torch
    except Exception as error:  # a library of it that cannot be loaded is an OSError
        return (
            f"torch cannot be imported: {str(error) or type(error).__name__} ({how_to_install('torch')} installs one "
            "that can)"
        )
    found = str(getattr(torch, "__version__", "no version"))
    release = re.match(r"(\d+)\.(\d+)", found)
    if release is None or not hasattr(torch, "version"):
        return (
            f"what is imported as torch is no PyTorch (found {found} in {getattr(torch, '__file__', None)}): "
            f"{how_to_install('torch')}"
        )
    if tuple(map(int, release.groups())) < TORCH_RELEASES[0]:
        return (
            f"torch {'.'.join(map(str, TORCH_RELEASES[0]))} or later is needed (found {found}): "
            f"{how_to_install('torch')}"
        )
    return ""

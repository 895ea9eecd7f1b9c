# SPDX-License-Identifier: Apache-2.0
"""How what is missing is installed: by the scripts of a checkout, else by pip."""

from pathlib import Path

TORCH_RELEASES = ((2, 11), (2, 15))  # the first and the last that are supported


def in_checkout() -> bool:
    return (Path(__file__).resolve().parents[2] / "setup").is_file()


def how_to_install(what: str) -> str:
    """what: "torch", "huggingface" or "parquet", an extra of the package."""
    return "tools/setup" if in_checkout() else f"pip install 'shardplan[{what}]'"

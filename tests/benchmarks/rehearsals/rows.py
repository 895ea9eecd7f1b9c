# SPDX-License-Identifier: Apache-2.0
"""A row of the series: one command line of somebody's training script."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    name: str  # also the name of its files
    title: str  # Markdown, the table's first cell
    gpus: int
    command: list[str]
    published_gib: float | None = None  # what its authors printed, in GiB
    published_of: str = "allocated"  # or "reserved", as torchtitan prints
    environment: str = "base"
    repository: str = ""  # a clone that the caller names, in whose files it runs; "": examples/rehearse
    commit: str = ""  # of that clone
    rank: int = 0
    device_memory: str = "150754820096"  # an H200 as torch.cuda prints it: 140.4 GiB
    variables: dict[str, str] = field(default_factory=dict)
    routing: tuple[float, ...] = ()  # shares of the experts; (): balanced
    note: str = ""
    cluster: str = ""  # whose time is asked for; "": none
    published_tokens: float | None = None  # tokens/s of one GPU that its authors printed
    tokens: int = 0  # of one step, and of one GPU

# SPDX-License-Identifier: Apache-2.0
"""The flags of `shardplan trace` about Muon, and the options that they make."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.tracer.errors import UsageProblem

NS_STEPS = 5  # torch.optim.Muon's default
_NS_STEPS_END = 100  # torch.optim.Muon refuses as many


@dataclass(frozen=True, order=True)
class Ranks:
    """Ranks that a parameter is cut over, and how often they have it (HSDP)."""

    shards: int = 1
    replicas: int = 1

    def __str__(self) -> str:
        return str(self.shards) if self.replicas == 1 else f"{self.replicas}x{self.shards}"


@dataclass(frozen=True)
class MuonOptions:
    ranks: tuple[Ranks, ...] = ()
    patterns: tuple[str, ...] = ()  # of parameters that it steps; none: those of hidden layers
    blocks: tuple[tuple[str, int], ...] = ()  # patterns of parameters, and the rows of each of their matrices
    ns_steps: int = NS_STEPS
    nesterov: bool = True
    device: str = "cuda"  # or "cpu"
    devices_per_host: int = 8  # that a process sees; one CPU always

    @property
    def named(self) -> str:
        """For `recorded_with` of a trace."""
        return f"muon on {self.device}" + (f", {self.devices_per_host} a host" if self.device == "cuda" else "")


def options_of_strategy(muon: Mapping[str, Any]) -> MuonOptions:
    """muon: optimizer.muon of a strategy, whose owners need the steps of whole matrices."""
    return MuonOptions(
        patterns=tuple(muon.get("matrices", ())),
        blocks=tuple(
            (pattern, rule["block_rows"])
            for rule in muon.get("compute", ())
            if "block_rows" in rule
            for pattern in rule["parameters"]
        ),
        ns_steps=muon.get("ns_steps", NS_STEPS),
        nesterov=muon.get("nesterov", True),
    )


def _positive(text: str) -> int:
    value = int(text)
    if not 1 <= value < 2**31:
        raise ValueError
    return value


def _count(text: str) -> int:
    try:
        return _positive(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer of 31 bits") from None


def _ranks(text: str) -> list[Ranks]:
    try:
        found = []
        for element in text.split(","):
            replicas, times, shards = element.rpartition("x")
            found.append(Ranks(_positive(shards), _positive(replicas) if times else 1))
        return found
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: expected numbers of ranks, each RANKS or REPLICASxRANKS (8,64,2x32)"
        ) from None


def _blocks(text: str) -> tuple[str, int]:
    pattern, _, rows = text.rpartition("=")
    try:
        if not pattern:
            raise ValueError
        return pattern, _positive(rows)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected PATTERN=ROWS, rows a positive integer") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--muon",
        type=_ranks,
        default=[],
        metavar="RANKS[,RANKS...]",
        help="add what torch.optim.Muon does in a step of each matrix that FSDP2 cuts over so many ranks, and of each "
        "whole matrix; 2x32: cut over 32 ranks, in 2 replicas (HSDP). The matrices are those of hidden layers",
    )
    parser.add_argument(
        "--muon-matrices",
        action="append",
        default=[],
        metavar="PATTERN",
        help="the parameters that Muon steps in place of those of hidden layers: an FQN in which * and ? do not cross "
        "a dot, or class:NAME of their module. Repeat it for others",
    )
    parser.add_argument(
        "--muon-blocks",
        action="append",
        type=_blocks,
        default=[],
        metavar="PATTERN=ROWS",
        help="add the step of a whole matrix of so many rows, for parameters that a rule of the strategy takes for "
        "several matrices each (block_rows). Repeat it for others",
    )
    parser.add_argument(
        "--muon-ns-steps", type=_count, metavar="N", help="Newton-Schulz iterations of Muon (default: 5)"
    )
    parser.add_argument("--no-muon-nesterov", action="store_true", help="Muon without Nesterov momentum")
    parser.add_argument(
        "--muon-device",
        choices=("cuda", "cpu"),
        help="device of the ranks, by which DTensor chooses Muon's collectives (default: cpu with --sdpa cpu, else "
        "cuda)",
    )
    parser.add_argument(
        "--muon-gpus-per-node",
        type=_count,
        metavar="N",
        help="GPUs that a rank sees in its node (torch.cuda.device_count), by which DTensor chooses, too (default: 8)",
    )


_OF_MUON = {
    "--muon-matrices": "muon_matrices",
    "--muon-blocks": "muon_blocks",
    "--muon-ns-steps": "muon_ns_steps",
    "--no-muon-nesterov": "no_muon_nesterov",
    "--muon-device": "muon_device",
    "--muon-gpus-per-node": "muon_gpus_per_node",
}


def check(arguments: argparse.Namespace) -> None:
    """Raises UsageProblem."""
    for flag, name in _OF_MUON.items():
        if getattr(arguments, name) and not arguments.muon:
            raise UsageProblem(f"{flag} is for --muon RANKS, which is not given")
    if (arguments.muon_ns_steps or 0) >= _NS_STEPS_END:
        raise UsageProblem(
            f"--muon-ns-steps {arguments.muon_ns_steps}: torch.optim.Muon takes less than {_NS_STEPS_END}"
        )


def options_of(arguments: argparse.Namespace) -> MuonOptions:
    given = {"ns_steps": arguments.muon_ns_steps, "devices_per_host": arguments.muon_gpus_per_node}
    return MuonOptions(
        ranks=tuple(arguments.muon),
        patterns=tuple(arguments.muon_matrices),
        blocks=tuple(arguments.muon_blocks),
        nesterov=not arguments.no_muon_nesterov,
        device=arguments.muon_device or ("cpu" if arguments.sdpa == "cpu" else "cuda"),
        **{name: value for name, value in given.items() if value is not None},
    )

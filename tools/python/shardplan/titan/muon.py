# SPDX-License-Identifier: Apache-2.0
"""torchtitan's DistMuon (torchtitan 0.3.0, distributed/flex_shard) in the words of a strategy."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from shardplan.tracer.errors import TracerError
from shardplan.tracer.muon_options import NS_STEPS, MuonOptions, options_of_strategy

NAME = "DistMuon"
_SHARDS, _REPLICAS = "dp_shard", "dp_replicate"


def stepped_by(groups: list[Any], fqns: list[str]) -> dict[str, list[str]]:
    """FQNs by the name of their optimizer. The first group whose pattern is found in an FQN has it
    (OptimizersContainer._build_param_groups)."""
    found: dict[str, list[str]] = {group.optimizer_name: [] for group in groups}
    for fqn in fqns:
        group = next((group for group in groups if re.search(group.pattern, fqn)), None)
        if group is not None:
            found[group.optimizer_name].append(fqn)
    return found


def field(config: Any, fqns: list[str]) -> tuple[dict[str, Any], MuonOptions]:
    """optimizer.muon of the strategy, and the steps that the trace has to have. config: OptimizersContainer.Config;
    fqns: of the parameters that Muon steps."""
    factory = config.optimizer_factory_kwargs_by_name.get(NAME, {})
    layouts = factory.get("compute_sharding_by_fqn", {})
    rules: dict[tuple, list[str]] = {}
    for fqn in fqns:
        if fqn not in layouts:
            raise TracerError(f"DistMuon steps {fqn}, and compute_sharding_by_fqn does not say where it is whole")
        rules.setdefault(tuple(sorted(_rule(fqn, layouts[fqn]).items())), []).append(fqn)
    kwargs = [group.optimizer_kwargs for group in config.param_groups if group.optimizer_name == NAME]
    nesterov = _one("nesterov", [own.get("nesterov", True) for own in kwargs])
    ns_steps = _one("ns_steps", [own.get("ns_steps", NS_STEPS) for own in kwargs])
    muon = {
        "matrices": fqns,
        "nesterov": nesterov,
        "ns_steps": ns_steps,
        "compute": [{"parameters": named, **dict(rule)} for rule, named in rules.items()],
        "buckets": _buckets(factory.get("bucket_configs", ()), fqns),
        "dist_muon": True,
    }
    return muon, options_of_strategy(muon)


def _one(name: str, found: list[Any]) -> Any:
    if len(set(found)) != 1:
        raise TracerError(f"groups of DistMuon have different {name}: {found}, and a strategy has one")
    return found[0]


def _rule(fqn: str, layout: Any) -> dict[str, Any]:
    """Fields of a rule of optimizer.muon.compute."""
    from torch.distributed.tensor import Shard
    from torchtitan.distributed.flex_shard import BlockShard, Owned

    axes = dict(layout.shardings_by_mesh_axis)
    of_shards = axes.get(_SHARDS)
    over_replicas = {"over_replicas": True} if isinstance(axes.get(_REPLICAS), Owned) else {}
    if isinstance(of_shards, BlockShard) and of_shards.dim == 0:
        return {"compute": "owned", "block_rows": of_shards.block_size, **over_replicas}
    if isinstance(of_shards, Owned):
        return {"compute": "owned", **over_replicas}
    if axes and all(isinstance(sharding, Shard) and sharding.dim == 0 for sharding in axes.values()):
        return {"compute": "owned"}  # a stack of matrices, each of them whole where Shard(0) puts it
    shown = ", ".join(f"{name} {sharding!r}" for name, sharding in axes.items())
    raise TracerError(f"a strategy has no words for the compute layout of {fqn} ({shown})")


def _buckets(configs: Any, fqns: list[str]) -> list[list[str]]:
    """A parameter is in the first bucket that one of its patterns names."""
    left = list(fqns)
    buckets = []
    for config in configs:
        own = [fqn for fqn in left if any(fnmatch.fnmatchcase(fqn, pattern) for pattern in config.patterns)]
        left = [fqn for fqn in left if fqn not in own]
        buckets.append(own)
    if left and configs:
        raise TracerError(f"DistMuon steps {left[0]}, which is in no bucket of bucket_configs")
    return [bucket for bucket in buckets if bucket]

// SPDX-License-Identifier: Apache-2.0
// Functions of the Python file that fsdp2_script.h writes, each in the file where something calls it.
#pragma once

#include <string_view>

namespace shardplan::cli::fsdp2_helpers {

inline constexpr std::string_view kMatches = R"py(

def matches(pattern: str, name: str) -> bool:
    """`*` and `?` stand for what has no dot."""
    return re.fullmatch("".join({"*": "[^.]*", "?": "[^.]"}.get(c, re.escape(c)) for c in pattern), name) is not None
)py";

inline constexpr std::string_view kMatching = R"py(

WRAPPED = "_checkpoint_wrapped_module"


def matching_names(model: nn.Module, entries: list[str]) -> list[str]:
    """Of the modules that an entry matches: by name, or "class:NAME". Wrappers of checkpoints are in no name."""
    named: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        named.setdefault(".".join(part for part in name.split(".") if part != WRAPPED), module)
    kinds = {name: f"class:{type(getattr(module, WRAPPED, module)).__name__}" for name, module in named.items()}
    return [name for name in named for entry in entries if kinds[name] == entry or matches(entry, name)]


def matching(model: nn.Module, entries: list[str]) -> list[nn.Module]:
    return [model.get_submodule(name) for name in matching_names(model, entries)]
)py";

inline constexpr std::string_view kNamed = R"py(

def first_of(model: nn.Module, rules: list) -> dict:
    """What the first rule that matches says of a parameter, by parameter. Wrappers are in no name."""
    said = {}
    for patterns, what in rules:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            if any(matches(pattern, plain) for pattern in patterns):
                said.setdefault(parameter, what)
    return said
)py";

inline constexpr std::string_view kDataParallel = R"py(

def data_parallel(model: nn.Module, mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...] = ()) -> dict:
    """The mesh of fully_shard: FSDP's dimensions, several as one. Parameters that spmd_types annotates need the other
    dimensions of the mesh beside them."""
    spmd = sys.modules.get("spmd_types")
    if spmd is None or not any(spmd.get_local_type(parameter) for parameter in model.parameters()):
        parts = [flattened(mesh, dims) for dims in (replicate, shard) if dims]
        return {"mesh": parts[0] if len(parts) == 1 else mesh[tuple(part.mesh_dim_names[0] for part in parts)]}
    from torch.distributed.fsdp import DataParallelMeshDims

    own = tuple(name for name in mesh.mesh_dim_names if name in (*replicate, *shard))
    rest = tuple(name for name in mesh.mesh_dim_names if name not in own and mesh[name].size() > 1)
    whole = DeviceMesh._concatenate([mesh[own], flattened(mesh, rest)]) if rest else mesh[own]
    return {"mesh": whole, "dp_mesh_dims": DataParallelMeshDims(shard or None, replicate or None)}


def flattened(mesh: DeviceMesh, dims: tuple[str, ...]) -> DeviceMesh:
    return mesh[dims]._flatten("_".join(dims)) if len(dims) > 1 else mesh[dims]
)py";

inline constexpr std::string_view kOnMeshes = R"py(

def on_meshes(model: nn.Module, rules: list, placement=lambda parameter: None):
    """Parameters that are on another mesh than their unit: (names, ranks) of each."""
    infos = {id(ranks): _get_mesh_info(ranks["mesh"], ranks.get("dp_mesh_dims")) for _, ranks in rules}
    info_of = first_of(model, [(names, infos[id(ranks)]) for names, ranks in rules])

    def place(parameter: nn.Parameter):
        info = info_of.get(parameter)
        return placement(parameter) if info is None else ShardPlacementResult(placement(parameter), info)

    return place
)py";

inline constexpr std::string_view kPlacements = R"py(

def placements(model: nn.Module):
    """Dimensions that parameters are cut along, where it is not the first one."""
    dims = first_of(model, [{}])
    return lambda parameter: Shard(dims[parameter]) if parameter in dims else None
)py";

inline constexpr std::string_view kSelective = R"py(

def selective_contexts():
    """Operators whose results are kept in a recomputed module; of those with a number every so many-th is run again all the same."""
    kept = {{{}}}
    counts: collections.Counter = collections.Counter()

    def policy(context, operator, *_, **__) -> CheckpointPolicy:
        name = str(operator).rpartition(".")[0]
        if name not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute, name] += 1
        again = kept[name] > 0 and counts[context.is_recompute, name] % kept[name] == 0
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)
)py";

}  // namespace shardplan::cli::fsdp2_helpers

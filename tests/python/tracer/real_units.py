# SPDX-License-Identifier: Apache-2.0
"""The units that PyTorch's own fully_shard makes, as JSON: `python real_units.py BUILDER`, or `--torchtitan RANKS` and
torchtitan's arguments. In a process of its own, with a fake process group."""

import json
import sys

from torch.distributed.fsdp import FSDPModule


def plain(fqn):
    return ".".join(part for part in fqn.split(".") if part != "_checkpoint_wrapped_module")


def units(model):
    names = {id(module): plain(fqn) for fqn, module in reversed(list(model.named_modules()))}
    found = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        modules = [names[id(one)] for one in state._modules]
        groups = [
            {
                "parameters": {
                    f"{names[id(p._module_info.module)]}.{p._module_info.param_name}".lstrip("."): p.fsdp_placement.dim
                    for p in group.fsdp_params
                },
                "shards": getattr(group.mesh_info, "shard_mesh_size", 1),
                "replicas": getattr(group.mesh_info, "replicate_mesh_size", 1),
                "divides": group.gradient_divide_factor,
                "param_dtype": str(state._mp_policy.param_dtype).removeprefix("torch."),
            }
            for group in state._fsdp_param_groups
        ]
        found[",".join(modules)] = {
            "groups": groups,
            "forward_prefetch": prefetched(state._states_to_forward_prefetch, names),
            "backward_prefetch": prefetched(state._states_to_backward_prefetch, names),
        }
    return found


def prefetched(states, names):
    return list(dict.fromkeys(",".join(names[id(one)] for one in state._modules) for state in states))


def main(words):
    if words[0] == "--torchtitan":
        from shardplan.titan.job import Job
        from torchtitan.distributed import parallel_dims

        parallel_dims.device_type = "cpu"
        model = Job(words[2:], int(words[1])).parallelized()[0]
    else:
        import sharded_builders

        made = getattr(sharded_builders, words[0])()
        model = made[0] if isinstance(made, tuple) else made
    print(json.dumps(units(model)))


if __name__ == "__main__":
    main(sys.argv[1:])

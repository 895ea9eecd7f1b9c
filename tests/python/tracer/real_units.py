# SPDX-License-Identifier: Apache-2.0
"""The units that PyTorch's own fully_shard makes, as JSON: `python real_units.py BUILDER`, or `--torchtitan RANKS` and
torchtitan's arguments. `--exported FOLDER RANKS` and these: torchtitan parallelizes the model without FSDP, and
FOLDER/apply_plan.py calls fully_shard. In a process of its own, with a fake process group."""

import contextlib
import json
import pathlib
import runpy
import sys
import unittest.mock

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
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
                "ranks": [
                    dist.get_process_group_ranks(process_group)
                    for name in ("shard_process_group", "replicate_process_group")
                    if (process_group := getattr(group.mesh_info, name, None)) is not None
                ],
                "reshards": group.post_forward_mesh_info is not None,
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


def job_of(ranks, words):
    """On the CPU."""
    from shardplan.titan.job import Job
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"
    return Job(words, int(ranks))


@contextlib.contextmanager
def without_fsdp(parallelize):
    """torchtitan's parallelize_fn does all but call fully_shard."""
    module = sys.modules[parallelize.__module__]
    with contextlib.ExitStack() as stack:
        for name in dir(module):
            if name.startswith("apply_fsdp_to"):
                stack.enter_context(unittest.mock.patch.object(module, name, lambda *_, **__: None))
        yield


def exported_job(folder, ranks, words):
    """Checkpoints of the strategy are the exported file's."""
    strategy = json.loads((folder / "strategy.json").read_text())
    return job_of(ranks, [*words, "activation_checkpoint:none"] if "checkpoint" in strategy else words)


def exported(job, folder):
    """The model that the exported file shards, the job's loss."""
    functions = runpy.run_path(str(folder / "apply_plan.py"))
    with without_fsdp(job.config.model_spec.parallelize_fn):
        model, loss = job.parallelized()
    dims = json.loads((folder / "plan.json").read_text())["mesh"]
    names = tuple(dim["name"] for dim in dims)
    mesh = init_device_mesh("cpu", tuple(dim["size"] for dim in dims), mesh_dim_names=names)
    return functions["apply_plan"](model, mesh), loss


def main(words):
    if words[0] == "--torchtitan":
        model = job_of(words[1], words[2:]).parallelized()[0]
    elif words[0] == "--exported":
        folder = pathlib.Path(words[1])
        model = exported(exported_job(folder, words[2], words[3:]), folder)[0]
    else:
        import sharded_builders

        made = getattr(sharded_builders, words[0])()
        model = made[0] if isinstance(made, tuple) else made
    print(json.dumps(units(model)))


if __name__ == "__main__":
    main(sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""The process of the rehearsed rank: the pieces that are put in place as the script imports what they change.

[Note: a warm process] The pieces ask for the run, and whether this process is the rank, when they act. So a process may
import torch with them in place, and be forked for each run (kept.py).
"""

from __future__ import annotations

import sys
from types import ModuleType

from . import imports
from .run import the_run


def watch(begins: bool = True) -> None:
    """Called when torch is about to be imported. begins=False: in a process that is no rank, and whose forks may be."""
    if begins:
        imports.behind("torch", begin)
    imports.behind("torch.distributed.rendezvous", _patch("played_store", "patch_rendezvous"))
    imports.behind("torch.distributed.distributed_c10d", _patch_c10d)
    imports.behind("torch.distributed", _patch("played_store", "patch_names"))
    imports.behind("torch.distributed.fsdp._fully_shard._fsdp_param_group", _patch("modules", "patch_fsdp"))
    imports.behind("torch.distributed.checkpoint.state_dict_saver", _patch("checkpoints", "patch_saver"))
    imports.behind("torch.distributed.checkpoint.state_dict_loader", _patch("checkpoints", "patch_loader"))
    imports.behind("torch._inductor.runtime.benchmarking", _patch("timings", "patch_inductor"))
    imports.behind("triton.testing", _patch("timings", "patch_triton"))
    imports.behind("triton.runtime.jit", _patch("triton_kernels", "patch_triton"))
    imports.behind("torch._inductor.runtime.triton_heuristics", _patch("triton_kernels", "patch_inductor"))
    imports.behind("torch.autograd.profiler", _patch("timings", "patch_profiler"))
    imports.behind("megatron_fsdp.uneven_dtensor", _patch("libraries", "patch_megatron_fsdp"))
    imports.behind("safetensors.torch", _patch("checkpoints", "patch_safetensors"))


def _patch(piece: str, function: str):
    def action(module: ModuleType) -> None:
        from importlib import import_module

        getattr(import_module(f"{__package__}.{piece}"), function)(module)

    return action


def _patch_c10d(c10d: ModuleType) -> None:
    from . import objects, played_groups, recording

    played_groups.patch(c10d)
    objects.patch(c10d)
    recording.watch_groups(c10d)


def begin(torch: ModuleType) -> None:
    """This process is the rank, and torch is there."""
    run = the_run()
    run.tell("torch", {"executable": sys.executable, "version": torch.__version__})
    from . import checkpoints, device, ending, modules, phases

    device.begin(torch)
    recorder = phases.begin(torch)
    modules.begin(torch, recorder)
    checkpoints.patch_torch(torch)
    ending.begin(torch, recorder)

# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks along a mesh dimension work on the same batch, by the dimension's name.

A trace is of one rank. How many batches a job works on follows from its mesh, and a mesh says no more than names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# All ranks have the whole batch: they cut layers, or share them out.
_SAME = {
    "tp": "torchtitan 0.3.0 (ParallelDims), accelerate 1.15 (ParallelismConfig), transformers 5 (tp_plan)",
    "pp": "torchtitan 0.3.0, transformers 5 (pp_plan)",
    "etp": "torchtitan before 0.3.0: tensor parallelism of experts",
    "tensor": "megatron-core, nanotron",
    "tensor_parallel": "PyTorch's tutorials",
    "model": "GSPMD's and PyTorch/XLA's meshes",
    "mp": "fairscale, DeepSpeed",
    "pipeline": "PyTorch's tutorials",
    "pipe": "DeepSpeed",
}
# Each rank has a batch of its own, or its own part of the sequences of one.
_OWN = {
    "dp": "torchtitan 0.3.0, accelerate 1.15, PyTorch's tutorials",
    "ddp": "PyTorch's tutorials",
    "dp_replicate": "torchtitan 0.3.0, accelerate 1.15",
    "dp_shard": "torchtitan 0.3.0, accelerate 1.15",
    "dp_cp": "accelerate 1.15, flattened",
    "dp_shard_cp": "accelerate 1.15, flattened",
    "fsdp": "torchtitan 0.3.0, transformers 5",
    "efsdp": "torchtitan 0.3.0: FSDP of experts",
    "hsdp": "PyTorch's tutorials",
    "shard": "shardplan's strategies",
    "replicate": "shardplan's strategies",
    "data": "GSPMD's and PyTorch/XLA's meshes",
    "batch": "torchtitan 0.3.0",
    "ep": "torchtitan 0.3.0, transformers 5: the tokens of other ranks come to its experts",
    "expert": "megatron-core",
    "experts": "PyTorch's tutorials",
    "cp": "torchtitan 0.3.0, accelerate 1.15",
    "context": "megatron-core",
    "sp": "accelerate 1.15: Ulysses",
    "loss": "torchtitan 0.3.0",
    "loss_mesh": "torchtitan 0.3.0",
    "world": "the default group",
}


# Along these FSDP cuts or replicates parameters; along cp it takes its part in torchtitan.
DATA_PARALLEL = frozenset(
    "dp ddp dp_replicate dp_shard dp_cp dp_shard_cp fsdp efsdp hsdp shard replicate data batch loss loss_mesh cp world"
    .split()
)


@dataclass
class BatchDimensions:
    """same, own: what the user says of names, before the tables."""

    same: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # of the user's

    def is_same(self, name: str) -> bool | None:
        """None: nobody knows."""
        for names, answer in ((self.same, True), (self.own, False)):
            if name in names:
                self.used.add(name)
                return answer
        return True if name in _SAME else False if name in _OWN else None

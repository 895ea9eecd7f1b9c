# SPDX-License-Identifier: Apache-2.0
"""accelerate shards on GPUs alone, and takes CPU ranks for DDP's. FSDP2 runs there: this tells accelerate so, to try
the example without a GPU."""

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def shard_on_cpu() -> None:
    begin = AcceleratorState.__init__

    def initialize(self, *arguments, fsdp_plugin=None, **keywords) -> None:
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = initialize

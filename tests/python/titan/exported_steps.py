# SPDX-License-Identifier: Apache-2.0
"""Steps of a torchtitan model that the exported file shards: `python exported_steps.py FOLDER RANKS` and torchtitan's
arguments.

Writes FOLDER/titan.log: what FSDP2 issues, for `shardplan-conformance FOLDER titan`. On the CPU, as rank 0 of a fake
process group, with torchtitan's loss in chunks. Attention is ScaledDotProductAttention: FlexAttention has no backward
on the CPU."""

import contextlib
import pathlib
import sys
import unittest.mock

import torch
from real_units import exported, exported_job, plain
from torchtitan.distributed import utils
from torchtitan.models.common.attention import ScaledDotProductAttention

from shardplan_conformance.fsdp2_events import Fsdp2Events

STEPS = 3


@contextlib.contextmanager
def phases(log):
    """The loss runs backwards of its own: what is in one is of the backward, everything else of the forward."""
    backward = torch.Tensor.backward

    def logged(tensor, *arguments, **more):
        log.phase = "backward"
        try:
            backward(tensor, *arguments, **more)
        finally:
            log.phase = "forward"

    with unittest.mock.patch.object(torch.Tensor, "backward", logged):
        yield


def batch(job):
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types

    shape = (job.batch, job.seq)
    tokens, labels = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    more = {"positions": torch.arange(job.seq).expand(shape).contiguous()}
    if job.dims.spmd_backend == "spmd_types":
        return annotate_input_spmd_types(job.dims, tokens, labels, more)
    return tokens, labels, more


def main(words):
    folder, ranks = pathlib.Path(words[0]), words[1]
    job = exported_job(folder, ranks, words[2:])
    for layer in job.config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model, loss_fn = exported(job, folder)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    names = {}
    for name, module in model.named_modules():
        names.setdefault(module, plain(name))
    log = Fsdp2Events(names)
    with log.patches(), phases(log), utils.get_spmd_context(parallel_dims=job.dims)():
        for step in range(STEPS):
            log.step, log.phase = step, "forward"
            tokens, labels, more = batch(job)
            hidden = model(tokens, **more)
            loss_fn(hidden, labels, torch.tensor(labels.numel()))[0].backward()
            log.phase = "optim"
            log.add("optim_step", "")
            optimizer.step()
            log.add("zero_grad", "")
            optimizer.zero_grad()
    head = ["# case titan", f"# torch {torch.__version__}", f"# ranks {ranks}"]
    (folder / "titan.log").write_text("\n".join([*head, *log.lines]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

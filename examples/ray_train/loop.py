# SPDX-License-Identifier: Apache-2.0
"""The function of each worker: a loop of Ray Train as its users write it for FSDP2. `plan` is the port."""

from __future__ import annotations

import tempfile

import model as gpt
import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def train(config: dict) -> None:
    """config: plan, steps, checkpoint_every, and fails_before, the step that the first attempt does not reach."""
    device = ray.train.torch.get_device()
    torch.manual_seed(0)
    sizes = gpt.GptConfig()
    model = gpt.Gpt(sizes).to(device)
    if config["plan"]:
        import shardplan.torch as sp

        for block in model.blocks:
            sp.unit(block)  # fully_shard(block)
        model = sp.auto(model, quiet=True)  # fully_shard(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint = ray.train.get_checkpoint()
    losses = load(checkpoint, model, optimizer) if checkpoint else []
    for step in range(len(losses), config["steps"]):
        if step == config["fails_before"] and not checkpoint:
            raise RuntimeError("a worker is lost")
        generator = torch.Generator().manual_seed(100 * step + ray.train.get_context().get_world_rank())
        ids = torch.randint(sizes.vocabulary, (2, sizes.context + 1), generator=generator).to(device)
        loss = gpt.loss_fn(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / dist.get_world_size())
        report(losses, model, optimizer, (step + 1) % config["checkpoint_every"] == 0)


def report(
    losses: list[float], model: torch.nn.Module, optimizer: torch.optim.Optimizer, with_checkpoint: bool
) -> None:
    """Each worker hands over the files that it writes; Ray puts them together."""
    if not with_checkpoint:
        ray.train.report({"losses": losses})
        return
    with tempfile.TemporaryDirectory() as folder:
        parameters, states = get_state_dict(model, optimizer)
        dcp.save({"model": parameters, "optimizer": states, "losses": losses}, checkpoint_id=folder)
        ray.train.report({"losses": losses}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def load(checkpoint: ray.train.Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses of the steps before the checkpoint."""
    parameters, states = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": states, "losses": []}
    with checkpoint.as_directory() as folder:
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["losses"]

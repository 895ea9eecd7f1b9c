# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_trainer.py: transformers' Trainer and a loop of accelerate's, under FSDP2 or
by plans."""

from __future__ import annotations

import os
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "examples" / "fine_tune"))
from cpu_ranks import shard_on_cpu  # noqa: E402
from equivalence import whole  # noqa: E402

VOCABULARY, SEQUENCE = 61, 12


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        )
    )


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, SEQUENCE), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def _as_torchrun() -> None:
    """Sets the variables that accelerate reads."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1",
        ACCELERATE_USE_CPU="true",
    )
    os.environ.setdefault("MASTER_PORT", "29500")
    shard_on_cpu()


def trainer(folder: str, by_plans: bool, resume: bool, accumulate: int) -> dict:
    from transformers import Trainer, TrainingArguments, set_seed

    _as_torchrun()
    set_seed(5)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        optim="adamw_torch",
        dataloader_pin_memory=False,
        fsdp_config={
            "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        },
    )
    made = Trainer(model=tiny_llama(), args=arguments, train_dataset=samples(64, 1), eval_dataset=samples(8, 2))
    if by_plans:
        from shardplan.integrations import use_plans

        use_plans(made, quiet=True)
    made.train(resume_from_checkpoint=str(pathlib.Path(folder) / "checkpoint-3") if resume else None)
    history = made.state.log_history
    result = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "eval": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "predicted": float(made.predict(samples(4, 3)).metrics["test_loss"]),
    }
    # accelerate's whole state consists of DTensors on CPU ranks, under FSDP2, too.
    state = {name: whole(tensor).clone() for name, tensor in made.accelerator.get_state_dict(made.model).items()}
    if dist.get_rank() == 0:
        made.accelerator.unwrap_model(made.model).save_pretrained(pathlib.Path(folder) / "saved", state_dict=state)
    dist.barrier()
    if by_plans:
        from shardplan.torch._replay.applied import applied_to

        applied = applied_to(made.model)
        result["units"] = len(applied.plan.units)
        result["deviates"] = applied.runtime.deviation or applied.following.unplannable_because
    return result


def loop(by_plans: bool) -> dict:
    """accelerate without a Trainer: accumulation, clipping, a checkpoint of everything and back."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    _as_torchrun()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    if by_plans:
        from shardplan.integrations import use_plans

        use_plans(accelerator, quiet=True)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(samples(32, 1), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return {"losses": losses}

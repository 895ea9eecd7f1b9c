# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer on a small Llama from a config: torchrun --nproc-per-node 2 train.py OUTPUT [--plan]."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class Prints(TrainerCallback):
    def on_log(self, arguments, state, control, logs=None, **_more):
        if state.is_world_process_zero and "loss" in logs:
            print(
                f"step {state.global_step}: loss {float(logs['loss']):.6f}, gradient norm "
                f"{float(logs['grad_norm']):.6f}"
            )
        if state.is_world_process_zero and "eval_loss" in logs:
            print(f"step {state.global_step}: evaluation {float(logs['eval_loss']):.6f}")


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(97, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--plan", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        from cpu_ranks import shard_on_cpu

        shard_on_cpu()
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            arguments.output,
            max_steps=6,
            per_device_train_batch_size=2,
            learning_rate=3e-3,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_steps=6,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            fsdp=True,
            fsdp_config={
                "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "cpu_ram_efficient_loading": False, "state_dict_type": "SHARDED_STATE_DICT",
            },
        ),
        train_dataset=samples(64, 1),
        eval_dataset=samples(8, 2),
        callbacks=[Prints()],
    )
    if arguments.plan:
        from shardplan.integrations import use_plans

        use_plans(trainer, quiet=True)  # the line that a port takes
    trainer.train()


if __name__ == "__main__":
    main()

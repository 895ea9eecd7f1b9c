# SPDX-License-Identifier: Apache-2.0
"""Llama 8B with the Hugging Face Trainer on accelerate's FSDP2: torchrun --nproc_per_node 8 trainer.py, or accelerate
launch."""

import llama
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class RandomTokens(Dataset):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = llama.tokens(1, 4096, device="cpu")[0]
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=3,
        per_device_train_batch_size=1,
        bf16=True,
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        dataloader_num_workers=2,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True,
        },
    )
    Trainer(llama.model(), arguments, train_dataset=RandomTokens()).train()


if __name__ == "__main__":
    main()

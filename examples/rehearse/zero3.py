# SPDX-License-Identifier: Apache-2.0
"""Llama 8B with DeepSpeed's ZeRO stage 3: deepspeed --num_gpus 8 zero3.py, or torchrun."""

import deepspeed
import llama
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = llama.model(torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for step in range(3):
        ids = llama.tokens(1, 4096, device=engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        print(
            f"step {step} loss {loss.item():.3f} peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True
        )


if __name__ == "__main__":
    main()

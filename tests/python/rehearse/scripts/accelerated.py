# SPDX-License-Identifier: Apache-2.0
"""accelerate, with micro-batches, in the form that its examples have."""

import torch
from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.randn(4096, 256), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    print("process", accelerator.process_index, "of", accelerator.num_processes, accelerator.distributed_type)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).float().square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

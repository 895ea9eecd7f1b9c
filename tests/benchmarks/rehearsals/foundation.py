# SPDX-License-Identifier: Apache-2.0
"""Rows of fms-fsdp's README (foundation-model-stack/fms-fsdp at 5a296af): Llama 2 under FSDP1, compiled, sequences of
4096, its own script with its dummy data.

The README says "selective" recomputation without its part. HFU over MFU of its A100 runs says it: 0.69 / 0.61 is every
third block of 13B, 0.74 / 0.55 every block of 34B and 70B.
"""

from rows import Row

COMMIT = "5a296af"
H100, A100 = "fms_h100_96", "fms_a100_128"  # files that assets.py makes: nodes with the README's networks
MEMORY = {H100: "85024768000", A100: "85024768000"}
RECOMPUTED = {"13b": 1 / 3, "34b": 1, "70b": 1}


def row(model: str, cluster: str, gpus: int, published_tokens: float) -> Row:
    words = [
        "main_training_llama.py", f"--model_variant=llama2_{model}", "--use_dummy_dataset=True", "--num_workers=0",
        "--sharding_strategy=fsdp", "--fsdp_activation_checkpointing=True",
        f"--selective_checkpointing={RECOMPUTED[model]}", "--low_cpu_fsdp=True", "--batch_size=2", "--num_steps=100",
        "--report_interval=1", "--use_torch_compile=True", "--ckpt_load_path={assets}/none",
        "--ckpt_save_path={assets}/none",
    ]
    device = "H100" if cluster == H100 else "A100"
    return Row(
        f"fms_{model}_{device.lower()}", f"fms-fsdp Llama 2 {model.upper()}, FSDP1, batch 2, compiled", gpus,
        ["torchrun", "--nnodes", str(gpus // 8), "--nproc_per_node", "8", *words], environment="fms",
        repository="fms-fsdp", commit=COMMIT, device_memory=MEMORY[cluster],
        cluster=f"{{assets}}/{cluster}.json", published_tokens=published_tokens, tokens=8192,
    )


ROWS = [
    row("13b", H100, 96, 4850),
    row("34b", H100, 96, 1830),
    row("70b", H100, 96, 890),
    row("13b", A100, 128, 2150),
    row("70b", A100, 128, 410),
]

# SPDX-License-Identifier: Apache-2.0
"""Rows of our own scripts, one for each framework, and of torchtitan's trainer by its own flags. {assets} is the folder
that assets.py makes."""

from rows import Row

H100 = "85024768000"  # 79.2 GiB


def launched(gpus: int, words: list[str]) -> list[str]:
    return ["torchrun", "--nnodes", str(-(-gpus // 8)), "--nproc_per_node", str(min(gpus, 8)), *words]


def script(name: str, title: str, gpus: int, *words: str, environment: str = "base") -> Row:
    return Row(name, title, gpus, launched(gpus, list(words)), environment=environment, device_memory=H100)


def titan(
    module: str, config: str, gpus: int, title: str, *flags: str, reserved_gib: float | None = None, suffix: str = ""
) -> Row:
    """`python -m torchtitan.train` with a configuration of its registry; its tokenizer and data set are ours."""
    words = [
        "-m", "torchtitan.train", "--module", module, "--config", config, "--training.steps", "3", "--hf-assets-path",
        "{assets}/tokenizer", "--dataloader.dataset", "c4_test", "--dataloader.dataset-path", "{assets}/text",
        "--dump-folder", "{assets}/dump", "--metrics.log-freq", "1", "--metrics.no-enable-tensorboard",
        "--profiler.no-enable-profiling", *flags,
    ]
    return Row(
        f"titan_{config}_{gpus}{suffix}", title, gpus, launched(gpus, words), reserved_gib, "reserved",
        environment="titan", device_memory=H100,
    )


EAGER = "--training.disable-cuda-graphs"

ROWS = [
    script("fsdp2_8", "FSDP2 alone, AdamW", 8, "fsdp2.py"),
    script("fsdp2_64", "FSDP2 alone, AdamW", 64, "fsdp2.py"),
    script("fsdp2_muon_8", "FSDP2 alone, `torch.optim.Muon`", 8, "fsdp2.py", "--optimizer", "muon"),
    script("fsdp2_compiled_8", "FSDP2 alone, compiled layers", 8, "fsdp2.py", "--compile"),
    script("fsdp2_float8_8", "FSDP2 alone, torchao float8", 8, "fsdp2.py", "--float8", environment="float8"),
    script("trainer_8", "Hugging Face Trainer, accelerate's FSDP2", 8, "trainer.py"),
    Row(
        "trainer_accelerate_8",
        "the same by `accelerate launch`",
        8,
        ["accelerate", "launch", "--num_processes", "8", "trainer.py"],
        device_memory=H100,
    ),
    script("zero3_8", "DeepSpeed ZeRO-3", 8, "zero3.py", environment="deepspeed"),
    Row(
        "zero3_deepspeed_8",
        "the same by `deepspeed`",
        8,
        ["deepspeed", "--num_gpus", "8", "zero3.py"],
        environment="deepspeed",
        device_memory=H100,
    ),
    script("megatron_8", "megatron-fsdp", 8, "megatron.py", environment="deepspeed"),
    titan("llama3", "llama3_8b", 8, "torchtitan llama3 8B", EAGER),
    titan("llama3", "llama3_8b", 64, "torchtitan llama3 8B", EAGER),
    titan("llama3", "llama3_8b", 8, "torchtitan llama3 8B, CUDA graphs (its default)", suffix="_graphs"),
    titan("llama3", "llama3_8b", 8, "torchtitan llama3 8B, compiled", EAGER, "--compile.enable", suffix="_compiled"),
    titan("deepseek_v3", "deepseek_v3_16b", 8, "torchtitan deepseek_v3 16B, EP 8"),
    titan("deepseek_v3", "deepseek_v3_16b", 64, "torchtitan deepseek_v3 16B, EP 8"),
    titan(
        "deepseek_v3", "deepseek_v3_16b", 32, "torchtitan deepseek_v3 16B, EP 32",
        "--parallelism.expert-parallel-degree", "32", suffix="_ep32",
    ),
    titan("qwen3", "qwen3_30b_a3b", 8, "torchtitan qwen3 30B-A3B", EAGER),
    titan(
        "qwen3", "qwen3_30b_a3b", 64, "torchtitan qwen3 30B-A3B, EP 8", EAGER, "--parallelism.expert-parallel-degree",
        "8", suffix="_ep8",
    ),
    # torchtitan#3434 (June 2026): forced balance, no overlap.
    titan(
        "graph_trainer.deepseek_v3", "graph_trainer_deepseek_v3_16b", 32,
        "torchtitan's graph trainer, deepseek_v3 16B, EP 32", "--parallelism.expert-parallel-degree", "32",
        "--debug.moe-force-load-balance", reserved_gib=54.01,
    ),
    titan(
        "graph_trainer.llama3", "graph_trainer_llama3_8b", 8, "torchtitan's graph trainer, llama3 8B, batch 2 x 4096",
        EAGER, "--training.seq-len", "4096", "--training.local-batch-size", "2",
    ),
    titan("titan_flex", "gpt_oss_20b", 8, "torchtitan gpt_oss 20B, flex attention", EAGER),
    titan("titan_flex", "gpt_oss_120b", 64, "torchtitan gpt_oss 120B, flex attention", EAGER),
]

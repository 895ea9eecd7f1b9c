# SPDX-License-Identifier: Apache-2.0
"""Rows of our own scripts, one for each framework, and of torchtitan's trainer by its own flags. {assets} is the folder
that assets.py makes."""

from dataclasses import replace

from rows import Row

H100 = "85024768000"  # 79.2 GiB
B200 = "191500000000"  # 178.3 GiB
H100_96 = "102005473280"  # 95 GiB


def launched(gpus: int, words: list[str]) -> list[str]:
    return ["torchrun", "--nnodes", str(-(-gpus // 8)), "--nproc_per_node", str(min(gpus, 8)), *words]


def script(name: str, title: str, gpus: int, *words: str, environment: str = "base") -> Row:
    return Row(name, title, gpus, launched(gpus, list(words)), environment=environment, device_memory=H100)


def titan(
    module: str, config: str, gpus: int, title: str, *flags: str, reserved_gib: float | None = None, suffix: str = "",
    device_memory: str = H100,
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
        environment="titan", device_memory=device_memory,
    )


def timed(row: Row, cluster: str, published_tokens: float, tokens: int) -> Row:
    """The row with the tokens/s of a GPU that its authors printed. tokens: of a step and GPU."""
    return replace(row, cluster=cluster, published_tokens=published_tokens, tokens=tokens)


EAGER = "--training.disable-cuda-graphs"
GRAPH = "torchtitan's graph trainer"
BATCH2 = ["--training.seq-len", "4096", "--training.local-batch-size", "2"]
EP32 = ["--parallelism.expert-parallel-degree", "32", "--debug.moe-force-load-balance"]
NO_GRAPH = ["--compile.disable-passes", "cudagraph_pass"]
TP8 = ["--parallelism.tensor-parallel-degree", "8"]

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
    # pytorch/ao, docs/source/workflows/training.md (March 2025).
    timed(
        titan(
            "llama3", "llama3_8b", 8, "torchtitan llama3 8B, compiled", EAGER, "--compile.enable", suffix="_compiled"
        ),
        "h100_sxm_8", 6150, 8192,
    ),
    # torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: H100 of 96 GB at 500 W.
    timed(
        titan(
            "llama3", "llama3_70b", 256, "torchtitan llama3 70B, TP 8 x FSDP 32, batch 16, compiled", EAGER,
            "--compile.enable", *TP8, "--training.local-batch-size", "16", suffix="_tp8", device_memory=H100_96,
        ),
        "h100_96_500w", 597.3, 16384,
    ),
    timed(
        titan(
            "llama3", "llama3_8b", 64, "torchtitan llama3 8B, TP 8 x FSDP 8, batch 12, async TP, compiled", EAGER,
            "--compile.enable", "--compile.enable-async-tensor-parallel", *TP8, "--training.local-batch-size", "12",
            suffix="_tp8_async", device_memory=H100_96,
        ),
        "h100_96_500w", 4809.4, 12288,
    ),
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
        "graph_trainer.deepseek_v3", "graph_trainer_deepseek_v3_16b", 32, f"{GRAPH}, deepseek_v3 16B, EP 32", *EP32,
        reserved_gib=54.01,
    ),
    titan(
        "graph_trainer.llama3", "graph_trainer_llama3_8b", 8, f"{GRAPH}, llama3 8B, batch 2 x 4096", EAGER, *BATCH2,
    ),
    # The same for a time: a CUDA graph's launch is one kernel of a recording.
    timed(
        titan(
            "graph_trainer.deepseek_v3", "graph_trainer_deepseek_v3_16b", 32,
            f"{GRAPH}, deepseek_v3 16B, EP 32, batch 4 x 4096", *EP32, *NO_GRAPH, suffix="_timed",
        ),
        "h100_sxm_64", 8086, 16384,
    ),
    # pytorch#179937 (April 2026): with gathers by copy engines, which gave 2.4 %.
    timed(
        titan(
            "graph_trainer.llama3", "graph_trainer_llama3_8b", 8, f"{GRAPH}, llama3 8B, batch 2 x 4096", EAGER, *BATCH2,
            *NO_GRAPH, suffix="_timed",
        ),
        "h100_sxm_8", 9593, 8192,
    ),
    # pytorch/ao, torchao/prototype/moe_training/README.md (January 2026).
    timed(
        Row(
            "titan_llama4_4", "torchtitan Llama 4 of 16 experts cut to two layers, EP 4, batch 8, compiled", 4,
            launched(
                4,
                [
                    "-m", "torchtitan.train", "--job.config-file",
                    "torchtitan/models/llama4/train_configs/llama4_17bx16e.toml",
                    "--experimental.custom-import", "llama4_cut", "--training.steps", "3", "--metrics.log-freq", "1",
                    "--model.hf-assets-path", "{assets}/tokenizer", "--training.dataset", "c4_test",
                    "--training.dataset-path", "{assets}/text", "--job.dump-folder", "{assets}/dump",
                    "--parallelism.tensor-parallel-degree", "1", "--parallelism.expert-parallel-degree", "4",
                    "--parallelism.expert-tensor-parallel-degree", "1", "--activation-checkpoint.mode", "none",
                    "--compile.enable",
                ],
            ),
            145.55, "reserved", repository="torchtitan", commit="a25dd8f88", environment="titan",
            device_memory=B200,
        ),
        "b200_8", 49381, 65536,
    ),
    # NeMo Automodel at 36044ad, docs/performance-summary.mdx (October 2025). Its kernels are CUDA extensions
    # (TransformerEngine): the same job by torchtitan's trainer.
    timed(
        titan(
            "llama3", "llama3_70b", 64, "Automodel's Llama 3 70B by torchtitan, CP 2 x FSDP 32, batch 1 x 4", EAGER,
            "--parallelism.tensor-parallel-degree", "1", "--parallelism.context-parallel-degree", "2",
            "--training.local-batch-size", "1", "--training.global-batch-size", "128", suffix="_cp2",
        ),
        "h100_sxm_64", 866.77, 16384,
    ),
    titan("titan_flex", "gpt_oss_20b", 8, "torchtitan gpt_oss 20B, flex attention", EAGER),
    titan("titan_flex", "gpt_oss_120b", 64, "torchtitan gpt_oss 120B, flex attention", EAGER),
]

# SPDX-License-Identifier: Apache-2.0
"""Rows of KempnerForge's four benchmark reports (benchmarks/*/*.md of that repository): their arguments, at the commit
that each report names.

The reports print `max_memory_allocated` of rank 0 over 2^30 as GB. Two arguments differ from theirs: three steps in
place of 20, and random tokens (their trainer's default) in place of a tokenized data set. A report's batch wins over
its script where they disagree.
"""

from dataclasses import replace

from rows import Row

SCALING, VALIDATION, DEFERRED, WRAPPED, PACKED = "01b461a", "601aba9", "bc775fe", "52c47c5", "2611fef"

QUIET = [
    "metrics.log_interval=1", "metrics.enable_wandb=false", "metrics.enable_tensorboard=false",
    "checkpoint.interval=99999", "train.max_steps=3",
]
LLAMA = ["model.n_kv_heads=8", "model.vocab_size=128256", "model.max_seq_len=4096", "model.rope_theta=500000.0"]
MODELS = {
    "7B": ["model.dim=4096", "model.n_layers=32", "model.n_heads=32", "model.ffn_dim_multiplier=1.3", *LLAMA],
    "13B": ["model.dim=5120", "model.n_layers=40", "model.n_heads=40", "model.ffn_dim_multiplier=1.3", *LLAMA],
    "70B": ["model.dim=8192", "model.n_layers=80", "model.n_heads=64", "model.ffn_hidden_dim=28672", *LLAMA],
}
# (micro-batch, micro-batches) of the report's table. Its script has (2, 4) for the first two rows: the table's is right
# for the first, the script's for the second.
BATCHES = {"7B": (4, 2), "13B": (4, 4), "70B": (2, 4)}
TRAIN = [
    "train.seed=42", "train.grad_clip_norm=1.0", "train.seq_len=4096", "optimizer.lr=3e-4", "optimizer.fused=true",
    "scheduler.warmup_steps=1",
]
EXPERTS = [
    "model.dim=2048", "model.n_layers=24", "model.n_heads=16", "model.n_kv_heads=4", "model.vocab_size=128256",
    "model.ffn_dim_multiplier=1.3", "model.max_seq_len=4096", "model.rope_theta=500000.0", "model.moe_top_k=2",
    "model.moe_frequency=1", "model.moe_router=softmax_topk", "model.moe_aux_loss_weight=0.01",
    "model.moe_capacity_factor=0.0",
]


def command(gpus: int, config: str, settings: list[str]) -> list[str]:
    return [
        "torchrun",
        f"--nproc_per_node={min(gpus, 4)}",
        "scripts/train.py",
        f"configs/train/{config}.toml",
        *(f"--{s}" for s in [*settings, *QUIET]),
    ]


def scaling(
    number: int,
    gpus: int,
    model: str,
    tensor: int,
    published_gib: float | None,
    *,
    batch: tuple[int, int] | None = None,
    compiled: bool = False,
) -> Row:
    """A row of mfu_scaling.md: FSDP over the GPUs that tensor parallelism leaves."""
    size, count = batch or BATCHES[model]
    settings = [
        *MODELS[model], *TRAIN, "train.activation_checkpointing=full", f"train.batch_size={size}",
        f"train.grad_accum_steps={count}", f"train.compile_model={str(compiled).lower()}", f"distributed.tp={tensor}",
        f"distributed.dp_shard={gpus // tensor}",
    ]
    shape = f"TP {tensor} x FSDP {gpus // tensor}" if tensor > 1 else f"FSDP {gpus}"
    name = f"scaling_{number:02}_batch{size}_" + ("compiled" if compiled else "eager")
    title = f"{model}, {shape}, batch {size} x {count}" + (", compiled" if compiled else "")
    return Row(
        name, title, gpus, command(gpus, "debug", settings), published_gib, repository="kempnerforge", commit=SCALING
    )


def validation(config: str, gpus: int, title: str, published_gib: float, *, compiled: bool | None = None) -> Row:
    """A row of config_validation.md: a file of configs/train."""
    settings = ["data.dataset_path=", "data.hf_dataset_name=", "data.num_workers=0"] + (
        [f"train.compile_model={str(compiled).lower()}"] if compiled is not None else []
    )
    name = f"validation_{config}" + {None: "", False: "_eager", True: "_compiled"}[compiled]
    return Row(
        name, title + (", compiled" if compiled else ""), gpus, command(gpus, config, settings), published_gib,
        repository="kempnerforge", commit=VALIDATION,
    )


def collapsed(experts: int) -> tuple[float, ...]:
    """Every token goes to the same two experts."""
    return (1.0, 1.0, *[0.0] * (experts - 2))


def packed(
    experts: int, expert_parallel: int, batch: int, is_packed: bool, published_gib: float, *, balanced: bool = False
) -> Row:
    """A row of moe_packed_benchmark.md: 8 GPUs, FSDP over those that expert parallelism leaves."""
    settings = [
        *EXPERTS, *TRAIN, f"model.num_experts={experts}", f"model.moe_packed_experts={str(is_packed).lower()}",
        f"train.batch_size={batch}", "train.grad_accum_steps=1", "train.compile_model=false",
        "train.mixed_precision=bf16", "train.activation_checkpointing=full", "distributed.tp=1",
        f"distributed.ep={expert_parallel}", f"distributed.dp_shard={8 // expert_parallel}",
    ]
    kind = "packed" if is_packed else "unpacked"
    title = (
        f"{experts} experts {kind}, FSDP {8 // expert_parallel}"
        + (f" x EP {expert_parallel}" if expert_parallel > 1 else "")
        + f", batch {batch}"
    )
    if balanced:
        title += ", balanced"
    name = f"packed_e{experts}_{kind}" + ("_balanced" if balanced else "")
    return Row(
        name, title, 8, command(8, "debug", settings), published_gib, repository="kempnerforge", commit=PACKED,
        routing=() if balanced else collapsed(experts),
        variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )


def expert_parallel(
    commit: str, batch: int, count: int, kept: str, published_gib: float, *, balanced: bool = False
) -> Row:
    """A row of moe_ep_benchmark.md: 32 GPUs, FSDP 4 x EP 2 x TP 4, before and after its change of what FSDP wraps."""
    settings = [
        *EXPERTS, *TRAIN, "model.num_experts=8", f"train.batch_size={batch}", f"train.grad_accum_steps={count}",
        "train.compile_model=false", "train.mixed_precision=bf16", f"train.activation_checkpointing={kept}",
        "distributed.tp=4", "distributed.ep=2", "distributed.dp_shard=4",
    ]
    wrapped = "units of attention and experts" if commit == WRAPPED else "experts in the root's unit"
    name = f"ep_{'wrapped' if commit == WRAPPED else 'deferred'}_b{batch}_{kept}" + ("_balanced" if balanced else "")
    title = f"{wrapped}, batch {batch} x {count}, {kept} recomputation" + (", balanced" if balanced else "")
    return Row(
        name, title, 32, command(32, "debug", settings), published_gib, repository="kempnerforge", commit=commit,
        routing=() if balanced else collapsed(8), variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )


def mfu_scaling() -> list[Row]:
    rows = []
    for number, gpus, model, tensor, gib in (
        (1, 1, "7B", 1, 80.7),
        (2, 2, "7B", 1, 62.4),
        (3, 2, "7B", 2, 57.8),
        (4, 4, "7B", 1, 61.1),
        (5, 4, "7B", 4, 39.4),
        (6, 4, "7B", 2, 45.9),
        (7, 8, "7B", 4, 32.7),
        (8, 8, "13B", 1, 88.5),
        (9, 8, "13B", 4, 45.1),
        (10, 16, "7B", 4, 29.4),
        (11, 16, "13B", 4, 39.2),
        (12, 32, "7B", 4, 27.6),
        (13, 32, "13B", 4, 36.3),
        (14, 32, "70B", 4, 93.2),
    ):
        batch = (2, 4) if number == 2 else None
        rows.append(scaling(number, gpus, model, tensor, gib, batch=batch))
        if number != 8:  # eager as published
            rows.append(scaling(number, gpus, model, tensor, gib, batch=batch, compiled=True))
    return [*rows, scaling(1, 1, "7B", 1, None, batch=(2, 4)), scaling(2, 2, "7B", 1, None, batch=(4, 2))]


# Tokens/s of one GPU in the reports' tables, and tokens of a step and GPU: its batch, micro-batches and sequence, over
# the GPUs that share a batch. The reports print more rows than these.
TOKENS = {
    "scaling_02_batch2_compiled": (9364.0, 32768), "scaling_04_batch4_compiled": (9745.8, 32768),
    "scaling_08_batch4_eager": (4425.6, 65536), "scaling_12_batch4_compiled": (4872.4, 8192),
    "scaling_14_batch2_compiled": (551.8, 8192), "validation_7b_compiled": (9714.5, 131072),
    "validation_7b_12gpu_tp4_compiled": (5587.1, 32768), "validation_7b_32gpu_fsdp_compiled": (9293.2, 65536),
    "validation_70b_32gpu_tp4_compiled": (555.3, 8192), "packed_e8_unpacked": (6065.1, 16384),
    "packed_e8_packed": (6371.5, 16384), "ep_deferred_b2_full": (443.8, 4096), "ep_deferred_b8_full": (656.2, 4096),
    "ep_wrapped_b12_full": (843.8, 6144), "validation_13b_32gpu_tp4_pp2": (1642.3, 8192),
    "validation_29b_32gpu_tp4_pp2": (709.0, 4096), "validation_70b_32gpu_tp4_pp4": (238.8, 1024),
}  # fmt: skip
CLUSTER = "h200_64_nodes_of_4"  # theirs: four H200 a node, NDR between

_PEAKS = [
    *mfu_scaling(),
    validation("debug", 4, "debug.toml: 20M, FSDP 4", 0.7),
    validation("hf_wikitext", 4, "hf_wikitext.toml: 77M, FSDP 4", 6.5, compiled=False),
    *(
        validation(config, gpus, f"{config}.toml: {shape}", gib, compiled=compiled)
        for config, gpus, shape, gib in (
            ("7b", 4, "7B, FSDP 4", 81.0),
            ("7b_12gpu_tp4", 12, "TP 4 x FSDP 3", 30.4),
            ("7b_32gpu_fsdp", 32, "FSDP 32", 51.3),
            ("70b_32gpu_tp4", 32, "TP 4 x FSDP 8", 93.2),
        )
        for compiled in (False, True)
    ),
    validation("13b_32gpu_tp4_pp2", 32, "13b_32gpu_tp4_pp2.toml: TP 4 x PP 2 x FSDP 4", 24.0),
    validation("29b_32gpu_tp4_pp2", 32, "29b_32gpu_tp4_pp2.toml: TP 4 x PP 2 x FSDP 4", 32.8),
    validation("70b_32gpu_tp4_pp4", 32, "70b_32gpu_tp4_pp4.toml: TP 4 x PP 4 x FSDP 2", 51.0),
    *(
        packed(experts, ep, batch, is_packed, gib)
        for experts, ep, batch, is_packed, gib in (
            (8, 1, 4, False, 50.2),
            (8, 1, 4, True, 49.8),
            (16, 1, 4, False, 71.9),
            (16, 1, 4, True, 70.7),
            (64, 4, 1, False, 127.5),
            (64, 4, 1, True, 127.9),
        )
    ),
    *(
        expert_parallel(commit, batch, count, kept, gib)
        for commit, batch, count, kept, gib in (
            (DEFERRED, 1, 8, "selective", 101.9),
            (DEFERRED, 2, 4, "full", 57.9),
            (DEFERRED, 8, 1, "full", 87.9),
            (DEFERRED, 12, 1, "full", 119.9),
            (WRAPPED, 8, 1, "full", 74.7),
            (WRAPPED, 12, 1, "full", 106.7),
        )
    ),
]
ROWS = [
    replace(row, cluster=CLUSTER, published_tokens=tokens[0], tokens=tokens[1])
    for row in _PEAKS
    for tokens in [TOKENS.get(row.name, (None, 0))]
]

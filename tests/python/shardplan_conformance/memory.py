# SPDX-License-Identifier: Apache-2.0
"""Compares the memory that shardplan computes with recordings of real FSDP2 steps, byte for byte.

A folder holds `model.py` and one JSON file per recorded case: its knobs, the model's sizes, and a `timeline` with the
allocated bytes by tag before and after every hook of every FSDP unit. Each case is done by the project's own path: the
tracer traces the model, `shardplan memory` plans it and gives bytes by category at the same points.

    PYTHONPATH=tools/python:tests/python python -m shardplan_conformance.memory
        DIR [--case NAME ...] [--shardplan PROGRAM]

Exit codes: 0 every case matches, 1 one differs, 2 usage, 3 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from shardplan import command, files
from shardplan.command import printable, printable_name
from shardplan_conformance import memory_cuda
from shardplan_conformance.memory_recording import BadRecording, is_allocator_case, read_cases
from shardplan_conformance.memory_strategy import strategy_of

EVENTS = {
    "step.begin": "step_begin",
    "pre_fwd.before": "pre_forward.before",
    "pre_fwd.after": "pre_forward.after",
    "post_fwd.before": "post_forward.before",
    "post_fwd.after": "post_forward.after",
    "fwd.end": "forward_end",
    "loss.end": "loss_end",
    "pre_bwd.before": "pre_backward.before",
    "pre_bwd.after": "pre_backward.after",
    "recompute.begin": "recompute.before",
    "recompute.end": "recompute.after",
    "post_bwd.before": "post_backward.before",
    "post_bwd.after": "post_backward.after",
    "bwd_final.before": "backward_end.before",
    "bwd_final.after": "backward_end.after",
    "bwd.end": "backward_returned",
    "opt.end": "optimizer_step_end",
    "zero_grad.end": "zero_grad_end",
    "gc.before": "step_end",
}
WITHOUT_UNIT = ("backward_end.before", "backward_end.after")

CATEGORIES = {
    "param_sharded": "param_sharded",
    "param_unsharded": "param_unsharded",
    "param_post_fwd_shard": "param_post_forward_shard",
    "ag_in_cast": "all_gather_input",
    "ag_out": "all_gather_output",
    "rs_in": "reduce_scatter_input",
    "rs_out": "reduce_scatter_output",
    "hsdp_partial_reduce": "partial_reduce_output",
    "grad_shard_cast": "reduce_scatter_output",
    "grad_unsharded": "grad_unsharded",
    "grad_unsharded_accum": "grad_unsharded_accumulated",
    "grad_sharded": "grad_sharded",
    "opt_state": "optimizer_state",
    "opt_temp": "optimizer_temp",
    "act_saved": "saved",
    "fwd_temp": "forward_temp",
    "fwd_output": "output",
    "loss_saved": "loss_saved",
    "loss_temp": "loss_temp",
    "recompute": "recompute",
    "bwd_temp": "backward_temp",
    "buffer": "buffer",
    "input": "input",
}


# ---- the model ----


def trace_key(case: dict) -> tuple:
    """Cases with equal keys have the same trace."""
    knobs = case["knobs"]
    names = ("impl", "seq", "batch", "attn", "norm", "tied", "loss", "del_logits")
    dtypes = {"fp32": ("float32", "float32"), "pure_bf16": ("bfloat16", "bfloat16")}
    dtype, param_dtype = dtypes.get(knobs["mp"], ("bfloat16", "float32"))
    return (
        tuple(sorted(case["model"].items())),
        *(knobs[name] for name in names),
        case.get("torch"),
        dtype,
        param_dtype,
    )


def _load(folder: Path):
    path = folder / "model.py"
    spec = importlib.util.spec_from_file_location("shardplan_memory_case_model", path)
    if spec is None or not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _hugging_face(sizes: dict):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=sizes["dim"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv_heads"],
            intermediate_size=sizes["ffn"],
            vocab_size=sizes["vocab"],
            max_position_embeddings=sizes["seq"],
            tie_word_embeddings=sizes["tied"],
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


@contextlib.contextmanager
def _without_masks() -> Iterator[None]:
    """transformers looks at the inputs to find that a causal mask needs no tensor; fake inputs have no values to look
    at."""
    import transformers.models.llama.modeling_llama as llama

    saved = llama.create_causal_mask
    llama.create_causal_mask = lambda *args, **kwargs: None
    try:
        yield
    finally:
        llama.create_causal_mask = saved


def trace_case(folder: Path, case: dict, output: Path) -> None:
    """Writes the trace of the case's model as the recording trained it: those of tensors have fake ones, on one
    device."""
    import torch
    import torch.nn.functional as functional

    from shardplan.tracer import document, session

    knobs = case["knobs"]
    sizes = {**knobs, **case["model"]}
    dtype, param_dtype = trace_key(case)[-2:]
    hugging_face = knobs["impl"] == "hf"

    def build():
        torch.set_default_dtype(session.DTYPES[param_dtype])
        try:
            model = _hugging_face(sizes) if hugging_face else _load(folder).Llama(sizes)
        finally:
            torch.set_default_dtype(torch.float32)
        shape = (knobs["batch"], knobs["seq"])
        tokens, labels = (torch.empty(shape, dtype=torch.long, device="cuda") for _ in range(2))

        def loss(found):
            logits = (found.logits if hugging_face else found).flatten(0, 1)
            return functional.cross_entropy(logits.float() if knobs["loss"] == "fp32" else logits, labels.flatten())

        inputs = {"input_ids": tokens, "use_cache": False} if hugging_face else (tokens,)
        return model, inputs, loss

    options = session.Options(
        dtype=dtype,
        param_dtype=param_dtype,
        keep_output=not knobs["del_logits"],
        kernels_of=case.get("torch", "") if is_allocator_case(case) else "fake",
    )
    with _without_masks() if hugging_face else contextlib.nullcontext():
        trace = session.trace_callable(build, str(folder / "model.py"), options)
    with files.replacing(output) as file:
        document.write(trace, file)


# ---- comparison ----


def _recorded_rows(case: dict) -> list[tuple[str, str, int, dict[str, int]]]:
    tags = case["timeline_columns"][4:]
    rows = []
    for _, event, unit, total, *values in case["timeline"]:
        if event not in EVENTS:
            continue
        name = EVENTS[event]
        unit = "" if name in WITHOUT_UNIT else "(root)" if unit == "root" else unit
        rows.append((name, unit, total, _by_category(dict(zip(tags, values)))))
    return rows


def _by_category(by_tag: dict[str, int]) -> dict[str, int]:
    """Bytes of a recording under our names; a tag without one keeps its own."""
    result: dict[str, int] = {}
    for tag, size in by_tag.items():
        if size:
            name = CATEGORIES.get(tag, tag)
            result[name] = result.get(name, 0) + size
    return result


def _named(categories: list[str], values: list[int]) -> dict[str, int]:
    return {name: size for name, size in zip(categories, values) if size}


def _difference(where: str, total: int, wanted: dict, found_total: int, found: dict) -> str | None:
    if total == found_total and wanted == found:
        return None
    names = [name for name in sorted({*wanted, *found}) if wanted.get(name, 0) != found.get(name, 0)]
    parts = ", ".join(f"{name} {found.get(name, 0)} instead of {wanted.get(name, 0)}" for name in names)
    return f"{where}: total {found_total} instead of {total} ({found_total - total:+d}): {parts}"


def _phase(recorded: str) -> str:
    last = recorded.split(".")[-1]
    return {"fwd": "forward", "bwd": "backward", "opt": "optimizer"}.get(last, last)


def _recorded_peaks(case: dict) -> list[dict]:
    """The peak of the second step. The autograd engine may add gradients in place on real tensors, never on the fake
    ones of a recording: where all sums in place have another peak, a real step has one of the two."""
    peak, in_place = case["peak"]["step2"], case.get("peak_engine_sums_in_place")
    if not in_place or in_place["step2"] == peak["total"]:
        return [peak]
    phase, unit, _, operator = in_place["step2_at"]
    by_tag = {tag: size for tag, size in in_place["step2_by_tag"].items() if size}
    return [peak, {"total": in_place["step2"], "by_tag": by_tag, "phase": phase, "unit": unit, "op": operator}]


def _peak_difference(case: dict, computed: dict) -> str | None:
    differences = [_difference_from(peak, computed) for peak in _recorded_peaks(case)]
    return None if None in differences else differences[0]


def _difference_from(peak: dict, computed: dict) -> str | None:
    ours = computed["peak"]
    found = _named(computed["categories"], ours["by_category"])
    difference = _difference("peak", peak["total"], _by_category(peak["by_tag"]), ours["total_bytes"], found)
    if difference is not None:
        return difference
    wanted = (_phase(peak["phase"]), "(root)" if peak["unit"] == "root" else peak["unit"])
    place = (ours["phase"], ours["unit"])
    if wanted != place:
        return f"peak: in the {' of '.join(place)} instead of the {' of '.join(wanted)}"
    operator = ".".join(peak["op"].split("|")[0].split(".")[:2])
    if ours["allocation"].startswith("aten.") and ours["allocation"].rstrip("_") != operator.rstrip("_"):
        return f"peak: at {ours['allocation']} instead of {operator}"
    return None


def first_difference(case: dict, computed: dict) -> str | None:
    """The first row, or the peak, at which `computed` (the rows of `shardplan memory --rows`) differs from the
    recording."""
    wanted, rows = _recorded_rows(case), computed["rows"]
    for index, (event, unit, total, by_category) in enumerate(wanted):
        where = f"row {index} ({event}{' ' if unit else ''}{unit})"
        if index >= len(rows):
            return f"{where}: there is no such row"
        row = rows[index]
        if (row["event"], row["unit"]) != (event, unit):
            return f"{where}: found {row['event']} {row['unit']}"
        found = _named(computed["categories"], row["by_category"])
        difference = _difference(where, total, by_category, row["total_bytes"], found)
        if difference is not None:
            return difference
    if len(rows) > len(wanted):
        row = rows[len(wanted)]
        return f"row {len(wanted)}: {row['event']} {row['unit']} is not in the recording"
    return _peak_difference(case, computed)


def compute(program: str, trace: Path, case: dict, folder: Path) -> dict:
    """The rows and the peak of a case from its trace. Files are written to `folder`."""
    strategy, rows = folder / "strategy.json", folder / "rows.json"
    files.write_text(strategy, json.dumps(strategy_of(case)))
    command = [program, "memory", str(trace), "--strategy", str(strategy), "--ranks", str(case["knobs"]["world"])]
    options = memory_cuda.options(case) if is_allocator_case(case) else ["--no-kernel-temporaries"]
    rows.unlink(missing_ok=True)  # those of the case before
    done = subprocess.run([*command, *options, "--rows", str(rows), "-q"], capture_output=True, text=True, check=False)
    out_of_memory = done.returncode == 1 and is_allocator_case(case) and rows.exists()  # which a recording may be, too
    if done.returncode != 0 and not out_of_memory:
        raise RuntimeError(done.stderr.strip() or f"{program} memory: exit code {done.returncode}")
    return json.loads(rows.read_text())


def run(folder: Path, program: str, names: list[str]) -> int:
    read = list(read_cases(folder, names))
    damaged = [case for case in read if isinstance(case, BadRecording)]
    cases = [case for case in read if not isinstance(case, BadRecording)]
    for error in damaged:  # they do not keep the others from being compared
        print(f"shardplan conformance: {error}", file=sys.stderr)
    if not read:
        print(f"shardplan conformance: {folder}: no recorded memory case", file=sys.stderr)
        return 3
    if any(case["knobs"]["impl"] != "hf" for case in cases) and not (folder / "model.py").is_file():
        print(f"shardplan conformance: {folder / 'model.py'}: no such file: the recordings' model", file=sys.stderr)
        return 3
    results: dict[str, str | None] = {}
    with files.scratch_folder() as made:
        trace, key = made / "trace.json", None
        for case in sorted(cases, key=lambda c: (repr(trace_key(c)), c["case"])):
            try:
                if trace_key(case) != key:
                    key = None
                    trace_case(folder, case, trace)
                    key = trace_key(case)
                compare = memory_cuda.first_difference if is_allocator_case(case) else first_difference
                results[case["case"]] = compare(case, compute(program, trace, case, made))
            except Exception as error:  # one case that cannot be run is one that does not match
                results[case["case"]] = f"{type(error).__name__}: {error}"
            found = results[case["case"]]
            print(printable(f"{printable_name(case['case'])}: {'matches' if found is None else found}"), flush=True)
    matched = sum(found is None for found in results.values())
    print(f"matched {matched} of {len(read)} cases")
    return 3 if damaged else 0 if matched == len(read) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shardplan_conformance.memory", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case (may be repeated)")
    parser.add_argument("--shardplan", default="shardplan", metavar="PROGRAM", help="the built command")
    arguments = parser.parse_args(argv)
    if not arguments.folder.is_dir():
        print(f"{arguments.folder}: no such folder", file=sys.stderr)
        return 3
    return run(arguments.folder, arguments.shardplan, arguments.case)


if __name__ == "__main__":
    command.run("shardplan_conformance.memory", main)

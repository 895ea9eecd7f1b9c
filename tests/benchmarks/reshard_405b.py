# SPDX-License-Identifier: Apache-2.0
"""How long `shardplan reshard` takes to plan and to verify the resharding of a model with Adam's state between world
sizes and policies.

    python3 tests/benchmarks/reshard_405b.py [--from 1024] [--to 768] [--config examples/models/llama-3.1-405b.json]

Prints wall seconds and the largest memory of the command, and the bytes that a rank is sent over what it holds. Cases:
fsdp2 to fsdp2, fsdp1 to fsdp2, fsdp2 to fsdp1, and fsdp2 over tensor parallelism of 8 to fsdp2. The bound that the task
has is 10 s. SHARDPLAN_BUILD names the build."""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
STATES = ("", "exp_avg", "exp_avg_sq")


def units_of(config: dict) -> list[list[tuple[str, list[int], int]]]:
    """Parameters of every unit: (name, shape, dimension that tensor parallelism cuts)."""
    hidden, middle, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv = hidden // heads * kv_heads
    units = [[("embed_tokens.weight", [vocabulary, hidden], 0)]]
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        units.append(
            [
                (f"{at}.self_attn.q_proj.weight", [hidden, hidden], 0),
                (f"{at}.self_attn.k_proj.weight", [kv, hidden], 0),
                (f"{at}.self_attn.v_proj.weight", [kv, hidden], 0),
                (f"{at}.self_attn.o_proj.weight", [hidden, hidden], 1),
                (f"{at}.mlp.gate_proj.weight", [middle, hidden], 0),
                (f"{at}.mlp.up_proj.weight", [middle, hidden], 0),
                (f"{at}.mlp.down_proj.weight", [hidden, middle], 1),
                (f"{at}.input_layernorm.weight", [hidden], -1),
                (f"{at}.post_attention_layernorm.weight", [hidden], -1),
            ]
        )
    units.append([("norm.weight", [hidden], -1), ("lm_head.weight", [vocabulary, hidden], 0)])
    return units


def layout(config: dict, ranks: int, kind: str, tensor_ranks: int = 1) -> dict:
    mesh = [{"name": "shard", "size": ranks // tensor_ranks}, {"name": "tensor", "size": tensor_ranks}]
    flats, tensors = [], []
    for state in STATES:
        for index, unit in enumerate(units_of(config)):
            offset, flat = 0, len(flats)
            for name, shape, cut in unit:
                tensor = {"name": f"state.{name}.{state}" if state else name, "dtype": "float32", "shape": shape}
                if kind == "flat":
                    tensor |= {"flat": flat, "flat_offset": offset}
                    numel = 1
                    for extent in shape:
                        numel *= extent
                    offset += numel
                else:
                    tensor["splits"] = (
                        [{"mesh_dims": ["tensor"], "tensor_dim": cut}] if cut >= 0 and tensor_ranks > 1 else []
                    )
                    tensor["splits"] += [{"mesh_dims": ["shard"], "tensor_dim": 0}]
                tensors.append(tensor)
            if kind == "flat":
                flats.append(
                    {
                        "name": f"{state}{index}", "dtype": "float32", "numel": -(-offset // ranks) * ranks,
                        "mesh_dims": ["shard"],
                    }
                )
    tensors += [
        {"name": f"state.{name}.step", "dtype": "float32", "shape": []}
        for unit in units_of(config)
        for name, _, _ in unit
    ]
    return {
        "schema": "shardplan.state_layout/1", "name": f"{kind} on {ranks}", "mesh": mesh, "flats": flats,
        "tensors": tensors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=int, default=1024)
    parser.add_argument("--to", dest="target", type=int, default=768)
    parser.add_argument("--config", type=pathlib.Path, default=ROOT / "examples/models/llama-3.1-405b.json")
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    program = pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build/dev")) / "bin/shardplan"
    cases = [
        ("per_parameter", 1, "per_parameter"),
        ("flat", 1, "per_parameter"),
        ("per_parameter", 1, "flat"),
        ("per_parameter", 8, "per_parameter"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for source, tensor_ranks, target in cases:
            paths = [pathlib.Path(folder, name) for name in ("source.json", "target.json", "plan.json")]
            paths[0].write_text(json.dumps(layout(config, arguments.source, source, tensor_ranks)))
            paths[1].write_text(json.dumps(layout(config, arguments.target, target)))
            begin = time.perf_counter()
            done = subprocess.run(
                [program, "reshard", paths[0], paths[1], "-q", "-o", paths[2]],
                capture_output=True,
                text=True,
                check=True,
            )
            seconds = time.perf_counter() - begin
            name = f"{source} on {arguments.source}" + (f" (tensor {tensor_ranks})" if tensor_ranks > 1 else "")
            size = paths[2].stat().st_size
            print(
                f"{name} -> {target} on {arguments.target}: {seconds:.2f} s, plan of {size / 1e6:.1f} MB; "
                f"{done.stdout.strip()}",
                flush=True,
            )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"largest memory of the command: {peak / 1024:.0f} MiB")


if __name__ == "__main__":
    main()

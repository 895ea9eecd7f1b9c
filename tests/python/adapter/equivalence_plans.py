# SPDX-License-Identifier: Apache-2.0
"""Plans for cases of equivalence.py: `python equivalence_plans.py CASES.pickle FOLDER` traces every model that occurs
once, and runs `shardplan plan` for every case. A process of its own (warm.py): the tracer must be there before
autograd's first backward.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import subprocess
import sys

from equivalence_models import ROOT, build, inputs_of, loss_of, register_forward_methods


# equivalence.py trains with them.
OPTIMIZERS = {"adamw": {"kind": "adamw"}, "sgd": {"kind": "sgd", "momentum": True}}


def trace_key(case) -> str:
    return json.dumps([case.model, case.arguments, case.groups, compute_dtype(case)], sort_keys=True, default=list)


def compute_dtype(case) -> str:
    """The trace's compute dtype. Kernels of the low precision make gradients of other dtypes only of the norms that the
    case names."""
    low = case.strategy.get("mixed_precision", {}).get("param_dtype") or case.arguments.get("dtype")
    return low if low and "norm" in case.arguments else "float32"


def trace(case) -> dict:
    """The trace of the case's model, with the forwards and backwards that its program names."""
    import shardplan.torch as sp
    from shardplan.tracer import record, session

    args, kwargs = inputs_of(case.model, 0)
    groups = [record.Group([record.Call(args, kwargs, grad) for grad in group], any(group)) for group in case.groups]
    model = build(case.model, case.arguments)
    register_forward_methods(model, sp.register_forward_method)
    return session.trace_groups(model, groups, loss_of, session.Options(dtype=compute_dtype(case)))


def cluster(folder: pathlib.Path, ranks: int) -> pathlib.Path:
    path = folder / f"cluster{ranks}.json"
    if not path.exists():
        document = json.loads((ROOT / "examples" / "train_gpt" / "cluster.json").read_text())
        document["ranks"] = document["ranks_per_node"] = ranks
        path.write_text(json.dumps(document))
    return path


def plan(case, trace_path: pathlib.Path, folder: pathlib.Path) -> str:
    """The plan's path, or what `shardplan plan` says against it."""
    strategy = folder / f"{case.name}.strategy.json"
    document = {
        "schema": "shardplan.strategy/1", "policy": "fsdp2", "optimizer": OPTIMIZERS[case.optimizer], **case.strategy,
    }
    strategy.write_text(json.dumps(document))
    output = folder / f"{case.name}.plan.json"
    command = [
        pathlib.Path(os.environ["SHARDPLAN_BUILD"], "bin", "shardplan"),
        *("plan", trace_path, "--cluster", cluster(folder, case.ranks), "--strategy", strategy, "-q", "-o", output),
    ]
    done = subprocess.run([str(part) for part in command], text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{case.name}: shardplan plan: exit code {done.returncode}\n{done.stderr}")
    return str(output)


def main(cases_file: str, folder_name: str) -> None:
    from shardplan.tracer import document

    folder = pathlib.Path(folder_name)
    traces: dict[str, pathlib.Path] = {}
    plans: dict[str, str] = {}
    for case in pickle.loads(pathlib.Path(cases_file).read_bytes()):
        key = trace_key(case)
        if key not in traces:
            traces[key] = folder / f"{case.model}{len(traces)}.trace.json"
            with open(traces[key], "w", encoding="utf-8") as file:
                document.write(trace(case), file)
        plans[case.name] = plan(case, traces[key], folder)
    (folder / "plans.json").write_text(json.dumps(plans))


def make_plans(cases: list, folder: pathlib.Path, build_folder: pathlib.Path) -> dict[str, str]:
    """Case name -> path of its plan."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    from adapter_workers import warm

    here = pathlib.Path(__file__).resolve()
    paths = [str(here.parent), str(ROOT / "tools" / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SHARDPLAN_BUILD": str(build_folder),
    }
    done = warm.run([here, folder / "cases.pickle", folder], env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"making plans failed:\n{done.stdout}\n{done.stderr}")
    return json.loads((folder / "plans.json").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])

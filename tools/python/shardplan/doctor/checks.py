# SPDX-License-Identifier: Apache-2.0
"""The checks of `shardplan doctor`. `python -m shardplan.doctor.checks NAME` runs one in a process of its own and
prints its finding."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from shardplan import building
from shardplan.installing import TORCH_RELEASES, has_torch, how_to_install, in_checkout

MARK = "shardplan.doctor: "
TRAINS = (
    "tools/build dev"
    if in_checkout()
    else "pip install 'shardplan[torch]' brings what compiles it; `shardplan doctor --build` says what is missing"
)
_RANKS = 2


@dataclasses.dataclass(frozen=True)
class Finding:
    state: str  # works, later (it is made when it is needed), missing (nothing is wrong, it is not there), broken
    found: str
    advice: str = ""  # what to do; "": nothing


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[], Finding] | None
    needed: bool  # to plan, simulate and train on CPU ranks
    advice: str  # where it does not even end
    of_torch: bool = False  # nothing to look for where torch is not installed


def _python() -> Finding:
    found = f"{platform.python_version()}, {sys.executable}"
    return Finding("works", found) if sys.version_info >= (3, 10) else Finding("broken", found, "Python 3.10 or later")


def _package() -> Finding:
    from shardplan import versions

    of, there = versions.__version__, versions.installed()
    others = [f"{name} {version} in {folder}" for name, version, folder in there if version.split("+")[0] != of]
    if others:
        return Finding(
            "broken",
            f"{of} is imported, and there is {', '.join(others)}",
            "one version alone: pip uninstall what is not wanted, or take its folder off PYTHONPATH",
        )
    return Finding(
        "works",
        ", ".join(
            [
                f"{of} in {os.path.dirname(versions.__file__)}",
                *(f"{name} {version}" for name, version, _ in there if name != "shardplan"),
            ]
        ),
    )


def _torch() -> Finding:
    if not has_torch():
        return Finding(
            "missing",
            "not installed",
            f"traces and training need it: {how_to_install('torch')}; SHARDPLAN_PYTHON names another interpreter",
        )
    try:
        import torch
    except ImportError as error:
        return Finding(
            "broken",
            f"cannot be imported: {error}",
            f"{how_to_install('torch')}; SHARDPLAN_PYTHON names another interpreter",
        )
    version = torch.__version__
    built = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", without CUDA"
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    lowest, highest = TORCH_RELEASES
    if not lowest <= release <= highest:
        supported = f"torch {'.'.join(map(str, lowest))} to {'.'.join(map(str, highest))}"
        return Finding(
            "broken", f"{version}{built}", f"{supported} is supported: others are not known to schedule as a plan says"
        )
    return Finding("works", f"{version}{built}")


def _module() -> Finding:
    if building.comes_with_sources() and importlib.util.find_spec("_shardplan") is None:
        try:
            if building.kept() is None:
                return Finding(
                    "later",
                    "not compiled yet for this torch",
                    "the first import does so, in a minute or two; `shardplan doctor --build` does so now",
                )
        except building.NotBuilt as error:
            return Finding("broken", str(error))
    try:
        from shardplan.torch._job.native import native
    except ImportError as error:
        return Finding("broken", str(error), TRAINS)
    return Finding("works", f"{native.__version__}, {native.__file__}")


def _gloo_rank(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    part, whole = torch.full((8,), float(rank)), torch.empty(8 * _RANKS)
    dist.all_gather_into_tensor(whole, part)
    dist.reduce_scatter_tensor(part, whole)
    if not torch.equal(part, torch.full((8,), float(_RANKS * rank))):
        raise SystemExit(f"rank {rank} has a wrong sum")
    dist.destroy_process_group()


def _gloo() -> Finding:
    """Ranks of their own, as a job has them."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardplan-doctor-") as folder:
        code = "import sys; from shardplan.doctor.checks import _gloo_rank; _gloo_rank(int(sys.argv[1]), sys.argv[2])"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), folder],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(_RANKS)
        ]
        said = [rank.communicate()[1] for rank in ranks]
    for rank, text in zip(ranks, said):
        if rank.returncode:
            last = text.strip().splitlines()[-1] if text.strip() else f"code {rank.returncode}"
            return Finding(
                "broken",
                last,
                "GLOO_SOCKET_IFNAME names the network interface that ranks of several machines reach each other by",
            )
    return Finding("works", f"an all-gather and a reduce-scatter on {_RANKS} ranks, {time.monotonic() - begin:.1f} s")


def _gpus() -> Finding:
    import torch

    if torch.version.cuda is None:
        return Finding("missing", "torch is built without CUDA", "plans are replayed on CPU ranks: --device cpu")
    if not torch.cuda.is_available():
        driver = (
            "no NVIDIA driver"
            if not os.path.exists("/proc/driver/nvidia/version")
            else "the driver does not fit this torch"
        )
        return Finding(
            "missing",
            f"none that torch can use: {driver}",
            "plans are replayed on CPU ranks (--device cpu), and clusters of GPUs are simulated all the same",
        )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    if product.sum().item() != 64**3:
        return Finding("broken", f"{', '.join(names)}: a product of matrices is wrong")
    return Finding("works", ", ".join(names))


def _nccl() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return Finding("missing", "torch is built without it", "ranks on GPUs need it")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if not torch.cuda.is_available():
        return Finding("missing", f"{version}, which needs a GPU")
    with tempfile.TemporaryDirectory(prefix="shardplan-doctor-") as folder:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
        tensor = torch.ones(8, device="cuda")
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        dist.destroy_process_group()
    return Finding("works", f"{version}, an all-reduce on one rank")


def _other_package(name: str, use: str) -> Callable[[], Finding]:
    def check() -> Finding:
        import importlib.metadata

        try:
            return Finding("works", f"{importlib.metadata.version(name)}: {use}")
        except importlib.metadata.PackageNotFoundError:
            return Finding("missing", "not installed", f"pip install {name}: {use}")

    return check


CHECKS = (
    Check("programs", None, True, "tools/build dev" if in_checkout() else "pip install --force-reinstall shardplan"),
    Check("package", _package, True, "pip install --force-reinstall shardplan"),
    Check("python", _python, True, "SHARDPLAN_PYTHON names another interpreter"),
    Check("torch", _torch, True, how_to_install("torch")),
    Check("shardplan.torch", _module, True, TRAINS, of_torch=True),
    Check("Gloo", _gloo, True, "CPU ranks need it", of_torch=True),
    Check("GPUs", _gpus, False, "the driver hangs: nvidia-smi says more", of_torch=True),
    Check("NCCL", _nccl, False, "NCCL_DEBUG=INFO says where it waits", of_torch=True),
    Check("transformers", _other_package("transformers", "traces from a Hugging Face config"), False, ""),
    Check("pyarrow", _other_package("pyarrow", "sweeps as Parquet files"), False, ""),
)


def main() -> int:
    check = next(check for check in CHECKS if check.name == sys.argv[1])
    try:
        finding = check.run()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
        finding = Finding("broken", f"{type(error).__name__}: {error}".splitlines()[0], check.advice)
    print(MARK + json.dumps(dataclasses.asdict(finding)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

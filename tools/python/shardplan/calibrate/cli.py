# SPDX-License-Identifier: Apache-2.0
"""The command `python -m shardplan.calibrate` (`shardplan calibrate`)."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from shardplan import files
from shardplan.calibrate import from_reports
from shardplan.calibrate.from_reports import DEFAULT_FIGURES
from shardplan.command import EXIT_ENVIRONMENT, ArgumentParser, NoCommand, file_name, printable, printable_name
from shardplan.installing import why_no_torch
from shardplan.runs.figures import FIGURES, named

_DESCRIPTION = """\
Measure the machine at hand, and write what was measured, or the cluster document that follows from it. A measurement \
that fails is noted
in the file, and the others go on."""
_EPILOG = """\
examples:
  shardplan calibrate --device cuda --measured h100.json            measure, and keep the measurements
  shardplan calibrate --from h100.json -o h100.cluster.json         a cluster document from them
  shardplan calibrate --device cpu --ranks 2 -o here.cluster.json   both, on two CPU ranks with Gloo
  shardplan calibrate --from measured.json --plan plan.json -o here.cluster.json     few figures, from a training's \
profile
  torchrun --nproc-per-node 8 -m shardplan.calibrate --measured node.json

exit codes: 0 done, 1 some measurements failed, 2 usage, 3 bad input, 4 environment"""


def parser() -> argparse.ArgumentParser:
    result = ArgumentParser(
        prog="shardplan calibrate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    result.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes to start on this machine (default: one for each GPU, 1 on a CPU); torchrun's, where it is used",
    )
    result.add_argument(
        "--seconds", type=float, default=200, metavar="S", help="time for all measurements (default: 200)"
    )
    result.add_argument(
        "--only", default="", metavar="NAMES", help="these measurements alone, of: " + ",".join(SECTIONS)
    )
    result.add_argument("--quick", action="store_true", help="few and small sizes: whether it works at all")
    result.add_argument(
        "--threads", type=int, metavar="N", help="of torch on a CPU rank (default: the cores divided by the ranks)"
    )
    result.add_argument("--measured", type=file_name, metavar="FILE", help="write the measurements")
    result.add_argument(
        "--from", dest="source", nargs="+", type=file_name, metavar="FILE",
        help="measure nothing: fit to these measurements, or to measured reports (import-profile)",
    )
    result.add_argument(
        "--plan", nargs="+", type=file_name, default=[], metavar="FILE",
        help="of measured reports: the plans that they were measured with",
    )
    result.add_argument(
        "--figures",
        type=lambda text: named(text, len(FIGURES)),
        metavar="NAME,...",
        help=f"of measured reports: what is fitted, of {', '.join(FIGURES)} (default: {','.join(DEFAULT_FIGURES)})",
    )
    result.add_argument(
        "--base",
        type=file_name,
        metavar="CLUSTER",
        help="take from this cluster what was not measured (default: nothing; for reports the plan's own cluster)",
    )
    result.add_argument("--name", help="of the cluster document")
    result.add_argument(
        "-o", "--output", type=file_name, metavar="FILE", help="write the cluster document; - for standard output"
    )
    return result


# Part of the time of each.
SECTIONS = {
    "host": 0.05,
    "matmul": 0.3,
    "attention": 0.1,
    "memory": 0.15,
    "optimizer": 0.05,
    "copies": 0.05,
    "collectives": 0.2,
    "issue": 0.05,
    "overlap": 0.05,
    "sustained": 0.05,
}
_OF_RANKS = {"collectives", "issue"}


def _function(name: str):
    from shardplan.calibrate import host, kernels, ranks

    return {
        "host": host.costs,
        "matmul": kernels.matmuls,
        "attention": kernels.attention,
        "memory": kernels.memory_bound,
        "optimizer": kernels.optimizers,
        "copies": kernels.host_copies,
        "collectives": ranks.collectives,
        "issue": ranks.issue_costs,
        "overlap": ranks.overlap,
        "sustained": kernels.sustained,
    }[name]


def _log(text: str) -> None:
    print(f"shardplan calibrate: {text}", file=sys.stderr, flush=True)


def main() -> int:
    options = parser().parse_args()
    if not options.measured and not options.output:
        parser().error("--measured or -o names what to write")
    unknown = [name for name in options.only.split(",") if name and name not in SECTIONS]
    if unknown:
        parser().error(f"--only: no such measurement {unknown[0]}, expected some of {','.join(SECTIONS)}")
    outputs = [path for path in (options.measured, options.output) if path]
    if len(outputs) == 2 and os.path.realpath(outputs[0]) == os.path.realpath(outputs[1]):
        parser().error(
            f"--measured and -o: two outputs are one file (found {printable_name(outputs[0])}, expected two)"
        )
    try:
        for path in outputs:
            files.check_output(path, [read for read in (*(options.source or []), *options.plan, options.base) if read])
    except files.OutputIsInput as error:
        _log(f"error: {printable_name(str(error))}")
        return 2
    except files.CannotWrite as error:
        _log(f"error: {printable_name(str(error))}")
        return EXIT_ENVIRONMENT
    try:
        return _measure_and_fit(options)
    except files.CannotWrite as error:
        _log(f"error: {printable_name(str(error))}")
        return EXIT_ENVIRONMENT


def _measure_and_fit(options: argparse.Namespace) -> int:
    if options.source:
        return _fit(options, None)
    if problem := why_no_torch():
        _log(f"error: {printable_name(problem)}")
        return EXIT_ENVIRONMENT
    measured = _measure_on_ranks(options)
    if measured is None:
        return 0 if int(os.environ.get("RANK", "0")) > 0 else EXIT_ENVIRONMENT
    if options.measured:
        files.write_text(options.measured, as_text(measured))
        _log(f"wrote {printable_name(options.measured)}")
    code = _fit(options, measured) if options.output else 0
    return code or int(bool(measured["failed"]))


def _fit(options: argparse.Namespace, measured: dict | None) -> int:
    from shardplan.calibrate import fit

    try:
        if measured is None:
            read = [(path, fit.document(path)) for path in options.source]
            if any(from_reports.is_report(document) for _, document in read):
                return _fit_to_reports(options, read)
            if len(read) > 1 or options.plan or options.figures:
                extra = read[1][0] if len(read) > 1 else "--plan" if options.plan else "--figures"
                raise fit.BadMeasurements(
                    f"{read[0][0]}: these are measurements of a machine, which are fitted alone (found {extra} "
                    "besides, expected one file and no more)"
                )
            measured = fit.checked(*read[0])
        files.write_text(options.output or "-", fit.cluster_text(measured, options.base, options.name))
    except fit.BadMeasurements as error:
        _log(f"error: {printable_name(str(error))}")
        return 3
    except NoCommand as error:
        _log(f"error: {printable_name(str(error))}")
        return EXIT_ENVIRONMENT
    return 0


def _fit_to_reports(options: argparse.Namespace, read: list[tuple[str, dict]]) -> int:
    from shardplan.calibrate import fit

    for path, document in read:
        if not from_reports.is_report(document):
            found = document.get("schema") if isinstance(document, dict) else type(document).__name__
            raise fit.BadMeasurements(
                f"{path}: no measured report (found {found!r} at /schema, expected {from_reports.REPORT_SCHEMA!r} as "
                "of the other files)"
            )
    text, table = from_reports.fitted(read, options.plan, options.base, options.figures, _log)
    if options.name:
        text = text.replace(f'"name": {json.dumps(json.loads(text)["name"])}', f'"name": {json.dumps(options.name)}', 1)
    files.write_text(options.output or "-", text)
    print(printable(table), end="", file=sys.stderr)
    return 0


def as_text(measured: dict) -> str:
    """A line for each measurement."""
    parts = []
    for key, value in measured.items():
        if isinstance(value, list) and value:
            rows = ",\n".join("    " + json.dumps(row) for row in value)
            parts.append(f'  {json.dumps(key)}: [\n{rows}\n  ]')
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _measure_on_ranks(options: argparse.Namespace) -> dict | None:
    """The measurements on rank 0; None on the others, and where there is no such device."""
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        _log("error: there is no GPU that torch can use (found none, expected one, or --device cpu)")
        return None
    started = "RANK" in os.environ
    ranks = (
        int(os.environ.get("WORLD_SIZE", "1"))
        if started
        else options.ranks or (torch.cuda.device_count() if device == "cuda" else 1)
    )
    if started:
        return _measure(options, device, int(os.environ["RANK"]), ranks)
    from shardplan.calibrate import ranks as processes

    with tempfile.TemporaryDirectory(prefix="shardplan-calibrate-") as folder:
        peers = []
        try:
            os.environ |= {"SHARDPLAN_CALIBRATE_STORE": folder}
            if ranks > 1:
                peers = processes.start_peers(ranks, sys.argv[1:], folder)
            return _measure(options, device, 0, ranks)
        finally:
            processes.end_peers(peers)


def _measure(options: argparse.Namespace, kind: str, rank: int, ranks: int) -> dict | None:
    import torch

    from shardplan.calibrate import ranks as processes
    from shardplan.calibrate.timing import Machine

    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", rank)) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // ranks))
    measured = {
        "schema": "shardplan.measured/1", "device": _describe(device), "ranks": ranks,
        "ranks_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
    }
    failed = []
    wanted = [name for name in SECTIONS if not options.only or name in options.only.split(",")]
    # One GPU alone has no peers to measure, but what issuing a collective takes it has.
    joined = ranks > 1 or (kind == "cuda" and "issue" in wanted)
    if joined:
        try:
            processes.join(device, rank, ranks)
        except Exception as error:  # noqa: BLE001
            failed.append({"what": "join", "error": _text(error)})
            joined = False
    for name in wanted:
        of_ranks = name in _OF_RANKS or (name == "overlap" and joined)
        if (name in _OF_RANKS and not joined) or (name == "collectives" and ranks == 1):
            continue
        if joined:
            torch.distributed.barrier()
        # Rank 0 measures a GPU of its own alone, the others wait for it. CPU ranks share cores, caches and memory: they
        # measure at once, as they train.
        if rank > 0 and not of_ranks and kind == "cuda":
            continue
        rows = measured.setdefault(name, [])
        share = SECTIONS[name] / sum(SECTIONS[n] for n in wanted)
        begin = time.monotonic()
        machine = Machine(device, options.seconds * share, samples=2 if options.quick else 5)
        try:
            for row in _function(name)(machine, not options.quick):
                rows.append(row)
        except Exception as error:  # noqa: BLE001
            failed.append({"what": name, "error": _text(error)})
        finally:
            if kind == "cuda":
                torch.cuda.empty_cache()
        if rank == 0:
            _log(
                f"{name}: {len(rows)} measurements in {time.monotonic() - begin:.1f} s"
                + (f", then {failed[-1]['error']}" if failed and failed[-1]["what"] == name else "")
            )
            if options.measured:  # what there is, in case the rest never ends
                files.write_text(options.measured, as_text(measured | {"failed": failed, "whole": False}))
    measured |= {"failed": failed, "whole": not failed}
    if joined:
        torch.distributed.destroy_process_group()
    return measured if rank == 0 else None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _describe(device) -> dict:
    import torch

    described = {"kind": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        described |= {
            "name": properties.name,
            "memory_bytes": total,
            "context_bytes": max(0, total - free - torch.cuda.memory_reserved(device)),
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "",
        }
        for name in ("clock_rate", "power_draw"):
            try:
                described[name] = getattr(torch.cuda, name)(device)
            except Exception:  # noqa: BLE001, PERF203 (needs pynvml)
                continue
    else:
        described |= {
            "name": _cpu_name(), "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "threads": torch.get_num_threads(),
        }
    return described


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

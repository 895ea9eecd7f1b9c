# SPDX-License-Identifier: Apache-2.0
"""`shardplan cost` of what nccl-tests prints: a printer here that follows src/util.cu and src/common.cu of 2.19.6 (and
of 2.10, whose head has no program, no version and no `root`), and what is read of it."""

import json
import random
import re
import subprocess
from pathlib import Path

import pytest
from conftest import build_folder

COMMAND = build_folder() / "bin" / "shardplan"
ROOT = Path(__file__).resolve().parents[3]
SEED = 7
H100 = "NVIDIA H100 80GB HBM3"
# Programs and the kinds of plans.
NAMES = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
    "sendrecv": "send",
}
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def number(value, width):
    """getFloatStr"""
    for form in (f"{value:.2f}", f"{value:.1f}", f"{value:.0f}"):
        if len(form) <= width:
            return form
    return f"{value:.1e}"


def body(kind, ranks, size, microseconds, wrong="0"):
    algorithm = size / 1e9 / (microseconds * 1e-6)
    part = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * part, "sendrecv": 1, "broadcast": 1, "reduce": 1}.get(kind, part)
    return f"  {number(microseconds, 7):>7}  {number(algorithm, 6):>6}  {number(algorithm * factor, 6):>6}  {wrong:>6}"


def devices(hosts, each=None, groups=None, device=H100):
    """A line a rank: `hosts` by rank."""
    each = each or {}
    lines = []
    for rank, host in enumerate(hosts):
        local = sum(other == host for other in hosts[:rank])
        group = f" Group {groups[rank] if groups else 0:2d}"
        lines.append(
            f"#  Rank {rank:2d}{each.get('group', group)} Pid {1000 + rank:6d} on {host:>10} device {local:2d} "
            f"[0000:{local:02x}:00] {device}\n"
        )
    return "".join(lines)


def run(kind, hosts, rows, named=True, groups=None, per_iteration=False, stamps=False, cputime=False, device=H100):
    """`rows`: (bytes, us out of place, us in place)."""
    ranks = groups.count(groups[0]) if groups else len(hosts)
    text = "# nccl-tests version 2.19.6 nccl-headers=23004 nccl-library=23004\n" if named else ""
    text += f"# Collective test starting: {kind}_perf\n" if named else ""
    text += (
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 17179869184 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0 unalign: 0\n#\n"
    )
    text += "# Using devices\n" + devices(hosts, groups=groups, device=device) + "#\n"
    more = ["i_min", "i_max", "i_p99", "i_cv%"] if per_iteration else []
    time = "cputime" if cputime else "time"
    text += (
        "#                                                              out-of-place                       in-place   "
        "       \n"
    )
    text += (
        "# "
        + "  ".join(["      size", "count", "type", "redop", "root", *([time, "algbw", "busbw", "#wrong", *more] * 2)])
        + (" timestamp" if stamps else "")
        + "\n"
    )
    text += (
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  "
        "(GB/s)       \n"
    )
    redop = "sum" if kind in REDUCTIONS else "none"
    tail = "     1.00     2.00     2.00     0.10" if per_iteration else ""
    for size, out, within in rows:
        text += (
            f"{size:12d}  {size // 4:12d}  {'float':>8}  {redop:>6}  "
            f"{0 if kind in ROOTED else -1:6d}{body(kind, ranks, size, out)}{tail}"
            f"{body(kind, ranks, size, within, 'N/A')}{tail}"
        )
        text += f"{'2026-11-28 03:04:05':>21}\n" if stamps else "\n"
    return (
        text
        + f"# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 100.1\n#\n"
        + (f"# Collective test concluded: {kind}_perf\n" if named else "")
    )


def old_run(kind, hosts, rows):
    """Output of 2.10: no program, no group, `redop` without `root`, blank where there is none."""
    text = (
        "# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1 "
        "\n#\n# Using devices\n"
    )
    text += devices(hosts, each={"group": ""}, device="NVIDIA A100-SXM4-80GB") + "#\n"
    text += (
        "#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error\n"
    )
    text += (
        "#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       \n"
    )
    redop = "sum" if kind in REDUCTIONS else ""
    for size, out, within in rows:
        text += (
            f"{size:12d}  {size // 4:12d}  {'float':>8}  "
            f"{redop:>6}{body(kind, len(hosts), size, out, '0e+00')}{body(kind, len(hosts), size, within, '0e+00')}\n"
        )
    return text


def cost(*arguments):
    return subprocess.run([COMMAND, "cost", *map(str, arguments)], capture_output=True, text=True)


def read(tmp_path, text, *arguments, name="job.log", cluster="h100_sxm_64"):
    """(kind, groups, ranks, bytes, ns) of each row."""
    (tmp_path / name).write_text(text)
    done = cost(tmp_path / name, "--cluster", cluster, *arguments)
    assert done.returncode == 0, done.stderr
    # The device's name has blanks; then six columns.
    pattern = re.compile(rf"^NVIDIA .*? ({'|'.join(NAMES.values())}) +(\d+) +(\d+) +(\d+) +(\d+) ", re.M)
    return [(kind, *map(int, rest)) for kind, *rest in pattern.findall(done.stdout)]


def random_rows(noise, least=1 << 16):
    sizes = [least << power for power in range(8)]
    return [(size, noise.uniform(50, 40_000), noise.uniform(50, 40_000)) for size in sizes]


def expected(kind, ranks, rows, column=1, groups=1):
    return [(NAMES[kind], groups, ranks, row[0], round(float(number(row[column], 7)) * 1e3)) for row in rows]


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("ranks", [(2, 1), (8, 1), (16, 2), (32, 4)])
def test_every_kind_is_read_as_it_is_printed(tmp_path, kind, ranks):
    count, nodes = ranks
    rows = random_rows(random.Random(f"{SEED} {kind} {count}"))
    hosts = [f"node-{rank * nodes // count}" for rank in range(count)]
    text = run(kind, hosts, rows)
    assert read(tmp_path, text) == expected(kind, count, rows), f"seed {SEED}"
    assert read(tmp_path, text, "--in-place") == expected(kind, count, rows, 2)
    for more in ({"per_iteration": True}, {"stamps": True}, {"stamps": True, "per_iteration": True}):
        assert read(tmp_path, run(kind, hosts, rows, **more), "--in-place") == expected(kind, count, rows, 2), more


def test_several_runs_in_one_file_under_a_launcher(tmp_path):
    noise = random.Random(SEED)
    parts, rows = [], []
    for kind, hosts in (("all_gather", ["a"] * 8), ("alltoall", ["a"] * 4 + ["b"] * 4), ("all_reduce", ["a"] * 4)):
        made = random_rows(noise)
        rows += expected(kind, len(hosts), made)
        parts += [run(kind, hosts, made)]
    assert read(tmp_path, "".join(parts)) == rows
    # The program by the echo of a command line; NCCL's own lines between; tags of mpirun and srun.
    unnamed = run("all_gather", ["a"] * 8, random_rows(random.Random(1)), named=False)
    echoed = f"+ mpirun -np 8 ./build/all_gather_perf -b 64K\nnode:1:1 [0] NCCL INFO comm 0x1 done\n\n{unnamed}\n"
    assert len(read(tmp_path, echoed)) == 8
    for tag in ("[1,0]<stdout>:", "0: ", " 3: "):
        tagged = "".join(tag + line for line in echoed.splitlines(keepends=True))
        assert read(tmp_path, tagged) == read(tmp_path, echoed), tag
    # A run that does not say its kind does not have that of the first run.
    (tmp_path / "two.log").write_text(parts[2] + unnamed)
    done = cost(tmp_path / "two.log", "--cluster", "h100_sxm_64")
    assert done.returncode == 3 and "--collective" in done.stderr


def test_the_kind_by_flag_by_reductions_and_by_the_files_name(tmp_path):
    rows = random_rows(random.Random(SEED), 1 << 24)
    gather = run("all_gather", ["a"] * 8, rows, named=False)
    assert read(tmp_path, gather, "--collective", "all_gather") == expected("all_gather", 8, rows)
    assert read(tmp_path, gather, name="all_gather_8.txt") == expected("all_gather", 8, rows)
    for kind in REDUCTIONS:
        assert read(tmp_path, run(kind, ["a"] * 8, rows, named=False)) == expected(kind, 8, rows)
    for kind in ("all_reduce", "reduce_scatter"):
        assert read(tmp_path, old_run(kind, ["a"] * 8, rows)) == expected(kind, 8, rows)
    assert read(tmp_path, old_run("all_gather", ["a"] * 8, rows), "--collective", "all_gather") == expected(
        "all_gather", 8, rows
    )
    # The bandwidths are not those of what the flag says.
    for kind, wrong in (
        ("all_gather", "all_reduce"),
        ("all_reduce", "all_gather"),
        ("sendrecv", "reduce_scatter"),
        ("gather", "broadcast"),
    ):
        (tmp_path / "w.log").write_text(run(kind, ["a"] * 8, rows, named=False))
        done = cost(tmp_path / "w.log", "--cluster", "h100_sxm_64", "--collective", wrong)
        assert done.returncode == 3 and "busbw" in done.stderr, (kind, wrong)


def test_a_list_of_devices_that_was_cut_is_completed_by_the_bandwidths(tmp_path):
    rows = [(1 << 24, 1000.0, 1000.0), (1 << 28, 2400.0, 2400.0), (1 << 30, 6800.0, 6800.0)]
    whole = run("all_reduce", ["a"] * 8 + ["b"] * 8, rows)
    lines = whole.splitlines(keepends=True)
    cut = "".join(line for line in lines if "Rank" not in line or " 0 Group" in line or " 8 Group" in line)
    assert read(tmp_path, cut) == read(tmp_path, whole) == expected("all_reduce", 16, rows)
    fits = []
    for text in (whole, cut):
        (tmp_path / "t.log").write_text(text)
        assert cost(tmp_path / "t.log", "--fit", "h100_sxm_64", "-o", tmp_path / "out.json", "-q").returncode == 0
        fits.append((tmp_path / "out.json").read_text())
    assert fits[0] == fits[1]
    table = json.loads(fits[0])["collectives"][-1]
    assert (table["kind"], table["ranks"], table["nodes"], table["link"]) == ("all_reduce", 16, 2, "network")
    # A sendrecv's do not tell.
    cut = "".join(
        line
        for line in run("sendrecv", ["a"] * 8, rows).splitlines(keepends=True)
        if "Rank" not in line or "Rank  5" in line
    )
    (tmp_path / "s.log").write_text(cut)
    done = cost(tmp_path / "s.log", "--cluster", "h100_sxm_64")
    assert done.returncode == 3 and "not whole" in done.stderr


def test_groups_at_once(tmp_path):
    """NCCL_TESTS_SPLIT: ranks of a colour are a communicator."""
    rows = random_rows(random.Random(SEED), 1 << 24)
    halves = run("all_gather", ["a"] * 8, rows, groups=[0] * 4 + [1] * 4)
    assert read(tmp_path, halves) == expected("all_gather", 4, rows, groups=2)
    across = run("all_reduce", ["a"] * 8 + ["b"] * 8, rows, groups=[rank % 8 for rank in range(16)])
    assert read(tmp_path, across) == expected("all_reduce", 2, rows, groups=8)
    (tmp_path / "a.log").write_text(across)
    assert cost(tmp_path / "a.log", "--fit", "h100_sxm_64", "-o", tmp_path / "out.json", "-q").returncode == 0
    table = json.loads((tmp_path / "out.json").read_text())["collectives"][-1]
    assert (table["ranks"], table["nodes"], table["concurrent_groups"], table["link"]) == (2, 2, 8, "network")


@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind not in ("all_gather", "reduce_scatter", "all_reduce")])
def test_every_kind_has_a_table_that_answers_for_it(tmp_path, kind):
    base = json.loads((ROOT / "tools/clusters/h100_sxm_64.json").read_text())
    rows = [(1 << power, 10.0 + (1 << power) / 1e5, 1.0) for power in range(24, 30)]
    for ranks, nodes in ((8, 1), (16, 2)):
        (tmp_path / "t.log").write_text(run(kind, [f"n{rank * nodes // ranks}" for rank in range(ranks)], rows))
        done = cost(tmp_path / "t.log", "--fit", "h100_sxm_64", "-o", tmp_path / "out.json")
        assert done.returncode == 0 and "passed over" not in done.stdout, done.stderr
        document = json.loads((tmp_path / "out.json").read_text())
        table = document["collectives"][-1]
        assert (table["kind"], table["ranks"], table.get("nodes", 1)) == (NAMES[kind], ranks, nodes)
        assert document["links"] == base["links"]
        told = cost(tmp_path / "t.log", "--cluster", tmp_path / "out.json").stdout
        assert told.count(f"measured {ranks} ranks") == len(rows) and "median   0.00 %" in told, told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (run("hypercube", ["a"] * 2, [(1 << 24, 9.0, 9.0)]), ["hypercube", "all_gather"]),
        (run("alltoallv", ["a"] * 2, [(1 << 24, 9.0, 9.0)]), ["alltoallv", "alltoall"]),
        (run("all_reduce", ["a"] * 2, [(1 << 24, 9.0, 9.0)], cputime=True), ["cputime"]),
        (run("all_reduce", ["a"] * 2, []), ["no rows"]),
        (re.sub("     0(?= )", "     3", run("all_reduce", ["a"] * 2, [(1 << 24, 9.0, 9.0)]), count=1), ["wrong", "3"]),
        (run("all_reduce", [], [(1 << 24, 9.0, 9.0)], groups=[0, 0]).replace("Using", "Us"), ["Rank"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(tmp_path, text, words):
    (tmp_path / "t.log").write_text(text)
    done = cost(tmp_path / "t.log", "--cluster", "h100_sxm_64")
    assert done.returncode == 3, done.stdout
    for word in words:
        assert word in done.stderr


def test_mutilated_texts_never_end_in_a_crash(tmp_path):
    noise = random.Random(SEED)
    whole = run("all_reduce", ["a"] * 8, random_rows(noise)) + old_run("all_gather", ["a"] * 8, random_rows(noise))
    for trial in range(150):
        text = list(whole)
        for _ in range(noise.randint(1, 12)):
            place = noise.randrange(len(text))
            if noise.random() < 0.5:
                text[place] = noise.choice("0159 .#-e\n%")
            else:
                del text[place : place + noise.randint(1, 80)]
        (tmp_path / "t.log").write_text("".join(text))
        done = cost(tmp_path / "t.log", "--cluster", "h100_sxm_64", "--collective", "all_gather")
        assert done.returncode in (0, 3), f"seed {SEED}, trial {trial}: {done.returncode} {done.stderr}"

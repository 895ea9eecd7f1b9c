# SPDX-License-Identifier: Apache-2.0
"""docs/reference/rules.md: for each rule of the verifier a plan of examples/three_layers that breaks it, the lines that
mend it, and what `shardplan validate` says.

    .venv/bin/python dev/rule_examples.py [--check]      --check: exit code 1 where the page differs; writes nothing
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "rules.md"
THREE = ROOT / "examples" / "three_layers"
PROGRAM = pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build" / "dev")) / "bin" / "shardplan"


@dataclasses.dataclass(frozen=True)
class Example:
    rule: str
    what: str  # the mistake
    line: str  # a part of the line that is changed: the first one of the steady step, or of the tables
    do: str  # "remove", "repeat", "move" (in front of `to`), "replace" (`line` by `to`)
    to: str = ""
    everywhere: bool = False  # in the first step, too
    flags: tuple[str, ...] = ()  # of the plan
    rank: bool = False  # the mistake is in the plan of rank 1 alone


EXAMPLES = (
    Example(
        "reference",
        "A copy writes into a buffer of another role.",
        "copy_out layers.0.all_gather_output -> layers.0.param_unsharded",
        "replace",
        "copy_out layers.0.all_gather_output -> layers.0.grad_unsharded",
    ),
    Example(
        "use_before_unshard",
        "The modules are not bound to the gathered parameters.",
        "bind_unsharded layers.1.param_unsharded",
        "remove",
    ),
    Example(
        "read_before_write",
        "The compute stream does not wait for the all_gather.",
        "wait layers.1.all_gather on compute",
        "remove",
    ),
    Example(
        "use_unallocated",
        "A buffer is allocated behind its first use.",
        "copy_out layers.0.all_gather_output -> layers.0.param_unsharded",
        "move",
        "allocate layers.0.param_unsharded",
    ),
    Example(
        "use_after_free",
        "Parameters are freed before the layer computes.",
        "free layers.0.param_unsharded on compute",
        "move",
        'compute "forward layers.0"',
    ),
    Example("double_free", "A buffer is freed twice.", "free optimizer.temp", "repeat"),
    Example("double_allocate", "A buffer is allocated twice.", "allocate optimizer.temp", "repeat"),
    Example(
        "free_before_last_use",
        "The stream that frees does not wait for the one that reads.",
        "wait layers.0.copy_out on all_gather_copy_in",
        "remove",
    ),
    Example("leak", "Nobody frees a buffer.", "free optimizer.temp", "remove"),
    Example(
        "write_race",
        "The gather for the backward begins before the forward is done with the buffer's memory.",
        "copy_in layers.2.param_sharded -> layers.2.all_gather_output",
        "move",
        "wait layers.2.all_gather on compute",
    ),
    Example(
        "grad_not_reduced",
        "The gradient is freed before it is copied to where it is reduced.",
        "grad_copy_in layers.0.grad_unsharded -> layers.0.reduce_scatter_input",
        "move-behind",
        "free layers.0.grad_unsharded",
    ),
    Example(
        "grad_division",
        "A sum where the strategy asks for an average.",
        "layers.0.reduce_scatter_output op=average",
        "replace",
        "layers.0.reduce_scatter_output op=sum",
    ),
    Example(
        "wait_before_record",
        "Nothing records the event that a stream waits for.",
        "record layers.0.post_reduce on reduce_scatter",
        "remove",
        everywhere=True,
    ),
    Example(
        "deadlock",
        "Rank 1 issues two gathers of a stream in the other order, and each is on a communicator of its own.",
        "-> layers.1.all_gather_output on all_gather via post_forward", "move",
        "-> layers.2.all_gather_output on all_gather via shard", flags=("--ranks", "4", "--reshard-after-forward", "2"),
        rank=True,
    ),
    Example(
        "collective_order", "Rank 1 reduces before it gathers, rank 0 the other way round, on one communicator.",
        "reduce_scatter layers.2.reduce_scatter_input ->", "move",
        "-> layers.1.all_gather_output on all_gather via shard", flags=("--ranks", "2"), rank=True,
    ),
    Example(
        "steady_state",
        "The step ends without a shard that it began with.",
        "free optimizer.temp on compute",
        "replace",
        "free layers.0.param_sharded on compute",
    ),
    Example(
        "layout",
        "A buffer is half as large as the shard of its unit.",
        '"layers.0.reduce_scatter_output", "role": "reduce_scatter_output", "unit": "layers.0", "dtype": "bfloat16", '
        '"parts_bytes": [4194304]',
        "replace",
        '"layers.0.reduce_scatter_output", "role": "reduce_scatter_output", "unit": "layers.0", "dtype": "bfloat16", '
        '"parts_bytes": [2097152]',
    ),
    Example(
        "wrong_value", "Pieces of the smaller mesh are gathered over all ranks.",
        "-> layers.1.all_gather_output on all_gather via post_forward", "replace",
        "-> layers.1.all_gather_output on all_gather via shard", flags=("--reshard-after-forward", "4"),
    ),
    Example("compute_order", "A backward runs twice.", 'compute "backward layers.0"', "repeat"),
    Example(
        "optimizer_step",
        "The optimizer steps before its temporaries are there.",
        "optimizer_step on compute",
        "move",
        "allocate optimizer.temp",
    ),
    Example(
        "tables",
        "The mesh has other ranks than the world.",
        '"mesh": [{"name": "shard", "size": 8}]',
        "replace",
        '"mesh": [{"name": "shard", "size": 4}]',
    ),
)


def shardplan(*arguments: object) -> str:
    """The output of the command."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(
            f"rule_examples: shardplan {' '.join(map(str, arguments))}: exit code "
            f"{done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def places(example: Example, lines: list[str]) -> list[int]:
    """Places of the changed line, the last first: a change moves those behind it."""
    steady = next(i for i, line in enumerate(lines) if line.startswith("step steady"))
    found = [i for i, line in enumerate(lines) if example.line in line]
    late = [i for i in found if i > steady] or found
    if not late:
        sys.exit(f"rule_examples: {example.rule}: no line has {example.line!r}")
    early = [i for i in found if i < steady]
    return [late[0], *(early[:1] if example.everywhere else [])]


def broken(example: Example, lines: list[str]) -> list[str]:
    made = list(lines)
    for at in places(example, lines):
        if example.do == "remove":
            del made[at]
        elif example.do == "repeat":
            made.insert(at, made[at])
        elif example.do == "replace":
            made[at] = made[at].replace(example.line, example.to, 1)
        else:
            line = made.pop(at)
            behind = example.do == "move-behind"
            steps = range(at, len(made)) if behind else range(at - 1, -1, -1)
            there = next(i for i in steps if example.to in made[i])
            made.insert(there + behind, line)
    return made


def shown(lines: list[str], marks: set[int], sign: str) -> list[str]:
    """The marked lines, and what is around them."""
    near = sorted({i for mark in marks for i in range(mark - 1, mark + 2) if 0 <= i < len(lines)})
    out = []
    for before, i in zip([None, *near], near):
        if before is not None and i > before + 1:
            out.append("  ...")
        text = re.sub(r'"(digests|passes)": \{[^}]*\}, ', "", lines[i])
        out.append((sign if i in marks else " ") + text)
    return out


def marked(example: Example, lines: list[str], wrong: list[str]) -> tuple[set[int], set[int]]:
    """Lines of the right and of the wrong plan that differ, in the steady step or the tables."""
    first = places(example, lines)[0]
    right_marks: set[int] = set()
    wrong_marks: set[int] = set()
    for kind, a, b, c, d in difflib.SequenceMatcher(None, lines, wrong, autojunk=False).get_opcodes():
        if kind != "equal" and (not example.everywhere or b >= first - 3):
            right_marks |= set(range(a, b))
            wrong_marks |= set(range(c, d))
    return right_marks, wrong_marks


def verdict(example: Example, lines: list[str], wrong: list[str], folder: pathlib.Path, ranks: int) -> str:
    """The first violation of the rule, as the command says it."""
    if example.rank:
        files = []
        for rank in range(ranks):
            files.append(folder / f"rank{rank}.txt")
            files[-1].write_text("\n".join(wrong if rank == 1 else lines) + "\n")
        text = shardplan("validate", "--ranks-apart", *files)
    else:
        path = folder / "plan.txt"
        path.write_text("\n".join(wrong) + "\n")
        text = shardplan("validate", path)
    text = "\n".join(line for line in text.replace(f"{folder}/", "").splitlines() if ": plan of " not in line)
    blocks = re.split(r"\n\s*\n", text.strip())
    violations = [block for block in blocks if re.match(r"(plan\.txt: |rank\d+\.txt: )*[a-z_]+: ", block)]
    own = [block for block in violations if re.match(rf"(plan\.txt: |rank\d+\.txt: )*{example.rule}: ", block)]
    if not own:
        sys.exit(f"rule_examples: {example.rule}: the verifier says\n{text}")
    return re.sub(r"^(plan\.txt: |rank\d+\.txt: )+", "", own[0])


def section(example: Example, folder: pathlib.Path) -> str:
    plan = folder / "plan.json"
    ranks = int(example.flags[1]) if example.flags[:1] == ("--ranks",) else 8
    cluster = ("h100_sxm_8",) if example.rank else (THREE / "cluster.json",)
    shardplan(
        "plan", THREE / "trace.json", "--cluster", *cluster, "--unit", "layers.*", "--optimizer", "adamw",
        *example.flags, "-q", "-o", plan,
    )
    lines = shardplan("show", plan).splitlines()
    wrong = broken(example, lines)
    right_marks, wrong_marks = marked(example, lines, wrong)
    flags = f" The plan has `{' '.join(example.flags)}`." if example.flags else ""
    text = (
        f"\n## {example.rule}\n{example.what}{flags} [The "
        f"rule](verifier.md#{ANCHORS[example.rule]})\n\nWrong:\n```diff\n"
    )
    text += "\n".join(
        shown(
            wrong,
            wrong_marks or {i for mark in right_marks for i in (min(mark, len(wrong) - 1),)},
            "-" if wrong_marks else " ",
        )
    )
    text += "\n```\nMended:\n```diff\n" + "\n".join(
        shown(lines, right_marks or {min(wrong_marks)}, "+" if right_marks else " ")
    )
    return text + f"\n```\nThe verifier:\n```\n{verdict(example, lines, wrong, folder, ranks)}\n```\n"


def anchors() -> dict[str, str]:
    """By rule, of the section of verifier.md that has it."""
    found = {}
    for heading in re.findall(r"^### (.*)$", (ROOT / "docs" / "reference" / "verifier.md").read_text(), re.M):
        slug = re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")
        found |= {name.strip(): slug for name in heading.split(",")}
    return found


ANCHORS = anchors()


def page() -> str:
    text = """# Rules by example

Each rule of the [verifier](verifier.md) with a plan that breaks it: FSDP2's plan of `examples/three_layers`, with \
one mistake in the step that repeats. Lines with a minus are wrong, lines with a plus
mend them. `dev/rule_examples.py` makes this page, and a test holds it to what the verifier says.
"""
    with tempfile.TemporaryDirectory() as folder:
        for example in EXAMPLES:
            text += section(example, pathlib.Path(folder))
    return text


if __name__ == "__main__":
    made = page()
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text() != made)
    PAGE.write_text(made)

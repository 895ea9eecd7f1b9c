# SPDX-License-Identifier: Apache-2.0
"""Golden plans, and the documents made of them (README.md)."""

import json
import pathlib
import re
import subprocess
import tempfile
from dataclasses import dataclass

GOLDENS = pathlib.Path(__file__).parent
ROOT = GOLDENS.parents[2]
# Lines of a difference that say in other words what the rest says. Instructions on demand follow from the units; the
# verifier checks them.
BESIDE_THE_POINT = re.compile(
    r"procedure |.*[.]on_demand|plan (digests|cluster|mesh|world_size)|cluster |segment |strategy |(unit|buffer) .* "
    r"parameters: "
)
POLICIES = {"fsdp2": "FSDP2", "fsdp1": "FSDP1"}


@dataclass
class Golden:
    policy: str
    folder: pathlib.Path

    @property
    def name(self) -> str:
        return f"{self.policy}/{self.folder.name}"

    @property
    def strategy(self) -> dict:
        return json.loads((self.folder / "strategy.json").read_text())

    @property
    def knob(self) -> dict:
        return self.strategy["extensions"]["knob"]

    @property
    def expected(self) -> pathlib.Path:
        return self.folder / "difference.txt"


def rows(policy: str) -> list[str]:
    """The lines of the policy's cases.txt: names of folders, and headings."""
    return [row for row in (GOLDENS / policy / "cases.txt").read_text().splitlines() if row]


def goldens(policy: str) -> list[Golden]:
    return [Golden(policy, GOLDENS / policy / row) for row in rows(policy) if not row.startswith("#")]


def run(program: pathlib.Path, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=60)


def difference(golden: Golden, program: pathlib.Path) -> str:
    """The expected difference.txt: the plan's difference to the base's plan and the verifier's verdict, or the
    refusal."""
    knob = golden.knob
    trace, ranks = knob.get("trace", "small"), knob.get("ranks", 2)
    base = GOLDENS / golden.policy / knob.get("base", "base.json")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)

        def plan(name: str, strategy: pathlib.Path, trace: str, ranks: int) -> subprocess.CompletedProcess:
            device = {"name": "any", "memory_bytes": 1 << 30}
            cluster = {"schema": "shardplan.cluster/1", "name": "any", "ranks": ranks, "device": device}
            (out / "cluster.json").write_text(json.dumps(cluster))
            options = ["--cluster", out / "cluster.json", "--strategy", strategy, "-q", "-o", out / name]
            return run(program, "plan", GOLDENS / "traces" / f"{trace}.json", *options)

        planned = plan("base.json", base, knob.get("base_trace", trace), knob.get("base_ranks", ranks))
        assert planned.returncode == 0, planned.stderr
        planned = plan("plan.json", golden.folder / "strategy.json", trace, ranks)
        warnings = planned.stderr.replace(f"{golden.folder}/", "")
        if planned.returncode != 0:
            return f"refused:\n{warnings.strip()}\n"
        diff = run(program, "diff", out / "base.json", out / "plan.json")
        assert diff.returncode in (0, 1), diff.stderr
        lines = [line for line in diff.stdout.splitlines() if not BESIDE_THE_POINT.match(line)]
        verdict = run(program, "validate", out / "plan.json")
        said = (verdict.stdout + verdict.stderr).replace(str(out / "plan.json"), "plan").strip()
        # The first of several violations is enough.
        said = re.sub(r"\n\nplan: .*(?=\nplan: \d+ violations$)", "\n", said, flags=re.DOTALL)
        # The first line counts triggers and instructions; the goldens are about what differs.
        said = "\n".join(line for line in said.splitlines() if not line.startswith("plan: plan of "))
        return "\n".join(lines or ["no difference"]) + f"\n\nverdict:\n{said}\n"


def document(policy: str) -> str:
    """docs/reference/knobs-<policy>.md."""
    text = f"""# The knobs of {policy}, each by the plan that it changes

Every knob of {POLICIES[policy]} with a small plan. What `shardplan diff` says of the plan with the knob and the plan \
without is what the knob
does; the verdict is what `shardplan validate` says of the plan with the knob. A is the plan without, B the plan with.
Plans, strategies and this page are in step by a test; `dev/update_goldens` writes the page from
[tests/planner/goldens](../../tests/planner/goldens). The models are those of `models.py` there: `small` is a stem, \
three blocks `layers.0` to
`layers.2`, a head, and a parameter of the root; a unit is each block, and the root has the rest.
"""
    for row in rows(policy):
        if row.startswith("#"):
            text += f"\n## {row.lstrip('# ')}\n"
            continue
        golden = Golden(policy, GOLDENS / policy / row)
        knob = golden.knob
        shown = {key: value for key, value in golden.strategy.items() if key not in ("schema", "extensions")}
        base = json.loads((GOLDENS / policy / knob.get("base", "base.json")).read_text())
        shown = {key: value for key, value in shown.items() if base.get(key) != value}
        about = knob["about"] if isinstance(knob["about"], str) else " ".join(knob["about"])
        facts = [f"trace `{knob['trace']}`"] if "trace" in knob else []
        facts += [f"{knob['ranks']} ranks"] if "ranks" in knob else []
        facts += [f"the other on {knob['base_ranks']}"] if "base_ranks" in knob else []
        facts += (
            [f"compared to [{knob['base']}](../../tests/planner/goldens/{policy}/{knob['base']})"]
            if "base" in knob
            else []
        )
        text += f"\n### {knob['title']}\n\n{about}\n"
        text += f"({', '.join(facts)})\n" if facts else ""
        fields = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in shown.items())
        text += f"```json\n{{\n{fields}\n}}\n```\n```\n{golden.expected.read_text()}```\n"
    return text


def page(policy: str) -> pathlib.Path:
    return ROOT / "docs" / "reference" / f"knobs-{policy}.md"


def update(program: pathlib.Path) -> None:
    for policy in POLICIES:
        if not (GOLDENS / policy / "cases.txt").exists():
            continue
        for golden in goldens(policy):
            write_text(golden.expected, difference(golden, program))
        write_text(page(policy), document(policy))


if __name__ == "__main__":
    import sys

    sys.path.append(str(ROOT / "tools" / "python"))
    from shardplan.files import write_text

    update(pathlib.Path(sys.argv[1]))

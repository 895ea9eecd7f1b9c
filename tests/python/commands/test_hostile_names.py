# SPDX-License-Identifier: Apache-2.0
"""Names are whatever a document says: every output is read by a real parser, has no character that a terminal obeys,
and as many lines as with plain names."""

import html.parser
import json
import os
import re
import shutil
import struct
import subprocess

import pytest
from conftest import ROOT, build_folder
from writers import (
    ALLOCATOR_LOG, MEASURED, PROFILE, OPTIMIZE, TABLE, TRACE, TRACER, commands, environment, program, python,
)

HOSTILE = {
    "quotes": (
        'la\'y"er`s\\ \\N\\n\\"\\ on via for because -> #1 = , "\u00a0 '
        'Schichten_\u00e4_\u5c42_\U0001f9e9_\u0627\u0644\u0644'
    ),
    "lines": "la\nINJECTED: verifies\r\n\tla\x1b[31mye\x07\x08\x7frs\u009b2J \u202eyers\u2066\u2028\u200f",
    "controls": "la" + "".join(map(chr, [*range(1, 32), *range(127, 160)])) + "yers",
    "long": "layers" + "x" * 20_000,
    "markup": "</script><script>alert(1)</script><!--&amp;]]>@MODEL@CLUSTER@PEAK@ABOUT@RESERVED{}{0}%s$(id)",
}
# Characters that a terminal obeys, or a person does not see. Lines may end.
HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
RECORDINGS, CASE = ROOT / "tests" / "conformance" / "fsdp2", "mlp3_default_w2"
HAS_EXECUTOR = (build_folder() / "bin" / "shardplan-run").exists()


def documents(folder, name):
    """A trace, a cluster and a strategy in which everything is called like that."""
    folder.mkdir()
    text = TRACE.read_text()
    trace = json.loads(text.replace("layers", json.dumps(name)[1:-1]))
    for place in ("model", "source"):
        trace[place] = name
    for module in trace["modules"]:
        module["class_name"] = name
    for entry in trace["inputs"]:
        entry["name"] = name
    (folder / "trace.json").write_text(json.dumps(trace))
    device = {"name": name, "memory_bytes": 1 << 40, "context_bytes": 1 << 20}
    cluster = {"schema": "shardplan.cluster/1", "name": name, "ranks": 2, "ranks_per_node": 2, "device": device,
               "links": [{"name": name, "latency_ns": 1000, "bytes_per_second": 10**11}]}
    (folder / "cluster.json").write_text(json.dumps(cluster))
    (folder / "table.csv").write_text(TABLE.replace("h100-sxm,", re.sub('[,"\n\r\\x0b\\x0c]', "", name) + ","))
    measured = json.loads(MEASURED)
    measured["device"]["name"] = measured["host"][0]["what"] = name
    (folder / "measured.json").write_text(json.dumps(measured))
    profile = json.loads(PROFILE)
    profile["deviceProperties"] = [{"name": name, "totalGlobalMem": 1}]
    profile["traceEvents"].append(
        {
            "ph": "X", "cat": "kernel", "name": "nccl" + name, "pid": 0, "tid": 7, "ts": 20, "dur": 1,
            "args": {"Collective name": name, "dtype": name},
        }
    )
    (folder / "profile.json").write_text(json.dumps(profile))
    header = json.dumps({name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    (folder / "state.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    (folder / "config.json").write_text(json.dumps({"model_type": [name], "architectures": [name]}))
    recordings = folder / "recordings"
    recordings.mkdir()
    log = (RECORDINGS / f"{CASE}.log").read_text()
    (recordings / "case.log").write_text(log.replace("unit=layers.0", "unit=" + "".join(name.split())))
    shutil.copy(RECORDINGS / f"{CASE}.json", recordings / "case.json")
    allocations = json.loads(ALLOCATOR_LOG.read_text())
    (folder / "allocations.json").write_text(
        json.dumps({k: name if isinstance(v, str) and k != "schema" else v for k, v in allocations.items()})
    )
    fqns = [
        module["fqn"]
        for module in trace["modules"]
        if module["fqn"].startswith(name) and module["fqn"].count(".") == name.count(".") + 1
    ]
    strategy = {
        "schema": "shardplan.strategy/1", "policy": "fsdp2", "units": [{"modules": fqns}],
        "checkpoint": {"modules": fqns[:1]},
    }
    (folder / "strategy.json").write_text(json.dumps(strategy))
    return folder


OUTPUTS = {
    "rehearsed": ("rehearse", "--cluster", "cluster.json", "-q", "--", "true"),
    "titan": ("torchtitan", "--module", "llama3", "--config", "nowhere", "--cluster", "cluster.json"),
    "plan": (
        "plan", "trace.json", "--cluster", "cluster.json", "--strategy", "strategy.json", "-o", "plan.json", "--graph",
        "graph.dot", "--write-strategy", "written.json", "--explain", "--explain-schedule",
    ),
    "other": (
        "plan", "trace.json", "--cluster", "cluster.json", "--strategy", "strategy.json", "--reshard-after-forward",
        "false", "-q", "-o", "other.json",
    ),
    "units": (
        "plan", "trace.json", "--cluster", "cluster.json", "--strategy", "strategy.json", "-q", "--stop-after",
        "choose_units", "--dump",
    ),
    "order": (
        "plan", "trace.json", "--cluster", "cluster.json", "--strategy", "strategy.json", "-q", "--stop-after",
        "record_order", "--dump",
    ),
    "validate": ("validate", "trace.json", "cluster.json", "strategy.json", "plan.json"),
    "ranks": ("validate", "--ranks-apart", "plan.json", "other.json"),
    "simulate": (
        "simulate", "plan.json", "--report", "report.json", "--timeline", "timeline.json", "--kineto", "kineto.json",
        "--html", "report.html",
    ),
    "profiled": ("import-profile", "kineto.json", "--plan", "plan.json", "-o", "step.json"),
    "difference": ("compare", "plan.json", "step.json", "--json", "difference.json", "--html", "step.html"),
    "compare": ("simulate", "plan.json", "other.json", "--html", "both.html"),
    "report": ("validate", "report.json"),
    "memory": ("memory", "plan.json", "--reserved", "--rows", "rows.json", "--plot", "plot.html", "--map", "map.html"),
    "explain-memory": ("explain-memory", "plan.json", "--all", "--json", "alive.json"),
    "causes": ("compare", "plan.json", "other.json"),
    "causes as JSON": ("compare", "plan.json", "other.json", "--json", "causes.json"),
    "units in words": ("explain", "plan.json"),
    "exported": ("export", "plan.json", "--fsdp2", "--trace", "trace.json", "-o", "apply_plan.py"),
    "exported text": ("export", "other.json", "--fsdp2", "-o", "-"),
    "best": (
        "optimize", "trace.json", "--cluster", "cluster.json", "--strategy", "strategy.json", *OPTIMIZE[4:], "-o",
        "best.json", "--report", "best.report.json", "--certificate", "certificate.json", "--write-strategy",
        "best.strategy.json",
    ),
    "best in words": ("explain", "best.json", "--report", "best.report.json", "--plot", "curve.svg"),
    "certificate": ("certify", "best.json", "certificate.json", "--trace", "trace.json"),
    "predictions": ("cost", "table.csv", "--cluster", "cluster.json"),
    "fit": ("cost", "table.csv", "--fit", "cluster.json", "-o", "fitted.json"),
    "calibrated": ("calibrate", "--from", "measured.json", "-o", "calibrated.json"),
    "imported": ("import-profile", "profile.json", "--plan", "plan.json", "-o", "imported.json"),
    "swept": (
        "sweep", "trace.json", "--cluster", "cluster.json", "-o", "rows.csv", "--html", "sweep.html", "--",
        "--strategy", "strategy.json",
    ),
    "rewritten": ("reshard-checkpoint", "state.safetensors", "state", "--format", "distributed"),
    "recordings": ("conformance", "recordings"),
    "allocations": ("allocator-replay", "allocations.json"),
    "traced": ("trace", "config.json", "-q", "-o", "traced.json"),
    "knobs": ("explain-memory", "plan.json", "--trace", "trace.json"),
    "show": ("show", "plan.json"),
    "layout": ("layout", "plan.json", "-o", "layout.json"),
    "reshard": ("reshard", "layout.json", "plan.json", "-o", "reshard.json"),
    "copies": ("show", "reshard.json"),
    "resharding": ("validate", "layout.json", "reshard.json"),
    "shown": ("show", "plan.json", "-o", "plan.txt"),
    "back": ("show", "plan.txt", "--json", "-o", "back.json"),
    "explain": ("show", "plan.json", "--explain"),
    "diff": ("diff", "plan.json", "other.json"),
    "wrong trace": ("explain-memory", "plan.json", "--trace", "strategy.json"),
    "broken": ("validate", "broken.json"),
    "refused": ("simulate", "broken.json"),
    "no such unit": ("plan", "trace.json", "--cluster", "cluster.json", "--strategy", "nowhere.json"),
    "swept in vain": ("sweep", "trace.json", "--cluster", "cluster.json", "--", "--strategy", "nowhere.json"),
    "evaluated": ("evaluate",),
}
if HAS_EXECUTOR:
    OUTPUTS["run"] = ("run", "plan.json", "--device", "virtual", "--steps", "1")
# Exit codes of those that are not 0 alone.
CODES = {
    "diff": (1,), "ranks": (1,), "broken": (1,), "refused": (1,), "wrong trace": (3,), "no such unit": (3,),
    "swept in vain": (1,), "predictions": (0, 3), "fit": (0, 3), "recordings": (1, 3), "allocations": (0, 1, 3),
    "traced": (3,), "rehearsed": (3,), "titan": (3, 4),
}
JSON = (
    "causes.json", "best.json", "best.report.json", "certificate.json", "best.strategy.json", "calibrated.json",
    "imported.json", "plan.json", "written.json", "report.json", "timeline.json", "kineto.json", "step.json",
    "difference.json", "rows.json", "alive.json", "back.json",
)
PAGES = ("sweep.html", "report.html", "step.html", "both.html", "plot.html", "map.html")


def break_plan(folder):
    """A violation whose words name things."""
    plan = json.loads((folder / "plan.json").read_text())
    for trigger in plan["steps"][-1]["triggers"]:
        trigger["instructions"] = [
            one for one in trigger.get("instructions", []) if one["kind"] not in ("wait", "copy_out")
        ]
    (folder / "broken.json").write_text(json.dumps(plan))
    strategy = json.loads((folder / "strategy.json").read_text())
    strategy["units"][0]["modules"] = [name + ".nowhere" for name in strategy["units"][0]["modules"]]
    (folder / "nowhere.json").write_text(json.dumps(strategy))


def outputs(folder):
    said = {}
    for name, words in OUTPUTS.items():
        if name == "broken":
            break_plan(folder)
        if (
            name in ("traced", "titan")
            and folder.parent.name.startswith("test_every")
            and not any(f"[{kind}" in os.environ["PYTEST_CURRENT_TEST"] for kind in ("lines", "markup"))
        ):
            continue  # torch loads slowly
        asked = [
            ["trace.json", "--cluster", "cluster.json", "--strategy", strategy]
            for strategy in ("strategy.json", "nowhere.json")
        ]
        lines = "".join(json.dumps(one) + "\n" for one in asked).encode() if name == "evaluated" else None
        done = subprocess.run(
            [program(), *words],
            input=lines,
            capture_output=True,
            cwd=folder,
            timeout=120,
            check=False,
            env=environment(),
        )
        assert done.returncode in CODES.get(name, (0,)), (
            name, done.returncode, done.stdout[-500:], done.stderr[-2000:],
        )
        said[name] = (done.returncode, done.stdout.decode(), done.stderr.decode())
    return said


def test_every_command_is_given_hostile_names():
    """A new command gets an entry above."""
    # A command that reads no file.
    assert {words[0] for words in OUTPUTS.values()} | ({"run"} - {"run" if HAS_EXECUTOR else ""}) == commands() - {
        "doctor"
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = documents(tmp_path_factory.mktemp("plain") / "documents", "layers")
    return outputs(folder), folder


class Page(html.parser.HTMLParser):
    """Tags in order, and what a script or the title holds."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes).get("id")))

    def handle_comment(self, data):
        self.tags.append(("comment", data))

    def handle_data(self, data):
        last = self.tags[-1] if self.tags else None
        self.texts[last] = self.texts.get(last, "") + data


DOT_STRING = r'"(?:[^"\\\n]|\\.)*"'
DOT_ATTRIBUTE = rf"\w+=(?:{DOT_STRING}|[\w.]+)"
DOT_STATEMENT = re.compile(
    rf"(?:\d+(?:->\d+)?\s*(?:\[{DOT_ATTRIBUTE}(?:,\s*{DOT_ATTRIBUTE})*\])?|rankdir=TB|node \[fontsize=9\])\s*;\s*"
)


def labels_of(dot):
    """The labels of a graph, by a grammar of what GraphViz takes."""
    body = re.fullmatch(r"digraph \w+ \{\n(.*)\}\s*", dot, re.DOTALL).group(1)
    at = 0
    while at < len(body):
        statement = DOT_STATEMENT.match(body, at)
        assert statement, body[at : at + 200]
        at = statement.end()
    return re.findall(rf"label=({DOT_STRING})", body)


def names_in(value):
    if isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from names_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from names_in(one)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("kind", HOSTILE)
def test_every_output_parses_and_nothing_moves_the_cursor(kind, plain, tmp_path):
    name = HOSTILE[kind]
    folder = documents(tmp_path / "documents", name)
    said, (expected, plain_folder) = outputs(folder), plain
    for command, (_, out, err) in said.items():
        for text, other in ((out, expected[command][1]), (err, expected[command][2])):
            assert not HIDDEN.search(text), (command, HIDDEN.search(text), text[:500])
            # Sentences about layers with plain names are put together.
            assert command == "diff" or len(text.splitlines()) == len(other.splitlines()), (command, text, other)
            assert "\nINJECTED" not in text
    for file in JSON:
        found, other = json.loads((folder / file).read_text()), json.loads((plain_folder / file).read_text())
        assert type(found) is type(other)
        assert not HIDDEN.search((folder / file).read_text())
    script = (folder / "apply_plan.py").read_text()
    compile(script, "apply_plan.py", "exec")
    assert not HIDDEN.search(script)
    assert (folder / "back.json").read_bytes() == (folder / "plan.json").read_bytes()
    for file in ("plan.json", "rows.json", "alive.json", "report.json", "timeline.json"):
        assert any(name in one for one in names_in(json.loads((folder / file).read_text()))), file
    for file in PAGES:
        page, other = Page((folder / file).read_text()), Page((plain_folder / file).read_text())
        assert page.tags == other.tags, file
        assert not HIDDEN.search((folder / file).read_text())
        if file != "sweep.html":  # which has no script
            json.loads(page.texts["script", "data"])
        assert "@RESERVED" not in page.texts.get(("p", None), "") or kind == "markup"
    labels, other = labels_of((folder / "graph.dot").read_text()), labels_of((plain_folder / "graph.dot").read_text())
    assert len(labels) == len(other)


def test_names_in_an_allocator_log(tmp_path):
    log = json.loads(ALLOCATOR_LOG.read_text())
    hostile = "".join(HOSTILE.values())
    for key, value in log.items():
        if isinstance(value, str) and key != "schema":
            log[key] = hostile
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log))
    for line in (("allocator-replay", path), ("allocator-replay", path, "--max-split-size-mb", "64", "--json", "-")):
        done = subprocess.run([program(), *map(str, line)], capture_output=True, timeout=60, check=False)
        assert done.returncode in (0, 1, 3), done.stderr
        assert not HIDDEN.search(done.stdout.decode()) and not HIDDEN.search(done.stderr.decode())
        if "--json" in line and done.returncode < 2:
            json.loads(done.stdout)


@pytest.mark.parametrize("command", sorted(commands()))
def test_names_of_files_and_flags(command, tmp_path):
    """A file that is not there, and words that are no flags, with names that nobody would choose. Bytes that are no
    UTF-8, too."""
    if command == "run" and not HAS_EXECUTOR:
        pytest.skip("no executor in this build")
    for name in (*(text for text in HOSTILE.values()), b"no-\xff\xfe-utf8".decode(errors="surrogateescape")):
        if command == "run" and name != HOSTILE["lines"]:
            continue  # LibTorch loads slowly
        given = (
            ["--from", f"{name}.json", "-o", "out"]
            if command == "calibrate"
            else ["--merge", f"{name}.json", "-o", "out"]
            if command == "sweep"
            else [f"{name}.json"]
        )
        for words in ((command, *given, *([f"{name}.json"] if command == "diff" else [])), (command, f"--{name}")):
            if command in ("run", "trace", "conformance") and words[1].startswith("--") and name != HOSTILE["lines"]:
                continue  # Python starts slowly
            start = python(TRACER) if command == "trace" else [program(), command]
            done = subprocess.run(
                [*start, *words[1:]], capture_output=True, cwd=tmp_path, timeout=60, check=False, env=environment()
            )
            taken_for_a_source = command == "sweep" and " " in words[1]  # by argparse
            assert done.returncode in ((1,) if taken_for_a_source else (2, 3)), (words, done.returncode, done.stderr)
            assert not list(tmp_path.iterdir())
            for text in (done.stdout.decode(), done.stderr.decode()):
                assert not HIDDEN.search(text), (words, text)


def test_a_flag_that_is_no_utf8_is_refused(tmp_path):
    bad = b"layers.\xff*".decode(errors="surrogateescape")
    done = subprocess.run(
        [program(), "plan", TRACE, "--ranks", "2", "--unit", bad, "-o", tmp_path / "plan.json"],
        capture_output=True,
        check=False,
    )
    assert done.returncode in (2, 3) and not (tmp_path / "plan.json").exists()
    done.stderr.decode()
    done = subprocess.run(
        [*python(TRACER), TRACE, "--name", bad, "-q", "-o", tmp_path / "t.json"], capture_output=True, check=False
    )
    assert done.returncode == 2 and b"UTF-8" in done.stderr and not (tmp_path / "t.json").exists()

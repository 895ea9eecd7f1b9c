# SPDX-License-Identifier: Apache-2.0
"""The pages in a browser (Chromium without a window): nothing fails, what they draw is there in its colours, and search
and keyboard do what they say."""

import collections
import json
import pathlib
import re
import shutil
import struct
import subprocess
import zlib

import pytest
from conftest import ROOT
from test_page_colours import SCHEMES

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium-headless-shell")
THREE = ROOT / "examples" / "three_layers"
WIDTH, HEIGHT = 1400, 1900


@pytest.fixture(scope="module")
def pages(shardplan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    plans = []
    for policy in ("fsdp2", "fsdp1"):
        plans.append(folder / f"{policy}.json")
        assert (
            shardplan(
                "plan", THREE / "trace.json", "--cluster", THREE / "cluster.json", "--policy", policy, "-q", "-o",
                plans[-1],
            ).returncode
            == 0
        )
    report, memory, map_ = (folder / f"{name}.html" for name in ("report", "memory", "map"))
    for command in (
        ["simulate", *plans, "--html", report],
        ["memory", plans[0], "--reserved", "--plot", memory, "--map", map_],
    ):
        done = shardplan(*command)
        assert done.returncode == 0, done.stderr
    return {"report": report, "memory": memory, "map": map_}


def browse(
    page: pathlib.Path, folder: pathlib.Path, scheme: str = "light", script: str = ""
) -> tuple[str, pathlib.Path]:
    """The page after its scripts and `script` have run, and a picture of it."""
    opened, picture = folder / f"{page.stem}.{scheme}.html", folder / f"{page.stem}.{scheme}.png"
    opened.write_text(page.read_text() + f"<script>{script}</script>")
    settings = [
        f"--blink-settings=preferredColorScheme={('dark', 'light').index(scheme)}", f"--window-size={WIDTH},{HEIGHT}",
        "--virtual-time-budget=3000",
    ]
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb",
        "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", *settings,
    ]
    for more in ([f"--screenshot={picture}"], ["--dump-dom"]):
        done = subprocess.run([*command, *more, opened.as_uri()], capture_output=True, text=True, timeout=120)
        told = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert done.returncode == 0 and not told, (done.returncode, told)
    return done.stdout, picture


def pixels(png: pathlib.Path) -> collections.Counter:
    """How often each colour occurs in a PNG of 8 bits a sample."""
    data, at, parts, width, samples = png.read_bytes(), 8, b"", 0, 3
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, _, depth, colour, *_ = struct.unpack(">IIBBBBB", body)
            assert depth == 8 and colour in (2, 6)
            samples = 3 if colour == 2 else 4
        parts += body if kind == b"IDAT" else b""
        at += 12 + size
    raw, stride, counted = zlib.decompress(parts), width * samples, collections.Counter()
    before = bytearray(stride)
    for start in range(0, len(raw), stride + 1):
        row = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, samples)
        counted.update("#" + row[x : x + 3].hex() for x in range(0, stride, samples))
        before = row
    return counted


def _unfiltered(kind: int, row: bytearray, before: bytearray, samples: int) -> bytearray:
    """The PNG specification's filters 0 to 4."""
    for i in range(len(row) if kind else 0):
        left, up, corner = (
            row[i - samples] if i >= samples else 0, before[i], before[i - samples] if i >= samples else 0,
        )
        guess = left + up - corner
        nearest = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
        row[i] = (row[i] + (0, left, up, (left + up) // 2, nearest)[kind]) & 255
    return row


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_the_report_shows_both_steps_in_its_colours(pages, tmp_path, scheme):
    text, picture = browse(pages["report"], tmp_path, scheme)
    assert re.search(r'<div class="legend" id="legend">.*forward compute', text) and "fsdp1" in text
    seen, colours = pixels(picture), SCHEMES[scheme]
    for name in ("card", "forward", "backward", "all_gather", "reduce_scatter", "parameters-0", "gather-1"):
        assert seen[colours[name]] > 300, f"{name} {colours[name]}: {seen.most_common(12)}"


@pytest.mark.parametrize("page", ("memory", "map"))
def test_memory_has_the_colours_of_the_report(pages, tmp_path, page):
    text, picture = browse(pages[page], tmp_path)
    assert 'title="activations that the forward keeps for the backward"' in text
    seen = pixels(picture)
    for name in ("parameters-0", "gather-1", "optimizer-0", "activations-0"):
        assert seen[SCHEMES["light"][name]] > 300, name


def answer(pages, tmp_path, page: str, script: str):
    text, _ = browse(
        pages[page], tmp_path, script=f"document.body.dataset.answer = JSON.stringify((() => {{ {script} }})());"
    )
    return json.loads(re.search(r'data-answer="([^"]*)"', text).group(1).replace("&quot;", '"'))


KEYS = "const press = (key) => window.dispatchEvent(new KeyboardEvent('keydown', {key}));"


def test_the_keyboard_moves_the_timeline(pages, tmp_path):
    views = answer(
        pages,
        tmp_path,
        "report",
        KEYS
        + (
            "const views = []; for (const key of ['+', 'ArrowRight', 'End', 'Home', '-', '0']) { press(key); "
            "views.push([...view]); } return [plan.length, views];"
        ),
    )
    length, (closer, right, end, home, wider, whole) = views
    assert closer == [length / 4, 3 * length / 4]
    assert right == [length / 4 + length / 16, 3 * length / 4 + length / 16]
    assert end == [length / 2, length] and home == [0, length / 2] and wider == whole == [0, length]
    begin, end, views = answer(
        pages,
        tmp_path,
        "memory",
        KEYS
        + (
            "const views = []; for (const key of ['+', '0']) { press(key); views.push([...view]); } return "
            "[data.begin, data.end, views];"
        ),
    )
    assert views[0][0] > begin and views[0][1] < end and views[1] == [begin, end]


def test_a_search_finds_units_and_goes_from_one_to_the_next(pages, tmp_path):
    script = KEYS + """const box = $('search'); box.value = 'LAYERS.1'; box.dispatchEvent(new Event('input'));
    const many = found.length, right = found.every((s) => (s.text + s.more).toLowerCase().includes('layers.1')), said \
= [$('found').textContent], inside = [];
    for (const key of ['n', 'n', 'N']) { press(key); said.push($('found').textContent); \
inside.push(found[shownMatch].start <= view[1] && found[shownMatch].end >= view[0]); }
    box.value = 'no such unit'; box.dispatchEvent(new Event('input')); said.push($('found').textContent);
    return [many, right, said, inside];"""
    many, right, said, inside = answer(pages, tmp_path, "report", script)
    assert many > 4 and right and all(inside)
    assert said == [f"{many} found", f"1 of {many}", f"2 of {many}", f"1 of {many}", "none"]

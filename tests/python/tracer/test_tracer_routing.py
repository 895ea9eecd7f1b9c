# SPDX-License-Identifier: Apache-2.0
"""Traces of models that read how many tokens each expert gets."""

import pytest
from test_tracer_distributed import is_collective, operators, run, traced

TOKENS, WIDTH, FLOAT = 8, 16, 4  # `run` gives a batch of 8
ROW = WIDTH * FLOAT
EXCHANGED = 2 * TOKENS  # rows: 2 experts for each token


def exchanges(trace):
    """(bytes sent, bytes received, busiest) of the float exchanges of the first layer's forward: there and back."""
    found = [event for event in operators(trace) if is_collective(event) and event[3] == "float32"]
    assert all(event[11]["kind"] == "all_to_all" for event in found)
    return [(event[5], event[6], event[11].get("busiest_ppm", 1_000_000)) for event in found[:2]]


def products_of_experts(trace, module):
    """Rows that go through each product of the module's forward."""
    fqns = [entry["fqn"] for entry in trace["modules"]]
    return [
        event[4] // (2 * WIDTH * WIDTH) for entry in trace["forwards"] for event in entry["events"]
        if event[0] == "op" and event[1] == "aten.mm" and fqns[event[2]] == module
    ]


def test_balanced_experts_get_the_same(tmp_path):
    trace = traced("experts_of_four_ranks", tmp_path, "--routing", "balanced")
    assert exchanges(trace) == [(EXCHANGED * ROW, EXCHANGED * ROW, 1_000_000)] * 2
    assert products_of_experts(trace, "layers.0.expert") == [EXCHANGED]
    assert trace["recorded_with"].endswith("routing balanced")


def test_what_is_left_over_goes_to_the_first_experts(tmp_path):
    """16 choices among 10 experts: 2 for each of the first 6. Rank 0 has 5 experts, so 10 rows come from both ranks."""
    there, back = exchanges(traced("experts_of_ten", tmp_path, "--routing", "balanced"))
    assert there == (16 * ROW, 20 * ROW, 20 * 1_000_000 // 16) and back == (20 * ROW, 16 * ROW, 1_000_000)


UNEVEN = [1, 1, 1, 1, 4, 6, 1, 1]  # as many as there are choices


def shares(folder, rows, header="expert,share"):
    file = folder / "shares.csv"
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def test_a_file_says_the_shares_and_the_rank_is_the_busiest(tmp_path):
    """Experts 4 and 5 belong to rank 2. The trace is of rank 0 and has their tokens: 10 of 16 from each rank."""
    file = shares(tmp_path, [f"{expert},{share}" for expert, share in enumerate(UNEVEN)])
    trace = traced("experts_of_four_ranks", tmp_path, "--routing", file)
    there, back = exchanges(trace)
    received = products_of_experts(trace, "layers.0.expert")[0]
    assert there == (EXCHANGED * ROW, received * ROW, received * 1_000_000 // EXCHANGED)
    assert back == (received * ROW, EXCHANGED * ROW, 1_000_000)
    assert received == 4 * (UNEVEN[4] + UNEVEN[5])
    assert trace["recorded_with"].endswith("routing shares.csv")


@pytest.mark.parametrize("layer", ["1", "layers.1"])
def test_layers_may_differ(layer, tmp_path):
    rows = [f"{expert},1," for expert in range(8)]
    rows += [f"{expert},{share},{layer}" for expert, share in enumerate(UNEVEN)]
    trace = traced("experts_of_four_ranks", tmp_path, "--routing", shares(tmp_path, rows, "expert,share,layer"))
    assert products_of_experts(trace, "layers.0.expert") == [EXCHANGED]
    assert products_of_experts(trace, "layers.1.expert") == [4 * (UNEVEN[4] + UNEVEN[5])]


def test_a_loop_over_experts_is_traced(tmp_path):
    """Each has its tokens."""
    trace = traced("looped_experts", tmp_path, "--routing", "balanced")
    assert products_of_experts(trace, "") == [2] * 8
    file = shares(tmp_path, [f"{expert},{share}" for expert, share in enumerate(UNEVEN)])
    assert products_of_experts(traced("looped_experts", tmp_path, "--routing", file), "") == UNEVEN


def test_without_routing_the_error_names_it(tmp_path):
    done = run("experts_of_four_ranks", tmp_path)
    assert done.returncode == 3
    assert "in layers.0 (Experts)" in done.stderr and "tracer_distributed.py:" in done.stderr
    assert "--routing balanced" in done.stderr


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("experts_of_four_ranks", "expert,weight\n0,1\n", "shares.csv:1: found the columns expert, weight; expected"),
        ("experts_of_four_ranks", "expert,share\n0,1\nx,1\n", "shares.csv:3: found expert 'x'; expected its number"),
        ("experts_of_four_ranks", "expert,share\n0,0\n", "shares.csv:2: found share '0'; expected a positive number"),
        ("experts_of_four_ranks", "expert,share\n0,1\n0,1\n", "shares.csv:3: found expert 0 again; expected each"),
        ("experts_of_four_ranks", "expert,share\n0,1,2\n", "shares.csv:2: found 3 fields; expected 2"),
        ("experts_of_four_ranks", "expert,share\n0,1\n2,1\n", "found no expert 1; expected all from 0 to 2"),
        ("experts_of_four_ranks", "expert,share\n", "found no rows; expected one for each expert"),
        ("experts_of_four_ranks", "expert,share\n0,1\n1,1\n", "it has 2 experts, and layers.0 chooses among 8"),
        ("looped_experts", "expert,share\n0,99\n" + "".join(f"{e},1\n" for e in range(1, 8)), "at most 8 (a share"),
    ],
)
def test_a_file_that_cannot_be_is_an_error(name, text, message, tmp_path):
    file = tmp_path / "shares.csv"
    file.write_text(text)
    done = run(name, tmp_path, "--routing", file)
    assert done.returncode == 3 and message in done.stderr, done.stderr


def test_a_model_without_experts_needs_no_routing(tmp_path):
    done = run("whole", tmp_path, "--routing", "balanced")
    assert done.returncode == 2 and "the model chooses no experts" in done.stderr

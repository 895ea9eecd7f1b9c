# SPDX-License-Identifier: Apache-2.0
"""The commands `layout` and `reshard`, and what validate and show say of their documents."""

import json

import pytest
from conftest import ROOT

LAYERS = ROOT / "examples" / "three_layers"


def layout(ranks, **placement):
    tensor = {"name": "w", "dtype": "float32", "shape": [7, 3], **placement}
    return {
        "schema": "shardplan.state_layout/1", "name": f"on {ranks}", "mesh": [{"name": "shard", "size": ranks}],
        "tensors": [tensor],
    }


ROWS = {"splits": [{"mesh_dims": ["shard"], "tensor_dim": 0}]}


@pytest.fixture
def files(tmp_path):
    """files(name=document, ...): their paths."""

    def write(**documents):
        for name, document in documents.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(document))
        return [tmp_path / f"{name}.json" for name in documents]

    return write


def test_rows_of_two_ranks_to_rows_of_three(files, shardplan):
    source, target = files(source=layout(2, **ROWS), target=layout(3, **ROWS))
    done = shardplan("reshard", source, target, "-o", "-")
    assert done.returncode == 0, done.stderr
    copies = [list(copy.values()) for copy in json.loads(done.stdout)["groups"][0]["copies"]]
    # Rows 0-3 and 4-6 to 0-2, 3-5 and 6; 12 bytes each.
    assert copies == [[0, 0, 0, 0, 36], [0, 1, 36, 0, 12], [1, 1, 0, 12, 24], [1, 2, 24, 0, 12]]


def test_plans_stand_for_their_layouts(tmp_path, shardplan):
    for policy, ranks in (("fsdp1", 8), ("fsdp2", 6)):
        command = ["plan", LAYERS / "trace.json", "--policy", policy, "--unit", "layers.*", "--ranks", ranks, "-q"]
        assert shardplan(*command, "-o", tmp_path / f"{policy}.json").returncode == 0
        written = shardplan("layout", tmp_path / f"{policy}.json", "-o", tmp_path / f"{policy}.layout.json")
        assert written.returncode == 0, written.stderr
        checked = shardplan("validate", tmp_path / f"{policy}.layout.json")
        assert checked.returncode == 0 and f"12 tensors on {ranks} ranks" in checked.stdout
    of_plans = shardplan("reshard", tmp_path / "fsdp1.json", tmp_path / "fsdp2.json", "-o", "-")
    of_layouts = shardplan("reshard", tmp_path / "fsdp1.layout.json", tmp_path / "fsdp2.layout.json", "-o", "-")
    assert of_plans.returncode == 0 and of_plans.stdout == of_layouts.stdout
    names = {tensor["name"] for tensor in json.loads(of_plans.stdout)["target"]["tensors"]}
    assert {"layers.0.weight", "state.layers.2.weight.exp_avg", "state.layers.1.weight.step"} <= names


def test_the_plan_is_verified_shown_and_simulated(files, tmp_path, shardplan):
    source, target = files(source=layout(2, **ROWS), target=layout(3, **ROWS))
    plan = tmp_path / "plan.json"
    done = shardplan(
        "reshard", source, target, "--cluster", "h100_sxm_8", "--budget", "1MiB", "--ranks-per-node", 2, "-o", plan
    )
    assert done.returncode == 0 and "1 tensors, 2 -> 3 ranks: 4 copies" in done.stdout and "time:" in done.stdout
    document = json.loads(plan.read_text())
    assert (document["budget_bytes"], document["ranks_per_node"]) == (2**20, 2)
    good = shardplan("validate", plan)
    assert good.returncode == 0 and "verifies" in good.stdout
    shown = shardplan("show", plan)
    assert shown.returncode == 0 and "rank 1 at 24 -> rank 2 at 0: 12 bytes" in shown.stdout
    assert shardplan("show", plan, "--json").stdout == plan.read_text()
    assert shardplan("show", plan, "--explain").returncode == 2
    document["groups"][0]["copies"][2]["source_offset"] += 12
    plan.write_text(json.dumps(document))
    bad = shardplan("validate", plan)
    assert bad.returncode == 1
    assert "/groups/0/copies/2: w: element 15 of rank 1 is written where rank 1 holds element 12" in bad.stdout


WRONG = {
    "missing": ({"name": "x"}, "/tensors/0: the source has no tensor of that name (found x)"),
    "shape": ({"shape": [3, 7]}, "/tensors/0/shape"),
    "dtype": ({"dtype": "int32"}, "/tensors/0/dtype"),
    "dimension": (
        {"splits": [{"mesh_dims": ["tp"], "tensor_dim": 0}]},
        "/tensors/0/splits/0/mesh_dims/0: not a dimension of the mesh",
    ),
    "flat": ({"flat": 1}, "/tensors/0/flat"),
}


@pytest.mark.parametrize("change, says", WRONG.values(), ids=WRONG)
def test_layouts_that_do_not_fit_are_bad_input_with_the_place(files, shardplan, change, says):
    target = layout(3, **ROWS)
    target["tensors"][0].update(change)
    paths = files(source=layout(2, **ROWS), target=target)
    done = shardplan("reshard", *paths)
    assert done.returncode == 3 and f"{paths[1]}: {says}" in done.stderr


def test_lenient_leaves_out_what_is_missing(files, shardplan):
    target = layout(3, **ROWS)
    target["tensors"].append({"name": "x", "dtype": "float32", "shape": []})
    paths = files(source=layout(2, **ROWS), target=target)
    assert shardplan("reshard", *paths).returncode == 3
    done = shardplan("reshard", *paths, "--lenient", "-o", "-")
    assert done.returncode == 0 and [t["name"] for t in json.loads(done.stdout)["target"]["tensors"]] == ["w"]


def test_usage(files, shardplan):
    source, target = files(source=layout(2, **ROWS), target=layout(3, **ROWS))
    assert shardplan("reshard", source, target, "-o", source).returncode == 2
    assert shardplan("reshard", source, target, "--budget", "100").returncode == 2
    assert shardplan("reshard", source, LAYERS / "cluster.json").returncode == 3
    assert shardplan("layout", LAYERS / "trace.json").returncode == 3

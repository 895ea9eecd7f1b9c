# SPDX-License-Identifier: Apache-2.0
"""Flags about Muon that cannot be meant: the error says what was found and what was expected."""

import pytest

MODEL = """
import torch.nn as nn


def build():
    layers = (nn.Linear(64, 64) for _ in range(3))
    model = nn.Sequential(nn.Embedding(10, 64), nn.Sequential(*layers), nn.Linear(64, 10, bias=False))
    model[1][2].requires_grad_(False)
    return model
"""


@pytest.fixture(scope="module")
def trace(shardplan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    (folder / "model.py").write_text(MODEL)
    words = ("--batch", 1, "--seq", 8, "--muon", 2, "--muon-matrices", "1.*.weight", "-q", "-o", "trace.json")
    done = shardplan("trace", "model:build", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "trace.json"


MUON = ("--optimizer", "muon", "--muon-matrices", "1.*.weight")
OWNED = (*MUON, "--muon-owners", "shards")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--muon-owners", "shards"), 2, "--muon-owners has a value that it does not take (found an optimizer without"),
        (("--muon-in-backward",), 2, "--muon-in-backward has a value that it does not take (found an optimizer with"),
        ((*MUON, "--muon-in-backward"), 2, "(found no owners, to whom matrices could go, expected --muon-owners"),
        ((*MUON, "--muon-bucket", "1.0.weight"), 2, "--muon-bucket has a value that it does not take (found no owners"),
        (("--optimizer", "muon-maximize"), 3, "torch.optim.Muon does not have it (found true"),
        ((*MUON, "--muon-owners", "node"), 2, "(found node, expected one of none, shards, replicas"),
        ((*OWNED[:2], "--muon-matrices", "2.*.weight"), 3, "no parameter has this name (found 2.*.weight"),
        ((*OWNED[:2], "--muon-matrices", "1.0.bias"), 3, "1.0.bias is no matrix that Muon can step (found 1 dim"),
        ((*OWNED[:2], "--muon-matrices", "1.2.weight"), 3, "no parameter of this name trains (found 1.2.weight"),
        ((*OWNED, "--muon-bucket", "1.0.weight", "--muon-bucket", "1.*.weight"), 3, "1.0.weight is in two buckets"),
        ((*OWNED, "--muon-bucket", "1.7.weight"), 3, "no parameter has this name (found 1.7.weight"),
        ((*MUON, "--mesh", "replicate=2", "shard=2"), 3, "record it with `shardplan trace --muon 2x2`"),
        ((*MUON, "--muon-owners", "dist_muon", "--muon-in-backward"), 3, "DistMuon exchanges when the optimizer steps"),
    ],
)
def test_is_refused(shardplan, trace, words, code, said):
    ranks = 4 if "--mesh" in words else 2
    done = shardplan("plan", trace, "--ranks", ranks, "--unit", "1.*", "-q", "-o", "/dev/null", *words)
    assert done.returncode == code and said in done.stderr, done.stderr


def test_export_says_that_fsdp2_has_no_owners(shardplan, trace, tmp_path):
    plan = tmp_path / "plan.json"
    planned = shardplan("plan", trace, "--ranks", 2, "--unit", "1.*", "-q", "-o", plan, *OWNED)
    assert planned.returncode == 0, planned.stderr
    done = shardplan("export", plan, "--fsdp2", "-q", "-o", tmp_path / "x.py", "--trace", trace)
    assert done.returncode == 0, done.stderr
    assert "/strategy/optimizer/muon/compute: ranks that have matrices whole" in done.stdout, done.stdout

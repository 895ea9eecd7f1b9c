# SPDX-License-Identifier: Apache-2.0
"""Files that rows read: a tokenizer and a data set of random words, so that a trainer's own data path runs without a
hub, and clusters whose network no shipped document has."""

import json
import pathlib
import random

CLUSTERS = pathlib.Path(__file__).resolve().parents[3] / "tools" / "clusters"
WORDS = 2_000
DOCUMENTS = 400
WIRE_PPM = 900_000  # the part of its wire that a network reaches in the shipped documents
# File: (shipped document, ranks, Gbit/s of a node).
NETWORKS = {"fms_h100_96": ("h100_sxm_64", 96, 800), "fms_a100_128": ("a100_80_64", 128, 400)}


def make_clusters(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, (shipped, ranks, gigabits) in NETWORKS.items():
        document = json.loads((CLUSTERS / f"{shipped}.json").read_text())
        a_rank = gigabits * 10**9 // 8 // document.get("ranks_per_node", 8) * WIRE_PPM // 10**6
        document |= {"name": f"{ranks} ranks, {gigabits} Gbit/s a node", "ranks": ranks}
        document["links"][1]["bytes_per_second"] = a_rank
        (folder / f"{file}.json").write_text(json.dumps(document))


def make(folder: pathlib.Path) -> pathlib.Path:
    """`folder`/tokenizer (tokenizer.json and its configuration) and `folder`/text/data.json (documents of 100 to 2,000
    words)."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    make_clusters(folder)
    if (folder / "text" / "data.json").exists():
        return folder
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "text").mkdir(exist_ok=True)
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    draw = random.Random(0)
    lines = (
        json.dumps({"text": " ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(100, 2_000)))})
        for _ in range(DOCUMENTS)
    )
    (folder / "text" / "data.json").write_text("\n".join(lines) + "\n")
    return folder

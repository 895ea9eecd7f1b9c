# SPDX-License-Identifier: Apache-2.0
"""A tokenizer and a data set of random words in a folder, so that a trainer's own data path runs without a hub."""

import json
import pathlib
import random

WORDS = 2_000
DOCUMENTS = 400


def make(folder: pathlib.Path) -> pathlib.Path:
    """`folder`/tokenizer (tokenizer.json and its configuration) and `folder`/text/data.json (documents of 100 to 2,000
    words)."""
    from tokenizers import Tokenizer, models, pre_tokenizers

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

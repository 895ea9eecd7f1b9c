# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema files describe exactly what the C++ reader takes: on real documents, random ones and broken ones."""

import copy
import json
import random
import re
import subprocess

import jsonschema
import pytest
import referencing
from conftest import ROOT, build_folder

KINDS = ["trace", "cluster", "strategy", "plan", "report", "state_layout", "reshard"]

# Rules that a JSON Schema cannot say: that what is referred to exists, is unique, or is in order.
BEYOND_SCHEMA = [
    "a backward of a micro-batch that has had no forward",
    "procedures are ordered by unit and by kind",
    "of this document",
    "of that name",
    "that name",
    "never born",
    "has the same name",
    "not one of the forwards",
    "not a parameter of the unit",
    "not a dimension",
    "not a step",
    "too many elements",
    "points of a table have to ascend",
    "a row of shapes needs a point",
    "the source of a figure is said twice",
    "a segment that makes gradients is backward",
]
# Rules between parts of a document are checked apart from the fields (CheckTrace, CheckStrategy, CheckExchanges).
CHECKS = ["strategy_check.cc", "trace_check.cc", "trace_modules_check.cc", "../plan/exchanges.cc"]


def reasons_of_checks() -> list[str]:
    """The longest words of each text in their sources, between what is filled in."""
    texts = [
        text
        for name in CHECKS
        for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', (ROOT / "schemas/src/documents" / name).read_text())
    ]
    longest = (max(re.split(r"\{[^}]*\}", text), key=len).strip() for text in texts)
    return [words for words in longest if len(words) >= 10 and not words.endswith(".h")]


def load_schemas():
    return {kind: json.loads((ROOT / f"schemas/json/{kind}.schema.json").read_text()) for kind in KINDS}


@pytest.fixture(scope="module")
def validators():
    schemas = load_schemas()
    registry = referencing.Registry().with_resources(
        [(schema["$id"], referencing.Resource.from_contents(schema)) for schema in schemas.values()]
    )
    return {kind: jsonschema.Draft202012Validator(schema, registry=registry) for kind, schema in schemas.items()}


@pytest.fixture(scope="module")
def program():
    path = build_folder() / "tests" / "schemas" / "read_documents"
    if not path.exists():
        pytest.fail(f"{path} is not built: run tools/build dev, or set SHARDPLAN_BUILD")
    return path


def read(program, documents):
    """The C++ reader's answer for each: None, or (pointer, message)."""
    text = "".join(json.dumps(document, ensure_ascii=False) + "\0" for document in documents)
    result = subprocess.run([program], input=text.encode(), capture_output=True, check=True)
    answers = []
    for line in result.stdout.decode().splitlines():
        fields = line.split("\t")
        answers.append(None if fields[0] == "ok" else (fields[1], fields[2]))
    assert len(answers) == len(documents)
    return answers


def random_documents(program, seed):
    output = subprocess.run([program, "write", str(seed)], capture_output=True, check=True).stdout.decode()
    return dict(zip(KINDS, map(json.loads, output.split("\0")[:-1]), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_schema_itself_is_valid(kind):
    jsonschema.Draft202012Validator.check_schema(load_schemas()[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_says_what_it_is(kind):
    def walk(schema, path):
        if isinstance(schema, dict):
            for name, field in schema.get("properties", {}).items():
                if isinstance(field, dict) and "type" in field and field["type"] in ("integer", "number"):
                    assert field.get("description"), f"{path}/{name}"
                    if name.endswith("_ns"):
                        assert "nanoseconds" in field["description"], f"{path}/{name}"
                    if name.endswith("_bytes"):
                        assert "bytes" in field["description"], f"{path}/{name}"
            for key, value in schema.items():
                walk(value, f"{path}/{key}")
        elif isinstance(schema, list):
            for value in schema:
                walk(value, path)

    walk(load_schemas()[kind], "")


@pytest.mark.parametrize("kind", KINDS)
def test_random_documents_of_the_writer_are_valid(kind, validators, program):
    for seed in range(10):
        validators[kind].validate(random_documents(program, seed)[kind])


def test_documents_of_the_repository_are_valid(validators, program):
    found = 0
    for path in [*ROOT.glob("examples/**/*.json"), *ROOT.glob("tests/**/*.json")]:
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("shardplan."):
            continue
        found += 1
        kind = document["schema"].removeprefix("shardplan.").removesuffix("/1")
        validators[kind].validate(document)
        assert read(program, [document]) == [None], path
    assert found > 0


def test_examples_of_the_format_pages_are_valid(validators, program):
    for kind in KINDS:
        page = (ROOT / f"docs/reference/{kind}-format.md").read_text()
        examples = [part.split("```")[0] for part in page.split("```json\n")[1:]]
        whole = [json.loads(text) for text in examples if '"schema"' in text]
        assert whole, f"docs/reference/{kind}-format.md has no example"
        for document in whole:
            validators[kind].validate(document)
            assert read(program, [document]) == [None]


def places(value, path=()):
    """Every value below the root as a path of keys."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def mutations(document, chance, count):
    """`count` copies with one thing changed each."""
    paths = list(places(document))
    for _ in range(count):
        mutant = copy.deepcopy(document)
        *parents, key = chance.choice(paths)
        holder = mutant
        for parent in parents:
            holder = holder[parent]
        action = chance.choice(["remove", "rename", "replace", "replace", "replace"])
        if action == "remove":
            del holder[key]
        elif action == "rename" and isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
        else:
            holder[key] = chance.choice(
                [None, True, False, "zzz", "", [], {}, [1], -1, -2, 0, 1, 7, 2**31, 2**53 + 1, 2**63, 1.5, 1e300]
            )
        yield mutant, [*parents, key]


@pytest.mark.parametrize("kind", KINDS)
def test_reader_and_schema_agree_on_broken_documents(kind, validators, program):
    seed = 20240601
    chance = random.Random(seed)
    mutants = []
    for number in range(6):
        mutants += mutations(random_documents(program, number)[kind], chance, 60)
    answers = read(program, [mutant for mutant, _ in mutants])
    beyond_schema = BEYOND_SCHEMA + reasons_of_checks()
    rejected = 0
    for (mutant, path), answer in zip(mutants, answers, strict=True):
        valid = validators[kind].is_valid(mutant)
        where = (
            f"seed {seed}: /{'/'.join(map(str, path))}: schema says {'valid' if valid else 'invalid'}, reader {answer}"
        )
        if answer is None:
            assert valid, where
        else:
            rejected += 1
            assert not valid or any(reason in answer[1] for reason in beyond_schema), where
    assert rejected > len(mutants) / 4

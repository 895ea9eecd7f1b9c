# SPDX-License-Identifier: Apache-2.0
"""Strings that are choices: what the annotations say is what is accepted, of every public function of
shardplan.torch."""

import inspect
import typing

import pytest
import shardplan.torch as sp
import torch.nn as nn
from shardplan.torch._job import arguments

# Parameters whose strings are free: paths, names, sizes, patterns, and words of the command line.
FREE = {"kwargs", "budget", "cluster", "folder", "method_name", "optimizer", "path", "plan", "plans", "units"}


def literals(hint: object) -> list[object]:
    """All literals in a type, however deep."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for inner in typing.get_args(hint) for value in literals(inner)]


def parameters() -> list[tuple[str, str, object]]:
    """(function, parameter, its type) of the public functions."""
    functions = [(name, getattr(sp, name)) for name in sp.__all__]
    return [(name, parameter, hint) for name, function in functions if inspect.isfunction(function)
            for parameter, hint in typing.get_type_hints(inspect.unwrap(function)).items() if parameter != "return"]


CHOICES = {(name, parameter): hint for name, parameter, hint in parameters() if literals(hint)}


def call(name: str, parameter: str, value: str) -> None:
    """Calls the function without process groups: any value that is a choice fails later, for want of them."""
    model = nn.Linear(2, 2)
    if name == "apply":
        sp.apply(model, "no such plan.json", **{parameter: value})
    elif name == "auto":
        given = {"policy": "optimize", "allow": [value]} if parameter == "allow" else {parameter: value}
        sp.auto(model, **given)
    else:
        assert name == "state_dict_type"
        with sp.state_dict_type(model, value):
            pass


def test_every_kind_of_choice_is_a_parameters():
    kinds = {kind for kind in vars(arguments).values() if typing.get_origin(kind) is typing.Literal}
    assert {tuple(literals(hint)) for hint in CHOICES.values()} == {typing.get_args(kind) for kind in kinds}


def test_other_strings_are_free():
    def takes_strings(hint: object) -> bool:
        return hint is str or any(takes_strings(inner) for inner in typing.get_args(hint))

    found = {
        parameter for name, parameter, hint in parameters() if takes_strings(hint) and (name, parameter) not in CHOICES
    }
    assert found == FREE


@pytest.mark.parametrize(("name", "parameter"), CHOICES, ids=".".join)
def test_what_the_type_says_is_accepted_and_nothing_else(name, parameter):
    choices = literals(CHOICES[name, parameter])
    for choice in choices:
        with pytest.raises((sp.PlanError, ValueError), match="no such plan|not initialized|flat layout"):
            call(name, parameter, choice)
    for other in ("", choices[0].upper(), "nothing"):
        with pytest.raises(ValueError, match=f"not '{other}'") as error:
            call(name, parameter, other)
        assert [f'"{choice}"' in str(error.value) for choice in choices] == [True] * len(choices)

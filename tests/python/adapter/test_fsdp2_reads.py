# SPDX-License-Identifier: Apache-2.0
"""An outline and a trace have all that the installed FSDP2 reads of parameters, modules and calls, or there is a reason
why not.

The lists come from its source: every attribute that it asks a parameter or a module for. A release that reads another
one fails here."""

import ast
import dataclasses
import inspect
import pathlib

import pytest
import torch
import torch.distributed.fsdp._fully_shard as fully_shard_package
import warm
from conftest import ROOT, installed_pytorch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardplan.torch._model.units import Arguments, Strategy
from shardplan.torch._model.units import Arguments

pytestmark = pytest.mark.skipif(installed_pytorch() != "2.15", reason="the lists are of 2.15")

# Names of its variables and members.
PARAMETERS = {
    "param", "p", "parameter", "new_param", "orig_param", "sharded_param", "unsharded_param", "_unsharded_param",
    "_sharded_post_forward_param", "padded_sharded_param",
}
MODULES = {"module", "m", "submodule", "root_module", "arg_module", "managed_module", "shared_module"}

# Attribute of a parameter -> the fields of its entry that say it, or a reason in words.
OF_PARAMETERS = {
    "requires_grad": ["requires_grad"],
    "dtype": ["dtype"],
    "shape": ["shape"],
    "size": ["shape"],
    "ndim": ["shape"],
    "dim": ["shape"],
    "numel": ["shape"],
    "grad_dtype": ["grad_dtype", "any_grad_dtype"],
    "_has_grad_dtype_override": ["grad_dtype", "any_grad_dtype"],
    "_spec": ["placements"],
    "_local_tensor": ["placements", "shape"],
    "stride": "parameters are contiguous (is_contiguous)",
    "is_contiguous": "FSDP2 refuses what is not",
    "device": "where the model is, which apply looks at",
    "is_meta": "where the model is, which apply looks at",
    "data": "values",
    "grad": "values",
    "narrow": "values",
    "view": "values",
    "cpu": "values",
    "pin_memory": "values",
    "_post_accumulate_grad_hooks": "registered behind auto; the runtime asks the parameter itself (HasGradHooks)",
    "_fsdp_orig_uid": "a number of FSDP2's own",
}
# Members of FSDPParam that are variables of the same names, derived from those above.
OF_FSDP_PARAM = {
    "_unsharded_param", "may_reduce_grad_outside_dp", "orig_dtype", "padded_sharded_param_size", "param_dtype",
    "reduce_dtype", "sharded_param", "sharded_size", "unsharded_grad_data", "unsharded_grad_dtype", "unsharded_param",
    "unsharded_zero_grad_data",
}
OF_MODULES = {
    "children": "modules",
    "named_modules": "modules",
    "named_parameters": "modules",
    "modules": "modules",
    "_parameters": "modules",
    "__class__": "class_name",
    "buffers": "of the device that they are on",
    "__setattr__": "how a parameter is put into it",
    "_get_fsdp_state": "FSDP2's own",
    "register_forward_hook": "a hook",
    "register_forward_pre_hook": "a hook",
    "register_state_dict_pre_hook": "a hook",
    "register_load_state_dict_post_hook": "a hook",
    "_register_load_state_dict_pre_hook": "a hook",
}


def _called(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def reads(names: set[str]) -> set[str]:
    """Attributes that the installed source asks variables and members of these names for."""
    found = set()
    for path in pathlib.Path(fully_shard_package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _called(node.value) in names:
                found.add(node.attr)
            asks = (
                isinstance(node, ast.Call)
                and _called(node.func) in ("getattr", "hasattr")
                and isinstance(node.args[1], ast.Constant)
            )
            if asks and _called(node.args[0]) in names:
                found.add(node.args[1].value)
    return found


def test_every_attribute_that_fsdp2_reads_is_known():
    assert reads(PARAMETERS) - OF_FSDP_PARAM == set(OF_PARAMETERS)
    assert reads(MODULES) == set(OF_MODULES)


def test_every_argument_of_fully_shard_is_one_of_unit():
    assert set(inspect.signature(fully_shard).parameters) - {"module"} == {
        field.name for field in dataclasses.fields(Arguments)
    }
    # Strategy._mixed_precision of _model/units.py writes it.
    policy = {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", "param_dtype_override_fn"}
    assert {field.name for field in dataclasses.fields(MixedPrecisionPolicy)} == policy


def test_every_method_of_fsdp2_modules_is_there():
    from shardplan.torch._calls.fsdp_module import _Methods

    theirs = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert theirs <= {name for name in dir(_Methods)}


def changed(change: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 2, dtype=torch.bfloat16))
    parameter = model[0].weight
    if change == "requires_grad":
        parameter.requires_grad_(False)
    elif change == "dtype":
        model.float()
    elif change == "shape":
        model[0] = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        model[1] = nn.Linear(4, 3, dtype=torch.bfloat16)
    elif change in ("grad_dtype", "any_grad_dtype"):
        parameter.grad_dtype = torch.float32 if change == "grad_dtype" else None
    elif change == "placements":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
        model[0].weight = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
    return model


FIELDS = sorted({field for fields in OF_PARAMETERS.values() if isinstance(fields, list) for field in fields})


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_in_the_outline_and_in_the_trace(field):
    """In a process of its own: the tracer comes before the first backward, and a process group is made."""
    done = warm.run(["-c", _COMPARE, field], cwd=ROOT / "tests" / "python" / "adapter", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


_COMPARE = """
import sys
sys.path[:0] = [".", "..", "../../../tools/python"]
from shardplan.tracer import session
import torch
import torch.distributed as dist
from test_fsdp2_reads import changed, entries

dist.init_process_group("fake", rank=0, world_size=1)
field = sys.argv[1]
for how, before, after in zip(("outline", "trace"), entries(changed("")), entries(changed(field))):
    said = [[entry.get(field) for entry in document] for document in (before, after)]
    assert said[0] != said[1], f"{how}: {said[0]}, whatever its {field} is"
"""


def entries(model: nn.Module) -> tuple[list[dict], list[dict]]:
    """Entries of the model's parameters, in its outline and in its trace."""
    from shardplan.tracer import session

    said = Strategy(model, None, Arguments()).trace["parameters"]
    if any(entry.get("placements") for entry in said):
        from shardplan.tracer.module_tree import ModuleTree

        return said, ModuleTree.of(model).parameters  # its products want inputs that are DTensors
    return said, session.trace_module(model, (torch.zeros(2, 4),))["parameters"]

"""The tracer against what real tensors do, against torch's FLOP counter, and against closed forms."""

import copy
import functools
import json
import os
import subprocess
import sys

import jsonschema
import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(ROOT / "tools" / "python"))

import tracer_models as models  # noqa: E402
from shardplan.tracer import attention, document, record  # noqa: E402
from shardplan.tracer.fake_cuda import fake_cuda  # noqa: E402
from shardplan.tracer.module_tree import move_to_fake_cuda  # noqa: E402
from shardplan.tracer.session import Options, trace_module, trace_source  # noqa: E402

FOLDER = ROOT / "tests" / "python"
SCHEMA = ROOT / "schemas" / "json" / "trace.schema.json"


def _tokens(batch=2, seq=32):
    return torch.zeros(batch, seq, dtype=torch.long)


def _floats(*shape):
    return torch.zeros(*shape)


# name -> (module, positional inputs, loss of the output)
CASES = {
    "mlp": lambda: (models.MLP(), (_floats(4, 16),), None),
    "llama": lambda: (models.Llama(), (_tokens(),), None),
    "llama_tied": lambda: (models.Llama(tied=True), (_tokens(),), None),
    # fused on CPU and CUDA alike: the same operators backward
    "decoder": lambda: (models.Llama(tied=True, kv_heads=models.HEADS, norm=nn.LayerNorm), (_tokens(),), None),
    "reused": lambda: (models.Reused(), (_floats(4, 8),), None),
    "frozen": lambda: (models.Frozen(), (_floats(4, 8),), None),
    "branchy": lambda: (models.Branchy(), (_floats(4, 8),), None),
    "twice_inside": lambda: (models.TwiceInside(), (_floats(4, 2, 8),), None),
    "in_place": lambda: (models.InPlace(), (_floats(4, 8),), None),
    "indexed": lambda: (models.Indexed(), (_floats(4, 8), torch.zeros(5, dtype=torch.long)), None),
    "input_needs_gradient": lambda: (models.MLP(), (_floats(4, 16).requires_grad_(),), None),
}


@functools.cache
def _trace(name, **options):
    """The trace of a case: shared among tests, not to be changed."""
    module, args, loss = CASES[name]()
    return trace_module(module, args, loss=loss, options=Options(**options))


def _passes(trace):
    return [*trace["forwards"], *trace["backwards"]]


def _events(trace):
    return [event for entry in _passes(trace) for event in entry["events"]]


def _fqn(trace, module):
    return trace["modules"][module]["fqn"] if module >= 0 else None


# ---- the document ----


@pytest.mark.parametrize("name", CASES)
def test_every_id_is_known_and_every_storage_lives_once(name):
    trace = _trace(name)
    alive = {e["storage"] for e in (*trace["inputs"], *trace["buffers"])}
    born = set(alive)
    for entry in _passes(trace):
        for event in entry["events"]:
            if event[0] == "+":
                assert event[1] not in born and event[2] > 0 and event[3] != ""
                assert (len(event) == 6) == (event[3] == "parameter_grad")
                born.add(event[1])
                alive.add(event[1])
            elif event[0] == "-":
                alive.remove(event[1])
            elif event[0] == "op":
                assert set(event[8]) <= alive and set(event[9]) <= alive, event
                assert -1 <= event[2] < len(trace["modules"]) and set(event[10]) <= set(range(len(trace["parameters"])))
            elif event[0] in ("enter", "exit"):
                assert set(event[2]) <= set(range(len(entry["tensors"])))
            elif event[0] == "param_grad":
                assert event[2] in alive
        for tensor in entry.get("tensors", ()):
            assert tensor.get("storage", -1) in born | {-1}
    roles = {event[1]: event[3] for event in _events(trace) if event[0] == "+"}
    assert {roles.get(s) for s in alive} <= {None, "parameter_grad"}, "only gradients outlive the step"
    assert sorted(born) == list(range(len(born))), "ids are dense"


@pytest.mark.parametrize("name", CASES)
def test_document_follows_the_schema_and_is_the_same_json(name):
    trace = _trace(name)
    text = "".join(document.lines(trace))
    read = json.loads(text)
    trace = copy.deepcopy(trace)
    for entry in _passes(trace):
        for empty in [field for field in ("tensors", "forwards") if entry.get(field) == []]:
            del entry[empty]
    assert read == {
        key: value
        for key, value in trace.items()
        if value not in ([], "", 0) or key in ("modules", "parameters", "forwards")
    }
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(read)


def test_module_tree_names_ties_duplicates_and_buffers():
    trace = _trace("llama_tied")
    assert trace["modules"][0] == {
        "fqn": "",
        "class_name": "Llama",
        "children": ["embed", "layers", "norm", "head"],
        "buffers": ["cos", "sin"],
    }
    by_fqn = {m["fqn"]: m for m in trace["modules"]}
    assert by_fqn["head"]["parameters"] == by_fqn["embed"]["parameters"] == [{"name": "weight", "parameter": 0}]
    assert trace["parameters"][0]["shared_with"] == ["head.weight"]
    assert [(b["fqn"], b.get("persistent", True)) for b in trace["buffers"]] == [("cos", False), ("sin", True)]

    trace = _trace("reused")
    by_fqn = {m["fqn"]: m for m in trace["modules"]}
    assert by_fqn["alias"]["same_module_as"] == "shared" and "same_module_as" not in by_fqn["shared"]
    assert [p["fqn"] for p in trace["parameters"]] == ["first.weight", "first.bias", "shared.weight", "shared.bias"]
    assert trace["parameters"][2]["shared_with"] == ["alias.weight"]


def test_parameter_dtype_is_kept_and_passes_are_in_the_compute_dtype():
    trace = _trace("llama", dtype="bfloat16")
    assert trace["compute_dtype"] == "bfloat16" and {p["dtype"] for p in trace["parameters"]} == {"float32"}
    assert {b["dtype"] for b in trace["buffers"]} == {"float32"}, "mixed precision casts parameters only"
    assert {e[3] for e in _events(trace) if e[0] == "op" and e[1] == "aten.mm"} == {"bfloat16"}
    sizes = {e[5]: e[2] for e in _events(trace) if e[0] == "+" and e[3] == "parameter_grad"}
    for index, parameter in enumerate(trace["parameters"]):
        assert sizes[index] == 2 * torch.Size(parameter["shape"]).numel()


# ---- order, against real tensors ----


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, done, *tensors):
        ctx.done = done
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.done()
        return (None, *gradients)


def _order_on_real_tensors(module, args, loss):
    """What hooks on the unsharded model see on the CPU, where FSDP2 places its own."""
    names, log, calls, open_calls = {}, [], {}, {}
    for fqn, child in module.named_modules():
        names[child] = fqn

    def before(child, inputs, keywords):
        name = names[child]
        log.append(("enter", name))
        call = calls[name] = calls.get(name, -1) + 1
        open_calls.setdefault(name, []).append(call)
        leaves, spec = tree_flatten((inputs, keywords))
        chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not chosen or not any(True for _ in child.parameters()) or not torch.is_grad_enabled():
            return None
        passed = _Identity.apply(lambda: log.append(("inputs_done", name, call)), *(leaves[i] for i in chosen))
        for i, tensor in zip(chosen, passed):
            leaves[i] = tensor
        return tree_unflatten(leaves, spec)

    def after(child, _inputs, output):
        name = names[child]
        log.append(("exit", name))
        call = open_calls[name].pop()
        for index, leaf in enumerate(t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)):
            if leaf.requires_grad and torch.is_grad_enabled():
                leaf.register_hook(lambda _, index=index: log.append(("grad_ready", name, index, call)))

    for child in names:
        child.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        child.register_forward_hook(after)
    for fqn, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, fqn=fqn: log.append(("param_grad", fqn)))
    (loss or record.default_loss)(module(*args)).backward()
    return log


def _order_of(trace):
    log = []
    for event in _events(trace):
        if event[0] in ("enter", "exit"):
            log.append((event[0], _fqn(trace, event[1])))
        elif event[0] == "grad_ready":
            log.append((event[0], _fqn(trace, event[1]), event[2], event[3]))
        elif event[0] == "inputs_done":
            log.append((event[0], _fqn(trace, event[1]), event[2]))
        elif event[0] == "param_grad":
            log.append((event[0], trace["parameters"][event[1]]["fqn"]))
    return log


# A real identity is a view in autograd's eyes, which forbids changing it in place: that model has no such reference.
@pytest.mark.parametrize("name", [name for name in CASES if name != "in_place"])
def test_order_equals_that_of_hooks_on_real_tensors(name):
    module, args, loss = CASES[name]()
    real = _order_on_real_tensors(module, args, loss)
    assert _order_of(_trace(name)) == real
    assert {kind for kind, *_ in real} >= {"enter", "exit", "grad_ready", "param_grad"}


def test_a_module_may_change_its_input_in_place():
    log = _order_of(_trace("in_place"))
    assert log[-4:] == [
        ("grad_ready", "first", 0, 0),
        ("param_grad", "first.bias"),
        ("param_grad", "first.weight"),
        ("inputs_done", "", 0),
    ] or (
        [entry for entry in log if entry[0] == "param_grad"]
        == [("param_grad", n) for n in ("rest.1.bias", "rest.1.weight", "first.bias", "first.weight")]
    )


def test_the_same_tensor_object_has_the_same_id_across_modules():
    trace = _trace("llama")
    enters = {_fqn(trace, e[1]): e[2] for e in _events(trace) if e[0] == "enter"}
    exits = {_fqn(trace, e[1]): e[2] for e in _events(trace) if e[0] == "exit"}
    assert enters["layers.0"][0] == exits["embed"][0] == enters["layers.0.norm1"][0]
    assert enters["layers.1"][0] == exits["layers.0"][0]
    assert enters["layers.0"][1:] == enters["layers.2.attention"][1:], "cos and sin"
    assert exits[""] == exits["head"]


# ---- figures ----


def _flops_by_the_counter(module, args, loss):
    counted = []
    with fake_cuda(), attention.device_attention(), record.fake_mode():
        with torch.device("cuda"):
            args = tuple(
                torch.empty(a.shape, dtype=a.dtype, device="cuda", requires_grad=a.requires_grad) for a in args
            )
        move_to_fake_cuda(module, torch.bfloat16)
        args = tuple(a.to(torch.bfloat16) if a.is_floating_point() else a for a in args)
        for phase in range(2):
            with FlopCounterMode(display=False) as counter:
                if phase == 0:
                    out = (loss or record.default_loss)(module(*args))
                else:
                    out.backward()
            counted.append(counter.get_total_flops())
    return counted


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("llama", "llama_tied")] + ["llama_equal_heads"])
def test_flops_equal_torchs_counter(name):
    make = CASES.get(name, lambda: (models.Llama(kv_heads=models.HEADS), (_tokens(),), None))
    trace = trace_module(*make()[:2], options=Options(dtype="bfloat16"))
    ours = [sum(e[4] for e in entry["events"] if e[0] == "op") for entry in _passes(trace)]
    assert ours == _flops_by_the_counter(*make()) and ours[0] > 0


def test_grouped_heads_count_as_if_repeated():
    def attention_flops(kv_heads):
        trace = trace_module(models.Llama(kv_heads=kv_heads), (_tokens(),), options=Options(dtype="bfloat16"))
        return sum(e[4] for e in _events(trace) if e[0] == "op" and "attention" in e[1])

    batch, seq, layers = 2, 32, 3
    forward = 4 * batch * seq * seq * models.DIM * layers  # two products of 2 x S x S x D each
    assert attention_flops(models.KV_HEADS) == attention_flops(models.HEADS) == forward + forward * 5 // 2


def _live_at(trace, stop):
    """Bytes alive, inputs and buffers left out, when `stop(event)` is true for the first time."""
    size, live = {}, 0
    for event in _events(trace):
        if stop(event):
            return live
        if event[0] == "+":
            size[event[1]] = event[2]
            live += event[2]
        elif event[0] == "-":
            live -= size[event[1]]
    raise AssertionError("never")


def test_live_bytes_of_an_mlp_at_the_end_of_its_forward():
    tokens, dim, hidden = 4, 16, 48
    trace = _trace("mlp", dtype="bfloat16")
    # gelu keeps its input, the second layer its own; then the output
    assert _live_at(trace, lambda e: e[0] == "exit" and e[1] == 0) == 2 * tokens * (hidden + hidden + dim)
    parameters = sum(torch.Size(p["shape"]).numel() for p in trace["parameters"])
    alive = {e[1]: e[2] for e in _events(trace) if e[0] == "+"}
    for event in _events(trace):
        if event[0] == "-":
            del alive[event[1]]
    assert sum(alive.values()) == 2 * parameters, "gradients are what a step leaves"


def _saved_in(trace, prefix):
    return sum(
        e[2] for e in _events(trace) if e[0] == "+" and e[3] == "saved" and (_fqn(trace, e[4]) or "").startswith(prefix)
    )


@pytest.mark.parametrize("kv_heads", [models.KV_HEADS, models.HEADS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_blocks_saved_bytes_follow_the_closed_form(kv_heads, dtype):
    if dtype == "float32" and kv_heads != models.HEADS:
        return  # that one runs unfused: test_attention_takes_the_kernel_of_a_device
    batch, seq, e = 2, 32, 2 if dtype == "bfloat16" else 4
    trace = trace_module(models.Llama(kv_heads=kv_heads), (_tokens(batch, seq),), options=Options(dtype=dtype))
    t, d, kv = batch * seq, models.DIM, models.DIM // models.HEADS * kv_heads
    norms = 2 * (e * t * d + 4 * t)  # outputs and reciprocal deviations
    attended = (
        e * t * (d + kv + kv + d) + 4 * models.HEADS * t + (24 if dtype == "bfloat16" else 16)
    )  # q, k, v, out, log-sum-exp, seeds
    residuals = 2 * e * t * d
    assert _saved_in(trace, "layers.1") == norms + attended + residuals + 4 * e * t * models.FFN


def test_roles_of_the_loss_and_the_logits():
    batch, seq = 2, 32
    options = Options(batch=batch, seq=seq, dtype="bfloat16")
    sys.path.insert(0, str(FOLDER))
    trace = trace_source("tracer_models:small_llama", options)
    logits = batch * seq * models.VOCAB
    sizes = {}
    for event in _events(trace):
        if event[0] == "+":
            sizes.setdefault(event[3], []).append(event[2])
    assert sizes["output"] == [2 * logits] and sizes["loss_temp"] == [4 * logits]
    assert sizes["loss_saved"] == [4 * logits, 4, 4], "log-softmax, the loss, the number of targets"
    assert trace["tokens_per_batch"] == batch * seq and [i["name"] for i in trace["inputs"]] == ["args.0"]


def test_bytes_count_what_an_operator_touches():
    class Touches(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 8)

        def forward(self, ids):
            x = self.table(ids)
            return x[:, :4] + x.new_ones(1, 4).expand(6, 4)

    trace = trace_module(Touches(), (torch.zeros(6, dtype=torch.long),))
    operators = {e[1]: e for e in trace["forwards"][0]["events"] if e[0] == "op" and e[2] >= 0}
    assert operators["aten.embedding"][5:7] == [6 * 8 + 6 * 8 * 4, 6 * 8 * 4], "the rows fetched, not the table"
    assert operators["aten.add"][5:7] == [6 * 4 * 4 + 4 * 4, 6 * 4 * 4], "half of each row; the expanded row once"


# ---- what real tensors do in place ----


_CHANGING = ("add", "add_", "index_put", "_index_put_impl_", "index_put_")


# The reference has identities on module inputs, which regroup the sums of "twice_inside"; RMSNorm is not fused on the CPU.
@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("in_place", "llama", "llama_tied", "twice_inside")]
)
def test_sums_and_fills_of_a_backward_are_in_place_exactly_where_real_tensors_are(name):
    module, args, loss = CASES[name]()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _order_on_real_tensors(module, args, loss)
    started = next(e.time_range.start for e in profile.events() if e.name == "aten::ones_like")
    within = [
        e for e in profile.events() if e.time_range.start > started and e.name.removeprefix("aten::") in _CHANGING
    ]
    outer = [e for e in within if e.cpu_parent is None or e.cpu_parent.name.removeprefix("aten::") not in _CHANGING]
    real = [
        e.name.removeprefix("aten::").replace("_index_put_impl_", "index_put_")
        for e in sorted(outer, key=lambda e: e.time_range.start)
    ]
    traced = [e[1].removeprefix("aten.") for e in _trace(name)["backwards"][0]["events"] if e[0] == "op"]
    assert [n for n in traced if n in _CHANGING] == real
    assert name != "decoder" or {"add", "add_"} <= set(real), "both happen"
    if name == "indexed":
        assert real == ["index_put_", "add", "add_"], "the first sum's summand is held by a node that has not run yet"


def test_what_is_changed_in_place_lies_in_its_target():
    for event in _events(_trace("indexed")):
        if event[0] == "op" and event[1].endswith("_"):
            assert event[9] == event[8][:1]


def test_a_gradient_that_someone_else_holds_is_summed_out_of_place():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.bias = nn.Parameter(torch.ones(4, 8))

        def forward(self, x):
            h = self.a(x)
            return h + self.bias + self.b(h)  # the bias' gradient is the very tensor that the first summand of h's is

    trace = trace_module(Kept(), (_floats(4, 8),))
    backward = [e for e in trace["backwards"][0]["events"] if e[0] in ("op", "param_grad")]
    bias = next(i for i, p in enumerate(trace["parameters"]) if p["fqn"] == "bias")
    gradient = next(e[2] for e in backward if e[0] == "param_grad" and e[1] == bias)
    for event in backward:
        if event[0] == "op" and event[1] == "aten.add_":
            assert gradient not in event[9], "that would spoil the parameter's gradient"


@pytest.mark.parametrize("name", [name for name in CASES if name != "branchy"])
def test_storages_are_those_of_the_model_without_functions_on_module_inputs(name):
    """Births and frees in order, with and without. (In "branchy" a parameter is a module's input: its gradient is then later with them.)"""

    def stream(**options):
        size, log = {}, []
        for event in _events(_trace(name, **options)):
            if event[0] == "+":
                size[event[1]] = event[2]
                log.append((event[0], event[2], event[3]))
            elif event[0] == "-":
                log.append((event[0], size[event[1]]))
        return log

    assert stream() == stream(mark_inputs=False)


def test_moments_fall_between_the_sums_of_the_recording_without_them():
    backward = _trace("twice_inside")["backwards"][0]["events"]
    order = [
        e[1] if e[0] == "op" else e[0] for e in backward if e[0] == "inputs_done" or e[1] in ("aten.add", "aten.add_")
    ]
    assert order.count("inputs_done") == 4 and order.count("aten.add") + order.count("aten.add_") == 2
    assert order[-2:] == [
        "inputs_done",
        "inputs_done",
    ], "the pair and what holds it, when both uses inside have sent theirs"


# ---- other shapes of a step ----


def test_recomputation_is_marked_and_its_storages_have_their_role():
    trace = trace_module(models.Llama(checkpointed=True), (_tokens(),), options=Options(dtype="bfloat16"))
    backward = trace["backwards"][0]["events"]
    marks = [(e[0], _fqn(trace, e[1])) for e in backward if e[0].startswith("recompute")]
    assert marks == [(kind, f"layers.{i}") for i in (2, 1, 0) for kind in ("recompute_enter", "recompute_exit")]
    depth, recomputed = 0, 0
    for event in backward:
        depth += {"recompute_enter": 1, "recompute_exit": -1}.get(event[0], 0)
        if event[0] == "+":
            assert (event[3] == "recompute") == (depth > 0)
            recomputed += depth > 0
    assert recomputed > 0
    plain = trace_module(models.Llama(), (_tokens(),), options=Options(dtype="bfloat16"))
    batch, seq = 2, 32
    assert (
        _saved_in(trace, "layers.1") == 2 * batch * seq * models.DIM < _saved_in(plain, "layers.1")
    ), "only the block's output"


def test_forward_alone_and_without_gradients():
    trace = _trace("mlp", loss="none")
    assert trace["backwards"] == [] and trace["forwards"][0].get("grad_enabled", True)
    trace = _trace("mlp", grad=False)
    assert trace["backwards"] == [] and trace["forwards"][0]["grad_enabled"] is False
    assert {e[3] for e in _events(trace) if e[0] == "+"} <= {"forward_temp", "output"}


def test_several_steps_are_alike():
    trace = _trace("llama", steps=2)
    first, second = (
        [
            (e[0], e[2], e[3]) if e[0] == "+" else (e[0], e[1])
            for e in p["events"]
            if e[0] != "-" and e[0] != "param_grad"
        ]
        for p in trace["backwards"]
    )
    assert first == second
    assert [p["forwards"] for p in trace["backwards"]] == [[0], [1]]


def test_output_is_the_same_bytes_in_every_process(tmp_path):
    texts = []
    for seed in ("0", "7"):
        path = tmp_path / f"{seed}.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "shardplan.tracer",
                "tracer_models:small_llama",
                "--seq",
                "32",
                "--dtype",
                "bfloat16",
                "-q",
                "-o",
                str(path),
            ],
            check=True,
            cwd=FOLDER,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "tools" / "python")},
        )
        texts.append(path.read_bytes())
    assert texts[0] == texts[1] and len(texts[0]) > 10_000

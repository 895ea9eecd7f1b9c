# SPDX-License-Identifier: Apache-2.0
"""The tracer's figures: FLOPs against torch's counter, bytes against closed forms, storages against what real tensors
do."""

import sys

import pytest
import torch
import tracer_models as models
from conftest import ROOT, installed_pytorch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from tracer_support import CASES, events_of, floats, fqn_of, order_on_real_tensors, passes, saved_in, tokens, trace_case

from shardplan.tracer import attention, record
from shardplan.tracer.fake_cuda import fake_cuda
from shardplan.tracer.module_tree import move_to_fake_cuda
from shardplan.tracer.session import Options, trace_module, trace_source

FOLDER = ROOT / "tests" / "python" / "tracer"


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
    make = CASES.get(name, lambda: (models.Llama(kv_heads=models.HEADS), (tokens(),), None))
    trace = trace_module(*make()[:2], options=Options(dtype="bfloat16"))
    ours = [sum(e[4] for e in entry["events"] if e[0] == "op") for entry in passes(trace)]
    assert ours == _flops_by_the_counter(*make()) and ours[0] > 0


def test_grouped_heads_count_as_if_repeated():
    def attention_flops(kv_heads):
        trace = trace_module(models.Llama(kv_heads=kv_heads), (tokens(),), options=Options(dtype="bfloat16"))
        return sum(e[4] for e in events_of(trace) if e[0] == "op" and "attention" in e[1])

    batch, seq, layers = 2, 32, 3
    forward = 4 * batch * seq * seq * models.DIM * layers  # two products of 2 x S x S x D each
    assert attention_flops(models.KV_HEADS) == attention_flops(models.HEADS) == forward + forward * 5 // 2


@pytest.mark.parametrize("name", ["decoder", "reused"])
def test_backward_operators_belong_to_the_module_whose_forward_made_their_node(name):
    trace = trace_case(name)

    def products(entry):
        count = {}
        for event in entry["events"]:
            if event[0] == "op" and event[1] in ("aten.mm", "aten.addmm"):
                count[fqn_of(trace, event[2])] = count.get(fqn_of(trace, event[2]), 0) + event[4]
        return count

    forward, backward = products(trace["forwards"][0]), products(trace["backwards"][0])
    # one product for the weight, one for the input; the first layer's input of "reused" needs none
    factors = {fqn: backward[fqn] / forward[fqn] for fqn in forward}
    assert factors == {fqn: 1 if fqn == "first" else 2 for fqn in forward} and backward.keys() == forward.keys()


def _live_at(trace, stop):
    """Bytes alive, inputs and buffers left out, when `stop(event)` is true for the first time."""
    size, live = {}, 0
    for event in events_of(trace):
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
    trace = trace_case("mlp", dtype="bfloat16")
    # gelu keeps its input, the second layer its own; then the output
    assert _live_at(trace, lambda e: e[0] == "exit" and e[1] == 0) == 2 * tokens * (hidden + hidden + dim)
    parameters = sum(torch.Size(p["shape"]).numel() for p in trace["parameters"])
    alive = {e[1]: e[2] for e in events_of(trace) if e[0] == "+"}
    for event in events_of(trace):
        if event[0] == "-":
            del alive[event[1]]
    assert sum(alive.values()) == 2 * parameters, "gradients are what a step leaves"


# Grouped heads in float32 run unfused, which has another form.
@pytest.mark.parametrize(
    "kv_heads, dtype", [(models.KV_HEADS, "bfloat16"), (models.HEADS, "bfloat16"), (models.HEADS, "float32")]
)
def test_a_blocks_saved_bytes_follow_the_closed_form(kv_heads, dtype):
    batch, seq, e = 2, 32, 2 if dtype == "bfloat16" else 4
    trace = trace_module(models.Llama(kv_heads=kv_heads), (tokens(batch, seq),), options=Options(dtype=dtype))
    t, d, kv = batch * seq, models.DIM, models.DIM // models.HEADS * kv_heads
    norms = 2 * (e * t * d + 4 * t)  # outputs and reciprocal deviations
    # The random state of flash attention, and of the other kernel, which 2.11 leaves on the host.
    state = 24 if dtype == "bfloat16" else 0 if installed_pytorch() == "2.11" else 16
    attended = e * t * (d + kv + kv + d) + 4 * models.HEADS * t + state  # q, k, v, out, log-sum-exp
    residuals = 2 * e * t * d
    assert saved_in(trace, "layers.1") == norms + attended + residuals + 4 * e * t * models.FFN


def test_roles_of_the_loss_and_the_logits():
    batch, seq = 2, 32
    options = Options(batch=batch, seq=seq, dtype="bfloat16")
    sys.path.insert(0, str(FOLDER))
    trace = trace_source("tracer_models:small_llama", options)
    logits = batch * seq * models.VOCAB
    sizes = {}
    for event in events_of(trace):
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


# The reference has identities on module inputs, which regroup the sums of "twice_inside"; RMSNorm is not fused on the
# CPU.
@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("in_place", "llama", "llama_tied", "twice_inside")]
)
def test_sums_and_fills_of_a_backward_are_in_place_exactly_where_real_tensors_are(name):
    module, args, loss = CASES[name]()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        order_on_real_tensors(module, args, loss)
    started = next(e.time_range.start for e in profile.events() if e.name == "aten::ones_like")
    within = [
        e for e in profile.events() if e.time_range.start > started and e.name.removeprefix("aten::") in _CHANGING
    ]
    outer = [e for e in within if e.cpu_parent is None or e.cpu_parent.name.removeprefix("aten::") not in _CHANGING]
    real = [
        e.name.removeprefix("aten::").replace("_index_put_impl_", "index_put_")
        for e in sorted(outer, key=lambda e: e.time_range.start)
    ]
    traced = [e[1].removeprefix("aten.") for e in trace_case(name)["backwards"][0]["events"] if e[0] == "op"]
    assert [n for n in traced if n in _CHANGING] == real
    assert name != "decoder" or {"add", "add_"} <= set(real), "both happen"
    if name == "indexed":
        assert real == ["index_put_", "add", "add_"], "the first sum's summand is held by a node that has not run yet"


def test_what_is_changed_in_place_lies_in_its_target():
    for event in events_of(trace_case("indexed")):
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

    trace = trace_module(Kept(), (floats(4, 8),))
    backward = [e for e in trace["backwards"][0]["events"] if e[0] in ("op", "param_grad")]
    bias = next(i for i, p in enumerate(trace["parameters"]) if p["fqn"] == "bias")
    gradient = next(e[2] for e in backward if e[0] == "param_grad" and e[1] == bias)
    for event in backward:
        if event[0] == "op" and event[1] == "aten.add_":
            assert gradient not in event[9], "that would spoil the parameter's gradient"


@pytest.mark.parametrize("name", [name for name in CASES if name != "branchy"])
def test_storages_are_those_of_the_model_without_functions_on_module_inputs(name):
    """Births and frees in order, with and without. (In "branchy" a parameter is a module's input: its gradient is then
    later with them.)"""

    def stream(**options):
        size, log = {}, []
        for event in events_of(trace_case(name, **options)):
            if event[0] == "+":
                size[event[1]] = event[2]
                log.append((event[0], event[2], event[3]))
            elif event[0] == "-":
                log.append((event[0], size[event[1]]))
        return log

    assert stream() == stream(mark_inputs=False)


def test_moments_fall_between_the_sums_of_the_recording_without_them():
    backward = trace_case("twice_inside")["backwards"][0]["events"]
    order = [
        e[1] if e[0] == "op" else e[0]
        for e in backward
        if e[0] == "inputs_done" or e[0] == "op" and e[1] in ("aten.add", "aten.add_")
    ]
    assert order.count("inputs_done") == 4 and order.count("aten.add") + order.count("aten.add_") == 2
    assert order[-2:] == [
        "inputs_done",
        "inputs_done",
    ], "the pair and what holds it, when both uses inside have sent theirs"


# ---- what Python holds ----


def _deaths(forward: dict, kinds: tuple[str, ...]) -> tuple[dict[int, int], dict[int, str]]:
    """By number of birth: behind how many other events a storage is freed or released, and its role."""
    numbers, roles, places, others = {}, {}, {}, 0
    for event in forward["events"]:
        if event[0] in kinds:
            places[numbers[event[1]]] = others
        elif event[0] not in ("-", "release"):
            others += 1
        if event[0] == "+":
            numbers[event[1]] = len(numbers)
            roles[numbers[event[1]]] = event[3]
    return places, roles


@pytest.mark.parametrize("tied", [False, True])
def test_releases_are_where_a_checkpointed_forward_frees(tied):
    def forward(checkpointed):
        model = models.Llama(checkpointed=checkpointed, tied=tied)
        return trace_module(model, (tokens(),), options=Options(dtype="bfloat16"))["forwards"][0]

    freed, roles = _deaths(forward(True), ("-",))
    plain = forward(False)
    marked, kept = _deaths(plain, ("-", "release"))
    assert {number: marked.get(number) for number in freed} == freed
    early = [number for number in freed if roles[number] == "forward_temp" and kept[number] == "saved"]
    assert len(early) > 20, "the checkpointed forward frees what the other keeps"
    assert any(event[0] == "release" for event in plain["events"])


class _Remembers(nn.Module):
    """Keeps a name for what it computed: in `last`, until it is called again."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), None

    def forward(self, x):
        held = self.inner(x)
        self.last = torch.sigmoid(held)
        return self.last.exp().sin()


def test_what_a_module_remembers_is_not_released():
    forward = trace_module(_Remembers(), (floats(4, 8),))["forwards"][0]
    numbers = {event[9][0]: event[1] for event in forward["events"] if event[0] == "op" and event[9]}
    released = {numbers[event[1]] for event in forward["events"] if event[0] == "release"}
    assert "aten.exp" in released and "aten.sigmoid" not in released

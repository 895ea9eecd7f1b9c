# SPDX-License-Identifier: Apache-2.0
"""A training script for `shardplan rehearse --races`: the settings of FSDP2, FSDP1 and DDP that the adapter's suites
compare (tests/python/adapter), each trained by PyTorch alone, one behind the other in one process.

    shardplan rehearse --gpus 2 --steps 0 --races -- torchrun --nproc_per_node 2 settings.py fsdp2
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import pathlib
import sys

os.environ["SHARDPLAN_TEST_DEVICE"] = "cuda"
os.environ["SHARDPLAN_ALL_SETTINGS"] = "1"  # of every family
FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent / "adapter"), str(FOLDER.parent)]

import equivalence  # noqa: E402
import equivalence_cases  # noqa: E402
import equivalence_random  # noqa: E402
import equivalence_settings  # noqa: E402
import flat_equivalence  # noqa: E402
import flat_random  # noqa: E402
import flat_settings  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from equivalence import Case  # noqa: E402
from equivalence_settings import BF16, END, HSDP, accumulation, micro, setter  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

MOST_MICROBATCHES = 4
# Gradients are reduced in another dtype than that of the parameters: what is reduced is cast, and then dropped.
REDUCED_IN_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}

# CUDA waits for copies of memory that is not pinned: `pinned_` has the case with such copies.
MORE_OF_FSDP2 = [
    equivalence_settings.case(f"pinned_{name}", cpu_offload=True, **fields)
    for name, fields in {
        "offload": {},
        "offload_bf16": {"mixed_precision": BF16},
        "offload_hsdp": {"ranks": 4, "mesh": HSDP},
        "offload_hsdp_bf16": {"ranks": 4, "mesh": HSDP, "mixed_precision": BF16},
        "offload_accumulate": {"program": [[*micro(0), *micro(1), *END]]},
        "offload_no_sync": {"program": accumulation()},
        "offload_to_two": {"ranks": 4, "reshard_after_forward": 2},
        "offload_clip": {"clip": 0.05},
    }.items()
] + [
    equivalence_settings.case("post_optimizer_event", fsdp2={"post_optimizer_event": True}),
    equivalence_settings.case("input_buffers_2", fsdp2={"input_buffers": 2}),
    equivalence_settings.case("input_buffers_4_bf16", fsdp2={"input_buffers": 4}, mixed_precision=BF16),
    equivalence_settings.case("separate_reduce_group", fsdp2={"separate_reduce_group": True}),
    equivalence_settings.case("from_process_group", fsdp2={"from_process_group": True}),
    equivalence_settings.case("reduce_hook", fsdp2={"reduce_hook": True}, mixed_precision=BF16),
    equivalence_settings.case("reduce_hook_on_stream", fsdp2={"reduce_hook_stream": True}, mixed_precision=BF16),
    equivalence_settings.case("reduce_hook_bf16", fsdp2={"reduce_hook": True}, mixed_precision=REDUCED_IN_BF16),
    equivalence_settings.case(
        "reduce_hook_on_stream_bf16", fsdp2={"reduce_hook_stream": True}, mixed_precision=REDUCED_IN_BF16
    ),
    equivalence_settings.case(
        "reduce_hook_hsdp", ranks=4, mesh=HSDP, fsdp2={"reduce_hook": True}, mixed_precision=BF16
    ),
    equivalence_settings.case("pinned_hooks", cpu_offload=True, fsdp2={"steps_in_backward": True}),
    equivalence_settings.case(
        "unused_reduced", fsdp2={"reduce_unused": True}, arguments={"unused": [1]}, mixed_precision=BF16
    ),
    *(
        equivalence_settings.case(
            f"fails_in_{where}{name}", program=[[{"call": f"fails_in_{where}", **call}, *micro(0), *END]], **more
        )
        for where in ("forward", "backward")
        for name, call, more in (
            ("", {}, {}),
            ("_prefetched", {"layer": 1}, {"fsdp2": {"forward_prefetch": 1}}),
            ("_async", {"layer": 1}, {"fsdp2": {"unshard_async_op": True, "forward_prefetch": 1}}),
            ("_beside", {"beside": True}, {}),
            ("_hsdp_bf16", {}, {"ranks": 4, "mesh": HSDP, "mixed_precision": REDUCED_IN_BF16}),
            ("_to_two", {}, {"ranks": 4, "reshard_after_forward": 2}),
        )
    ),
    # A layer is gathered ahead, behind all others, and never used: the end of the backward waits for it.
    *(
        equivalence_settings.case(
            f"gathered_for_nothing{name}",
            arguments={"unused": [0]},
            fsdp2={"backward_prefetch_lists": [{"unit": "layers.1", "prefetch": ["layers.0"]}], **more},
        )
        for name, more in {"": {}, "_async": {"unshard_async_op": True}}.items()
    ),
    # Forwards on a stream beside the one that calls backward and steps.
    *(
        equivalence_settings.case(f"beside{name}", fsdp2={"beside": True, **more}, **fields)
        for name, more, fields in (
            ("", {}, {}),
            ("_bf16", {}, {"mixed_precision": BF16}),
            ("_hsdp_bf16", {}, {"ranks": 4, "mesh": HSDP, "mixed_precision": REDUCED_IN_BF16}),
            ("_in_chunks", {}, {"arguments": equivalence_settings.CHUNKS, "units": equivalence_settings.GROUPED_HEAD}),
        )
    ),
    # Two reductions of a group before the end of its iteration.
    *(
        equivalence_settings.case(
            f"reduces_twice{name}",
            program=[[
                setter("set_is_last_backward", False), *micro(0),
                setter("set_is_last_backward", True), *micro(1), *END,
            ]],
            **fields,
        )
        for name, fields in {
            "": {},
            "_hsdp": {"ranks": 4, "mesh": HSDP},
            "_hsdp_bf16": {"ranks": 4, "mesh": HSDP, "mixed_precision": REDUCED_IN_BF16},
            "_hook_bf16": {"fsdp2": {"reduce_hook_stream": True}, "mixed_precision": REDUCED_IN_BF16},
        }.items()
    ),
    # The head's gathered parameters are left when the first backward, which is not the last, ends.
    equivalence_settings.case(
        "in_chunks_not_last",
        arguments=equivalence_settings.CHUNKS,
        units=equivalence_settings.GROUPED_HEAD,
        program=[[
            setter("set_is_last_backward", False), *micro(0), setter("set_is_last_backward", True), *micro(1), *END,
        ]],
    ),
    # The last layer's gradients wait for the all-reduce, and the second micro-batch has one more.
    equivalence_settings.case(
        "repacked",
        ranks=4,
        mesh=HSDP,
        mixed_precision=REDUCED_IN_BF16,
        program=[[
            setter("set_requires_all_reduce", False, "layers.2"),
            {"call": "trains", "module": "layers.2.up", "value": False},
            *micro(0), {"call": "trains", "module": "layers.2.up", "value": True},
            *micro(1), setter("set_requires_all_reduce", True, "layers.2"), *micro(2), *END,
        ]],
    ),
    equivalence_settings.case("two_roots", fsdp2={"shares_streams": True}),
]


MORE_OF_FSDP1 = [
    flat_settings.case(name, **fields)
    for name, fields in {
        "no_shard_offload": {"sharding": "no_shard", "cpu_offload": True},
        "no_shard_offload_bf16": {"sharding": "no_shard", "cpu_offload": True, "mixed_precision": BF16},
        # No copy of gradients for which the host waits stands between the layers.
        "no_shard_offload_frozen": {
            "sharding": "no_shard", "cpu_offload": True, "arguments": {"frozen": ["layers"]},
        },
        "no_shard_offload_evaluates": {"sharding": "no_shard", "cpu_offload": True, **flat_settings.evaluating()},
        # Modules let go of the device's copy behind each forward. Without gradients nobody else holds it.
        "no_shard_offload_evaluates_orig": {
            "sharding": "no_shard", "cpu_offload": True, "use_orig_params": True, **flat_settings.evaluating(),
        },
        "no_shard_reduced_in_bf16": {"sharding": "no_shard", "mixed_precision": REDUCED_IN_BF16},
        "unshard_called": {"program": [[{"call": "unshards"}, *micro(0), *END]]},
        "summoned": {"program": [[*micro(0), *END, {"call": "summons"}]]},
        "summoned_bf16": {"mixed_precision": BF16, "program": [[*micro(0), *END, {"call": "summons"}]]},
        "summoned_before_step": {"program": [[*micro(0), {"call": "summons"}, *END]]},
        "offload_hybrid_bf16": {
            "cpu_offload": True, "sharding": "hybrid_shard", "ranks": 4, "mesh": HSDP, "mixed_precision": BF16,
        },
    }.items()
]


class OnDevice:
    """A training whose inputs are on the device before it begins: a copy from the host is waited for, and orders what
    was before it. Nothing beside the steps reads what FSDP made."""

    def prepare(self) -> None:
        self.inputs = {
            (step, number): tree_map_only(
                torch.Tensor, lambda tensor: tensor.cuda(), equivalence.inputs_of(self.case.model, 100 * step + number)
            )
            for step in range(self.case.steps)
            for number in range(MOST_MICROBATCHES)
        }
        torch.cuda.synchronize()

    def forward(self, number: int, place: str, call: dict, seen: dict) -> None:
        microbatch = call.get("microbatch", 0)
        args, kwargs = self.changed(self.inputs[number, microbatch])
        self.prepare_forward(call)
        with contextlib.nullcontext() if self.has_grad(call) else torch.no_grad():
            self.losses[microbatch] = equivalence.loss_of(self.model(*args, **kwargs))

    def prepare_forward(self, call: dict) -> None:
        pass

    def changed(self, inputs):
        return inputs

    def backward(self, number: int, place: str, call: dict, seen: dict) -> None:
        losses = [self.losses.pop(microbatch) for microbatch in call.get("microbatches", [0])]
        sum(losses[1:], losses[0]).backward()

    def optimizer_step(self, number: int, place: str, call: dict, seen: dict) -> None:
        if self.case.clip is not None:
            self.clip_norm()
        self.optimizer.step()

    def clip_norm(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)


class RacyTrainer(OnDevice, equivalence.Trainer):
    """By FSDP2."""

    def optimizer_step(self, number: int, place: str, call: dict, seen: dict) -> None:
        super().optimizer_step(number, place, call, seen)
        if self.case.strategy.get("fsdp2", {}).get("post_optimizer_event"):
            self.model.set_post_optim_event(torch.cuda.current_stream().record_event())

    @contextlib.contextmanager
    def beside(self, beside: bool = True):
        """On another stream, behind what the current one has."""
        if not beside:
            yield
            return
        if not hasattr(self, "stream"):
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def is_beside(self) -> bool:
        return bool(self.case.strategy.get("fsdp2", {}).get("beside"))

    def forward(self, number: int, place: str, call: dict, seen: dict) -> None:
        with self.beside(self.is_beside()):
            super().forward(number, place, call, seen)

    def backward(self, number: int, place: str, call: dict, seen: dict) -> None:
        super().backward(number, place, call, seen)
        if self.is_beside():
            self.prepares_a_batch()

    def changed(self, inputs):
        """An input that needs no gradient lets its unit reduce at the end, on the stream that called backward. FSDP2
        drops gradients of the other stream there, and what that stream is given next races (race-figures.md)."""
        if not self.is_beside():
            return inputs
        return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(), inputs)

    def prepares_a_batch(self) -> None:
        """On the stream of the forwards, which nothing of the current one has to wait for."""
        with torch.cuda.stream(self.stream):
            torch.zeros(64, device="cuda")

    def fails_in_forward(self, number: int, place: str, call: dict, seen: dict) -> None:
        """A forward that raises in its second layer, and FSDP2's way on from there."""

        def fail(*_arguments):
            raise Failure

        handle = self.model.layers[call.get("layer", 1)].register_forward_hook(fail)
        try:
            with self.beside(call.get("beside", False)):
                self.forward(number, place, call, seen)
        except Failure:
            self.model.reset_iter_state()
        handle.remove()

    def fails_in_backward(self, number: int, place: str, call: dict, seen: dict) -> None:
        """A backward that raises in its last layer, or in the one that the call names."""

        def fail(_gradient):
            raise Failure

        layer = self.model.layers[call.get("layer", 0)]
        handle = layer.register_forward_hook(lambda _m, _a, output: output.register_hook(fail) and None)
        with self.beside(call.get("beside", False)):
            self.forward(number, place, call, seen)
        handle.remove()
        try:
            with self.beside(call.get("beside", False)):
                self.backward(number, place, call, seen)
        except Failure:
            self.model.reset_iter_state()
        if call.get("beside"):
            self.prepares_a_batch()

    def trains(self, number: int, place: str, call: dict, seen: dict) -> None:
        for parameter in self.model.get_submodule(call["module"]).parameters():
            parameter.requires_grad_(call["value"])


class RacyFlatTrainer(OnDevice, flat_equivalence.FlatTrainer):
    """By FSDP1."""

    def prepare_forward(self, call: dict) -> None:
        self.model.train(call.get("training", self.has_grad(call)))

    def clip_norm(self) -> None:
        self.model.clip_grad_norm_(self.case.clip)

    def unshards(self, number: int, place: str, call: dict, seen: dict) -> None:
        """Lets the forward gather a layer before it asks for it; before the first forward it has no streams."""
        if number == 0:
            return
        stem, layer = self.model.stem, self.model.layers[0]

        def gather(*_arguments):
            layer._wait_unshard_streams_on_current_stream()
            layer._unshard(async_op=True)
            hook.remove()

        hook = stem.register_forward_pre_hook(gather)

    def summons(self, number: int, place: str, call: dict, seen: dict) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with torch.no_grad(), FullyShardedDataParallel.summon_full_params(self.model):
            for parameter in self.model.parameters():
                parameter.mul_(0.5)


class Failure(Exception):
    pass


def _more_knobs(case: Case, model: torch.nn.Module) -> None:
    knobs = case.strategy.get("fsdp2", {})
    if count := knobs.get("input_buffers"):
        model.set_reduce_scatter_max_input_buffers(count)
    if knobs.get("separate_reduce_group"):
        model.set_separate_reduce_scatter_group(True)
    if knobs.get("from_process_group"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    if knobs.get("reduce_unused"):
        model.set_reduce_scatter_unused_params(True)
    if knobs.get("steps_in_backward"):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: p._local_tensor.add_(p.grad._local_tensor, alpha=-0.1)
            )
    if knobs.get("reduce_hook") or knobs.get("reduce_hook_stream"):
        stream = torch.cuda.Stream() if knobs.get("reduce_hook_stream") else None
        for unit in model.modules():
            if hasattr(unit, "set_all_reduce_hook"):
                unit.set_all_reduce_hook(lambda gradient: gradient.mul_(2), stream=stream)


def train_fsdp2(case: Case) -> None:
    model = equivalence.make_model(case)
    mesh = equivalence.make_mesh(case)
    with pinned_memory(case):
        equivalence.with_fsdp2(case, model, mesh)
    _more_knobs(case, model)
    trainer = RacyTrainer(case, model, equivalence.Fsdp2Calls(model))
    trainer.prepare()
    for step in range(case.steps):
        trainer.step(step)


@contextlib.contextmanager
def pinned_memory(case: Case):
    """The adapter's suites offload to memory that is not pinned."""
    import torch.distributed.fsdp as fsdp

    original = fsdp.CPUOffloadPolicy
    if "pin_memory" not in case.strategy:
        fsdp.CPUOffloadPolicy = lambda pin_memory=True: original(pin_memory=True)
    try:
        yield
    finally:
        fsdp.CPUOffloadPolicy = original


def train_fsdp1(case: Case) -> None:
    model = equivalence.make_model(case)
    if flat_equivalence.steps_in_backward(case):
        flat_equivalence.give_optimizers(model)
    wrapped = flat_equivalence.with_fsdp1(case, model, equivalence.make_mesh(case))
    calls = flat_equivalence.Fsdp1Calls(wrapped)
    trainer = RacyFlatTrainer(case, wrapped, calls, flat_equivalence._fsdp1_clip)
    trainer.prepare()
    for step in range(case.steps):
        trainer.step(step)


@dataclasses.dataclass(frozen=True)
class Ddp:
    name: str
    options: dict
    accumulate: bool = False
    hook: str = ""
    ranks: int = 2


DDP = [
    Ddp("default", {}),
    Ddp("small_buckets", {"bucket_cap_mb": 0.001}),
    Ddp("small_buckets_accumulate", {"bucket_cap_mb": 0.001}, accumulate=True),
    Ddp("bucket_views", {"gradient_as_bucket_view": True}),
    Ddp("bucket_views_small_accumulate", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, accumulate=True),
    Ddp("static_graph", {"static_graph": True, "bucket_cap_mb": 0.001}),
    Ddp("find_unused", {"find_unused_parameters": True, "bucket_cap_mb": 0.001}),
    Ddp("bf16_hook", {"bucket_cap_mb": 0.001}, hook="bf16"),
    Ddp("fp16_hook_views", {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}, hook="fp16"),
    Ddp("broadcast_buffers", {"broadcast_buffers": True}),
]


def train_ddp(case: Ddp) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = equivalence.build("mlp", {"layers": 4, "width": 64, "hidden": 64}).cuda()
    model.register_buffer("running", torch.zeros(8, device="cuda"))
    ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], **case.options)
    if case.hook:
        ddp.register_comm_hook(None, getattr(default_hooks, f"{case.hook}_compress_hook"))
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
    inputs = [tuple(tensor.cuda() for tensor in equivalence.inputs_of("mlp", step)[0]) for step in range(3)]
    torch.cuda.synchronize()
    for step in range(3):
        for last in (False, True) if case.accumulate else (True,):
            with contextlib.nullcontext() if last else ddp.no_sync():
                equivalence.loss_of(ddp(*inputs[step])).backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


KINDS = {
    "fsdp2": (train_fsdp2, equivalence_cases.ALL + MORE_OF_FSDP2, equivalence_random.make_case),
    "fsdp1": (train_fsdp1, flat_settings.CASES + MORE_OF_FSDP1, flat_random.make_case),
    "ddp": (train_ddp, DDP, None),
}


def cases_of(kind: str, ranks: int, seeds: range, only: list[str]) -> list:
    """On so many ranks: those of the lists, or the random ones of the seeds. Named ones run on any number."""
    _train, named, make = KINDS[kind]
    if only:
        by_name = {case.name: case for case in named}
        return [dataclasses.replace(by_name[name], ranks=ranks) for name in only]
    every = named if len(seeds) == 0 else [make(seed) for seed in seeds]
    return [case for case in every if case.ranks == ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases, on as many ranks as there are")
    parser.add_argument(
        "--seeds", nargs=2, type=int, default=(0, 0), help="random cases: the first and behind the last"
    )
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    train = KINDS[options.kind][0]
    done, failed = 0, []
    for case in cases_of(options.kind, dist.get_world_size(), range(*options.seeds), options.only):
        try:
            train(case)
            done += 1
        except Exception as error:
            failed.append(f"failed {case.name}: {type(error).__name__}: {str(error)[:200]}")
        torch.cuda.synchronize()
        gc.collect()
    print(f"trained {done}", *failed, sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

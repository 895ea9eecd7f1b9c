# SPDX-License-Identifier: Apache-2.0
"""Edges of PyTorch 2.15's FSDP2 and FSDP1, each of which mutations.py takes out: waits of streams, of events and of the
host, records of events, record_stream, tensors that are held.

An edge is one statement of one function, as ast.unparse writes it, and what stands in its place. `cases` are settings
(settings.py) that go through it. An edge without which nothing races is `implied`, and says
what takes its place: the edges `beside` order the same accesses, and without these as well there are more races than
without these alone. If `beside` is empty, none are known.
"""

from __future__ import annotations

import dataclasses

FSDP2 = "torch.distributed.fsdp._fully_shard"
GROUP, COLLECTIVES, STATE = f"{FSDP2}._fsdp_param_group", f"{FSDP2}._fsdp_collectives", f"{FSDP2}._fsdp_state"
RUNTIME, FLAT = "torch.distributed.fsdp._runtime_utils", "torch.distributed.fsdp._flat_param"
SUMMON = "torch.distributed.fsdp._unshard_param_utils"


@dataclasses.dataclass(frozen=True)
class Edge:
    name: str
    module: str
    where: str  # qualified name of the function
    statement: str
    cases: tuple[str, ...]
    instead: str = "pass"
    count: int = 1  # how often the function has the statement
    which: int = -1  # of these; -1: all
    implied: str = ""  # why nothing races without it
    beside: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "fsdp2" if self.module.startswith(FSDP2) else "fsdp1"


def _edges(module: str, where: str, *edges: tuple) -> list[Edge]:
    """(name, statement, cases, further fields)."""
    return [
        Edge(name, module, where, statement, tuple(cases.split()), **(more[0] if more else {}))
        for name, statement, cases, *more in edges
    ]


PLAIN = "default bf16 keep_after_forward"
REDUCES_TWICE = "reduces_twice_hsdp reduces_twice_hsdp_bf16 reduces_twice_hook_bf16"
HSDP = "hsdp hsdp_bf16 pinned_offload_hsdp_bf16 hsdp_accumulate_partial_bf16"

_GATHER = (
    "self._all_gather_result = foreach_all_gather(self.fsdp_params, self._all_gather_process_group, async_op, "
    "*self.comm_ctx.get_all_gather_streams(async_op, self._training_state), self.device, self._all_gather_comm)"
)
_DROP = (
    "[(p._setattr_on_modules(p.sharded_param), setattr(p, '_sharded_post_forward_param', None), "
    "setattr(p, '_sharded_post_forward_param_data', None)) for p in self.fsdp_params]"
)

_FSDP2 = [
    *_edges(
        STATE, "FSDPState._root_pre_forward",
        ("optimizer_event_copy_in", "self._comm_ctx.all_gather_copy_in_stream.wait_event(event)",
         "post_optimizer_event"),
        ("optimizer_event_gather", "self._comm_ctx.all_gather_stream.wait_event(event)", "post_optimizer_event"),
        ("optimizer_copy_in", "self._comm_ctx.all_gather_copy_in_stream.wait_stream(current_stream)", PLAIN),
        ("optimizer_gather", "self._comm_ctx.all_gather_stream.wait_stream(current_stream)", PLAIN),
    ),
    *_edges(
        COLLECTIVES, "foreach_all_gather",
        ("copy_in_gather", "all_gather_stream.wait_stream(all_gather_copy_in_stream)", PLAIN),
        ("gather_event", "all_gather_event = all_gather_stream.record_event()", PLAIN,
         {"instead": "all_gather_event = None"}),
    ),
    *_edges(
        COLLECTIVES, "foreach_all_gather_copy_out",
        ("gather_copy_out", "device_handle.current_stream().wait_event(all_gather_event)", PLAIN),
        ("gather_work", "all_gather_work.wait()", "async_unshard user_unshard_async"),
    ),
    *_edges(
        GROUP, "FSDPCommContext.wait_all_gather_streams_on_event",
        ("copied_out_copy_in", "self.all_gather_copy_in_stream.wait_event(event)", PLAIN),
        ("copied_out_gather", "self.all_gather_stream.wait_event(event)", PLAIN),
    ),
    *_edges(
        GROUP, "FSDPCommContext.release_all_gather_state_for_comm_reuse",
        ("release_for_reuse", "self.wait_all_gather_streams_on_event(all_gather_state.event)", PLAIN),
    ),
    *_edges(
        GROUP, "FSDPCommContext.release_all_gather_state_on_current_stream",
        ("release_on_current", "self.device_handle.current_stream().wait_event(all_gather_state.event)",
         "grouped_head_in_chunks fails_in_forward beside_in_chunks fails_in_forward_beside"),
    ),
    *_edges(
        GROUP, "FSDPParamGroup.unshard",
        ("resharded_gather", "self.comm_ctx.wait_all_gather_streams_on_event(self._reshard_after_forward_event)",
         "reshard_to_two reshard_to_two_bf16"),
        ("resharded_held", _GATHER, "reshard_to_two reshard_to_two_bf16", {"instead": f"{_GATHER}; {_DROP}"}),
    ),
    *_edges(
        GROUP, "FSDPParamGroup.reshard",
        ("resharded_event", "self._reshard_after_forward_event.record()", "reshard_to_two reshard_to_two_bf16"),
    ),
    *_edges(
        GROUP, "FSDPParamGroup.wait_for_unshard",
        ("copied_out_event", "all_gather_copy_out_event.record()", PLAIN),
        ("gather_result_held",
         "self.comm_ctx.all_gather_state = AllGatherState(self._all_gather_result, all_gather_copy_out_event)", PLAIN,
         {"instead": "self.comm_ctx.all_gather_state = AllGatherState(None, all_gather_copy_out_event)"}),
        ("copied_out_backward", "self.comm_ctx.wait_all_gather_streams_on_event(all_gather_copy_out_event)",
         f"{PLAIN} async_unshard"),
    ),
    *_edges(
        GROUP, "FSDPParamGroup._reset_iter_state",
        ("reset_gather_event", "current_stream.wait_event(event)",
         "fails_in_forward_prefetched fails_in_backward_prefetched"),
        ("reset_gather_work", "work.wait()", "fails_in_forward_async"),
        ("reset_reduced", "current_stream.wait_event(self._post_reduce_event)",
         "fails_in_backward fails_in_backward_hsdp_bf16"),
        ("reset_all_reduced", "current_stream.wait_event(self._all_reduce_state.event)", "fails_in_backward_hsdp_bf16"),
        ("reset_resharded", "self.comm_ctx.wait_all_gather_streams_on_event(self._reshard_after_forward_event)",
         "fails_in_forward_to_two"),
    ),
    *_edges(
        GROUP, "FSDPParamGroup.post_backward",
        ("input_reused", "oldest.allocation_stream.wait_event(oldest.event)", f"{PLAIN} input_buffers_2"),
        ("own_last_reduction", "self._wait_for_post_backward()", f"reduces_twice {REDUCES_TWICE}"),
        ("partial_repacked", "rs_stream.wait_stream(self.device_handle.current_stream())",
         "repacked"),
        ("last_reduction_kept", "self.comm_ctx._last_post_reduce_events[post_reduce_stream] = self._post_reduce_event",
         f"{PLAIN} hsdp_bf16"),
        ("input_held",
         "self.comm_ctx.reduce_scatter_states.append(ReduceScatterState(reduce_scatter_input, reduce_scatter_event, "
         "self.device_handle.current_stream(), self))", PLAIN,
         {"instead": "self.comm_ctx.reduce_scatter_states.append(ReduceScatterState(None, reduce_scatter_event, "
                     "self.device_handle.current_stream(), self)); del reduce_scatter_input"}),
        ("partial_group", "self.device_handle.current_stream().wait_event(self._post_reduce_event)",
         "grouped_head_in_chunks grouped_head_in_chunks_accumulates grouped_head_in_chunks_hsdp"),
        ("all_reduced_held", "self._all_reduce_state = AllReduceState(all_reduce_input, all_reduce_event)",
         f"{HSDP} reduce_hook_on_stream"),
    ),
    *_edges(
        GROUP, "FSDPParamGroup._wait_for_post_backward",
        ("own_reduced", "self.device_handle.current_stream().wait_event(self._post_reduce_event)",
         f"reduces_twice {REDUCES_TWICE}"),
        ("own_all_reduced", "self.device_handle.current_stream().wait_event(self._all_reduce_state.event)",
         REDUCES_TWICE),
    ),
    *_edges(
        GROUP, "FSDPParamGroup.finalize_backward",
        ("offloaded_host", "fsdp_param.grad_offload_event.synchronize()", "pinned_offload pinned_offload_hsdp"),
        ("for_nothing_event", "self.device_handle.current_stream().wait_event(event)", "gathered_for_nothing"),
        ("for_nothing_work", "work.wait()", "gathered_for_nothing_async"),
    ),
    *_edges(
        COLLECTIVES, "foreach_reduce",
        ("gradients_reduce", "reduce_scatter_stream.wait_stream(current_stream)", PLAIN),
        ("reduce_event", "reduce_scatter_event = reduce_scatter_stream.record_event()", PLAIN,
         {"instead": "reduce_scatter_event = None"}),
        ("reduce_all_reduce", "all_reduce_stream.wait_stream(reduce_scatter_stream)", HSDP, {"count": 2, "which": 0}),
        ("reduce_hook_wait", "all_reduce_stream.wait_stream(reduce_scatter_stream)",
         "reduce_hook reduce_hook_on_stream", {"count": 2, "which": 1}),
        ("all_reduce_input", "all_reduce_input = reduce_output", HSDP, {"count": 2, "which": 0}),
        ("hook_input", "all_reduce_input = reduce_output", "reduce_hook_bf16 reduce_hook_on_stream_bf16",
         {"count": 2, "which": 1}),
        ("all_reduce_event", "all_reduce_event = all_reduce_stream.record_event()", REDUCES_TWICE,
         {"count": 2, "which": 0, "instead": "all_reduce_event = torch.cuda.Event()"}),
        ("hook_event", "all_reduce_event = all_reduce_stream.record_event()", "reduces_twice_hook_bf16",
         {"count": 2, "which": 1, "instead": "all_reduce_event = torch.cuda.Event()"}),
        ("offload_event", "fsdp_param.grad_offload_event = post_reduce_stream.record_event()",
         "pinned_offload pinned_offload_hsdp"),
        ("offload_event_reduce", "fsdp_param.grad_offload_event = post_reduce_stream.record_event()",
         "pinned_offload_hsdp", {"instead": "fsdp_param.grad_offload_event = reduce_scatter_stream.record_event()"}),
        ("offload_blocks",
         "non_blocking = fsdp_param.pin_memory and (not to_accumulate_grad) and (not has_post_acc_grad_hook)",
         "pinned_offload_accumulate",
         {"instead": "non_blocking = fsdp_param.pin_memory and not has_post_acc_grad_hook"}),
        ("offload_blocks_hooks",
         "non_blocking = fsdp_param.pin_memory and (not to_accumulate_grad) and (not has_post_acc_grad_hook)",
         "pinned_hooks", {"instead": "non_blocking = fsdp_param.pin_memory and not to_accumulate_grad"}),
        ("reduced_event", "post_reduce_event = post_reduce_stream.record_event()", f"{PLAIN} hsdp_bf16",
         {"instead": "post_reduce_event = torch.cuda.Event()"}),
        ("partial_event",
         "return (reduce_scatter_input, reduce_scatter_event, post_reduce_stream, post_reduce_stream.record_event(), "
         "all_reduce_input, all_reduce_event, partial_reduce_output)",
         "hsdp_accumulate_partial hsdp_accumulate_partial_bf16",
         {"instead": "return (reduce_scatter_input, reduce_scatter_event, post_reduce_stream, torch.cuda.Event(), "
                     "all_reduce_input, all_reduce_event, partial_reduce_output)"}),
    ),
    *_edges(
        STATE, "FSDPState._post_forward",
        ("forward_ends", "self._comm_ctx.release_all_gather_state_for_comm_reuse()", PLAIN,
         {"instead": "self._comm_ctx.all_gather_state = None"}),
    ),
    *_edges(
        STATE, "FSDPState._root_post_backward_final_callback",
        ("backward_ends_partly", "self._comm_ctx.release_all_gather_state_on_current_stream()",
         "in_chunks_not_last", {"instead": "self._comm_ctx.all_gather_state = None"}),
    ),
    *_edges(
        STATE, "FSDPState._end_backward_iteration",
        ("backward_ends_reduced", "current_stream.wait_event(event)", f"{PLAIN} hsdp_bf16"),
        ("backward_ends_gathered", "self._comm_ctx.release_all_gather_state_on_current_stream()",
         "grouped_head_in_chunks beside_in_chunks", {"instead": "self._comm_ctx.all_gather_state = None"}),
        ("backward_ends_input", "rs_state.allocation_stream.wait_event(rs_state.event)",
         f"{PLAIN} input_buffers_4_bf16 beside"),
    ),
    *_edges(
        STATE, "FSDPState._reset_iter_state",
        ("reset_gathered", "self._comm_ctx.release_all_gather_state_on_current_stream()",
         "fails_in_forward fails_in_forward_beside",
         {"instead": "self._comm_ctx.all_gather_state = None"}),
        ("reset_input", "rs_state.allocation_stream.wait_event(rs_state.event)",
         "fails_in_backward fails_in_backward_beside"),
        ("reset_last_reduced", "current_stream.wait_event(event)", "fails_in_backward fails_in_backward_hsdp_bf16"),
    ),
    *_edges(
        f"{FSDP2}._fully_shard", "_UnshardHandleImpl.wait",
        ("unshard_handle", "fsdp_param_group.wait_for_unshard()", "user_unshard user_unshard_async"),
    ),
]

SHARDED = "default bf16 default_orig zero2_bf16"

_FSDP1 = [
    *_edges(
        RUNTIME, "_unshard",
        ("flat_cast_gather", "unshard_stream.wait_stream(pre_unshard_stream)", "bf16 offload bf16_orig"),
        ("flat_limiter", "event.synchronize()", "default bf16 default_orig"),
    ),
    *_edges(RUNTIME, "_reshard", ("flat_free_event", "free_event.record()", "default bf16 default_orig")),
    *_edges(
        RUNTIME, "_pre_forward_unshard",
        ("flat_gather_event", "current_stream.wait_event(state._unshard_event)", "unshard_called"),
        ("flat_gather_forward", "current_stream.wait_stream(state._unshard_stream)", SHARDED),
    ),
    *_edges(
        RUNTIME, "_wait_for_computation_stream",
        ("flat_optimizer_gather", "unshard_stream.wait_stream(computation_stream)", SHARDED),
        ("flat_optimizer_cast", "pre_unshard_stream.wait_stream(computation_stream)", "bf16 bf16_orig"),
    ),
    *_edges(
        RUNTIME, "_pre_backward_hook",
        ("flat_gather_backward", "state._device_handle.current_stream().wait_stream(state._unshard_stream)", SHARDED),
    ),
    *_edges(
        RUNTIME, "_post_backward_hook",
        ("flat_gradient_reduce", "state._post_backward_stream.wait_stream(state._device_handle.current_stream())",
         SHARDED),
        ("flat_gradient_used", "_no_dispatch_record_stream(autograd_computed_grad, state._post_backward_stream)",
         SHARDED),
    ),
    *_edges(
        RUNTIME, "_reduce_grad",
        ("flat_gradient_cleared", "flat_param.grad = None", "accumulate accumulate_bf16"),
        ("flat_reduce_all_reduce", "state._all_reduce_stream.wait_stream(state._post_backward_stream)",
         "hybrid hybrid_orig"),
        ("flat_all_reduce_used", "_no_dispatch_record_stream(new_sharded_grad, state._all_reduce_stream)",
         "hybrid hybrid_orig accumulate_hybrid offload_hybrid"),
    ),
    *_edges(
        RUNTIME, "_offload_grad",
        ("flat_offload_used", "_no_dispatch_record_stream(grad_to_offload.data, state._post_backward_stream)",
         "offload offload_hybrid offload_no_sync"),
        ("flat_offload_blocks",
         "non_blocking = handle.uses_sharded_strategy and (not handle._has_optim_in_backward)",
         "optimizer_in_backward_offload", {"instead": "non_blocking = handle.uses_sharded_strategy"}),
    ),
    *_edges(
        RUNTIME, "_cast_grad_to_param_dtype",
        ("flat_cast_used", "_no_dispatch_record_stream(low_prec_grad_data, state._device_handle.current_stream())",
         "bf16_reduce no_shard_bf16 no_shard_reduced_in_bf16"),
    ),
    *_edges(
        RUNTIME, "_post_backward_final_callback",
        ("flat_reduced", "current_stream.wait_stream(root_state._post_backward_stream)", SHARDED),
        ("flat_all_reduced", "current_stream.wait_stream(root_state._all_reduce_stream)", "hybrid hybrid_orig"),
        ("flat_offloaded_host", "state._device_handle.current_stream().synchronize()", "offload offload_orig"),
    ),
    *_edges(
        FLAT, "FlatParamHandle._all_gather_flat_param",
        ("flat_shard_used",
         "_no_dispatch_record_stream(sharded_flat_param, self._device_handle.current_stream())",
         "offload offload_orig"),
    ),
    *_edges(
        FLAT, "FlatParamHandle._free_low_precision_sharded_param",
        ("flat_low_used",
         "_no_dispatch_record_stream(self.flat_param._mp_shard, self._device_handle.current_stream())",
         "bf16 bf16_orig no_shard_bf16"),
    ),
    *_edges(
        FLAT, "FlatParamHandle._free_unsharded_flat_param",
        ("flat_unsharded_used",
         "_no_dispatch_record_stream(unsharded_flat_param, self._device_handle.current_stream())", SHARDED),
    ),
    *_edges(
        FLAT, "FlatParamHandle._use_sharded_flat_param",
        ("flat_no_shard_used",
         "_no_dispatch_record_stream(flat_param.data, self._device_handle.current_stream())",
         "no_shard_offload no_shard_offload_evaluates_orig"),
    ),
    *_edges(
        SUMMON, "_unshard_fsdp_state_params",
        ("flat_summon", "state._device_handle.synchronize()", "summoned summoned_bf16"),
    ),
]

# Why nothing races without the edge, and the edges that order the same.
_BY_COPY_IN = "the gather's stream waits for the copy-in's, and that one for the same"
_HELD_BY_WORK = "ProcessGroupNCCL holds the tensors of an asynchronous collective until it is over"
_LATER_EVENT = "the event of the whole reduction is behind it on the same stream"
_NEXT_FORWARD = (
    "the next gather waits for the current stream, which copied out or is behind a reduction of the one that did"
)
_FREES_BY_USE = "bounds memory: what is freed is recorded for the streams that use it"
_IMPLIED: dict[str, tuple[str, str]] = {
    "optimizer_event_gather": (_BY_COPY_IN, "copy_in_gather copied_out_gather"),
    "optimizer_gather": (_BY_COPY_IN, "copy_in_gather copied_out_gather"),
    "copied_out_gather": (_BY_COPY_IN, "copy_in_gather optimizer_gather"),
    "reset_gather_work": (_HELD_BY_WORK, ""),
    "reset_reduced": ("the wait for each stream's last reduction is behind it", "reset_last_reduced reset_all_reduced"),
    "reset_all_reduced": (_LATER_EVENT, "reset_reduced reset_last_reduced"),
    "reset_resharded": ("the group is whole shards again, which the gathers read; nothing of the reshard is used", ""),
    "reset_last_reduced": ("each group waits for its own reduction", "reset_reduced reset_all_reduced"),
    "own_all_reduced": (_LATER_EVENT, "own_reduced"),
    "all_reduce_event": (_LATER_EVENT, "own_reduced"),
    "hook_event": (_LATER_EVENT, "own_reduced"),
    "partial_group": ("the input of the reduce-scatter is held, and the rest is of the stream that reduces", ""),
    "for_nothing_work": (_HELD_BY_WORK, ""),
    "partial_event": ("what waits for the all-reduce is read by the stream that wrote it", ""),
    "backward_ends_partly": (_NEXT_FORWARD, ""),
    "backward_ends_gathered": (_NEXT_FORWARD, ""),
    "unshard_handle": ("without it the module keeps its shards, and the forward waits", ""),
    "flat_limiter": (_FREES_BY_USE, "flat_unsharded_used"),
    "flat_free_event": (_FREES_BY_USE, "flat_unsharded_used"),
    "flat_gradient_cleared": ("bounds memory: what is held for longer is handed out to nobody", ""),
    "flat_offload_used": (
        "the gradient is of that stream; of NO_SHARD the host waits for the copy; all-reduced: recorded before", ""
    ),
    "flat_summon": ("it gathers on the current stream, behind all that wrote the shards", ""),
    "flat_cast_used": ("the same memory is recorded when the gradient has been reduced", "flat_gradient_used"),
}


def _implied(edge: Edge) -> Edge:
    if edge.name not in _IMPLIED:
        return edge
    why, beside = _IMPLIED[edge.name]
    return dataclasses.replace(edge, implied=why, beside=tuple(beside.split()))


EDGES = {edge.name: _implied(edge) for edge in [*_FSDP2, *_FSDP1]}

# Faults that PyTorch had: the edge that was missing, settings that show it, and whether the proof finds it.
KNOWN: dict[str, tuple[str, tuple[str, ...], str]] = {
    "pytorch#180665": ("all_reduced_held", ("pinned_offload_hsdp",), "races"),
    "pytorch#180900": ("all_reduced_held", ("reduces_twice_hsdp_bf16",), "races"),
    "pytorch#160291": ("offload_event_reduce", ("pinned_offload_hsdp",), "races"),
    "pytorch#181218": ("partial_group", ("grouped_head_in_chunks", "grouped_head_in_chunks_accumulates"), "none"),
    "an input of a reduce-scatter that nobody holds": ("input_held", ("default",), "races"),
}

# SPDX-License-Identifier: Apache-2.0
"""Process groups without peers. NCCL's are torch's own over the device in software; Gloo's are torch's fake ones, whose
collectives end at once."""

from __future__ import annotations

from types import ModuleType

from . import device

# [Note: splits] ncclCommSplit has a colour, and no ranks: NCCL counts those that came with it. Here nobody else comes.
# So a group is made from the store, with its ranks, where torch would split it off. A script that splits itself has a
# colour that says how many ranks there are and which of them this one is: size * 2^15 + index.
_COLOR_SHIFT = 15


def patch(c10d: ModuleType) -> None:
    _patch_splits(c10d)
    _patch_gloo(c10d)
    _patch_gather(c10d)
    _watch_nccl(c10d)


def _patch_splits(c10d: ModuleType) -> None:
    def color(ranks: list[int]) -> int:
        own = c10d.get_rank()
        return (len(ranks) << _COLOR_SHIFT) + (list(ranks).index(own) if own in ranks else 0)

    def split_group(
        parent_pg: object = None,
        split_ranks: list | None = None,
        timeout: object = None,
        pg_options: object = None,
        group_desc: str | None = None,
        backend: object = None,
    ) -> object:
        parent = parent_pg or c10d._get_default_group()
        own = next((ranks for ranks in split_ranks or () if parent.rank() in ranks), None)
        if own is None:
            return c10d.GroupMember.NON_GROUP_MEMBER
        of_parent = c10d.get_process_group_ranks(parent)
        kind = backend or c10d._world.pg_map[parent][0]
        return c10d.new_group(
            [of_parent[rank] for rank in own],
            timeout,
            kind,
            pg_options,
            use_local_synchronization=True,
            group_desc=group_desc,
            device_id=parent.bound_device_id,
        )

    c10d._process_group_color = color
    if hasattr(c10d, "_get_split_source"):
        c10d._get_split_source = lambda *_group_and_backend: None
    c10d.split_group = split_group


def _patch_gloo(c10d: ModuleType) -> None:
    from torch._C._distributed_c10d import FakeProcessGroup

    class IsFake(type):  # before 2.15 c10d asks whether what it made is of this class
        def __instancecheck__(cls, backend: object) -> bool:
            return isinstance(backend, FakeProcessGroup)

    class PlayedGloo(metaclass=IsFake):
        def __new__(cls, store: object, rank: int, size: int, timeout: object = None, **_settings: object) -> object:
            options = FakeProcessGroup.Options()
            if hasattr(options, "simulate_uniform_ranks"):
                options.simulate_uniform_ranks = True
            return FakeProcessGroup._create_internal(rank, size, options)

    def monitored_barrier(group: object = None, timeout: object = None, wait_all_ranks: bool = False) -> None:
        """Every peer comes."""

    c10d.ProcessGroupGloo = PlayedGloo
    if not hasattr(FakeProcessGroup.Options(), "simulate_uniform_ranks"):
        _add_up(c10d)
        FakeProcessGroup._set_sequence_number_for_group = lambda _backend: None
    c10d.monitored_barrier = monitored_barrier
    # TORCH_DISTRIBUTED_DEBUG=DETAIL compares collectives of ranks over Gloo.
    c10d._create_process_group_wrapper = lambda wrapped_pg, *_arguments, **_settings: wrapped_pg


def _add_up(c10d: ModuleType) -> None:
    """Before 2.15 a fake group's sum is this rank's part alone."""
    own = c10d.all_reduce

    def all_reduce(
        tensor: object, op: object = c10d.ReduceOp.SUM, group: object = None, async_op: bool = False
    ) -> object:
        work = own(tensor, op, group, async_op)
        if tensor.is_cpu and op == c10d.ReduceOp.SUM:
            tensor.mul_(c10d.get_world_size(group))
        return work

    c10d.all_reduce = all_reduce


def _patch_gather(c10d: ModuleType) -> None:
    """NCCL's gather is messages to the root, and a message says nothing of what this rank gives."""
    own = c10d.gather

    def gather(tensor: object, gather_list: list | None = None, *arguments: object, **settings: object) -> object:
        work = own(tensor, gather_list, *arguments, **settings)
        for part in gather_list or ():
            if part.shape == tensor.shape:
                part.copy_(tensor)
        return work

    c10d.gather = gather


def _watch_nccl(c10d: ModuleType) -> None:
    """NCCL takes device memory when a communicator is first used. 2.15 registers its backends when a group first asks
    for them."""

    def watched(creator):
        def create(*arguments: object, **settings: object) -> object:
            backend = creator(*arguments, **settings)
            if backend is not None and backend.size() > 1:
                device.watch_communicator(backend)
            return backend

        return create

    if not hasattr(c10d, "ProcessGroupNCCL2"):
        _watch_made_at_once(c10d)
        return
    register = c10d.Backend.register_backend.__func__

    def register_backend(cls: type, name: str, func, *arguments: object, **settings: object) -> None:
        register(cls, name, watched(func) if name.lower().startswith("nccl") else func, *arguments, **settings)

    c10d.Backend.register_backend = classmethod(register_backend)
    for name, plugin in list(c10d.Backend._plugins.items()):
        if name.startswith("NCCL"):
            c10d.Backend._plugins[name] = plugin._replace(creator_fn=watched(plugin.creator_fn))


def _watch_made_at_once(c10d: ModuleType) -> None:
    """Before 2.15 a group has its backends when it is made, by the class's name."""
    make = c10d._new_process_group_helper

    def _new_process_group_helper(*arguments: object, **settings: object) -> object:
        made = make(*arguments, **settings)
        group = made[0] if isinstance(made, tuple) else made
        for kind in getattr(group, "_device_types", ()):
            backend = group._get_backend(kind)
            if isinstance(backend, c10d.ProcessGroupNCCL) and backend.size() > 1:
                device.watch_communicator(backend)
        return made

    c10d._new_process_group_helper = _new_process_group_helper

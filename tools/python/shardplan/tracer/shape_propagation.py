# SPDX-License-Identifier: Apache-2.0
"""Shape propagation of DTensor: no work of a step.

DTensor runs an operator on fake tensors of the global shape before it runs it on this rank's part, for the shape of the
result (ShardingPropagator._propagate_tensor_meta_non_cached). An operator without a strategy runs its decomposition
likewise. In a training these tensors have no data, so no kernel runs. In a trace all tensors are fake:
the recorder would see kernels of the whole model beside those of the rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch.distributed as dist

from shardplan.tracer.errors import EnvironmentProblem


def _propagations() -> list[tuple[type, str]]:
    from torch.distributed.tensor import _sharding_prop as propagation

    found = [(propagation.ShardingPropagator, "_propagate_tensor_meta_non_cached")]
    with contextlib.suppress(ImportError):  # older releases decompose nothing
        from torch.distributed.tensor._decompositions import DecompShardingStrategy

        found.append((DecompShardingStrategy, "propagate_strategy"))
    return found


@contextlib.contextmanager
def unrecorded_shapes(unrecorded: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Inside, DTensor propagates shapes in a context of `unrecorded`. Without a process group there is no DTensor."""
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name in _propagations():
            propagate = owner.__dict__.get(name)
            if propagate is None:
                raise EnvironmentProblem(
                    f"this release of torch propagates shapes of DTensors in another place than {owner.__name__}.{name}"
                )
            setattr(owner, name, _within(propagate, unrecorded))
            stack.callback(setattr, owner, name, propagate)
        yield


def _within(function: Callable, context: Callable[[], contextlib.AbstractContextManager]) -> Callable:
    @functools.wraps(function)
    def inside(*args, **kwargs):
        with context():
            return function(*args, **kwargs)

    return inside

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of kernels, by which Inductor and Triton choose one of several: nothing is computed, so no time means
anything. Each runs once (what it allocates counts) and takes the same; the first choice is taken."""

from __future__ import annotations

from types import ModuleType

_MS = 1.0


def patch_inductor(benchmarking: ModuleType) -> None:
    def once(_self: object, function, *_arguments: object, **_settings: object) -> float:
        function()
        return _MS

    for kind in vars(benchmarking).values():
        for name in ("benchmark_gpu", "benchmark_gpu_with_cuda_graph"):
            if isinstance(kind, type) and name in vars(kind):
                setattr(kind, name, once)


def patch_profiler(profiler: ModuleType) -> None:
    """CUPTI counts what a driver does, and ends the process where it is none: a profile has the host's part."""

    def without_cuda(own):
        def call(config: object, activities: set, *rest: object, **settings: object) -> object:
            kinds = {kind for kind in activities if kind != profiler.ProfilerActivity.CUDA}
            return own(config, kinds, *rest, **settings)

        return call

    for name in ("_prepare_profiler", "_enable_profiler"):
        setattr(profiler, name, without_cuda(getattr(profiler, name)))


def patch_triton(testing: ModuleType) -> None:
    def once(
        function,
        *_arguments: object,
        quantiles: list[float] | None = None,
        return_mode: str = "mean",
        **_settings: object,
    ) -> float | list[float]:
        function()
        if quantiles is not None and len(quantiles) > 1:
            return [_MS] * len(quantiles)
        return [_MS] if return_mode == "all" else _MS

    for name in ("do_bench", "do_bench_cudagraph"):
        if hasattr(testing, name):
            setattr(testing, name, once)

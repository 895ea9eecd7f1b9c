# SPDX-License-Identifier: Apache-2.0
"""A schedule made by a script: layers are gathered one ahead, and the last layer stays gathered between its forward and
its backward.

    own_schedule.py TRACE CLUSTER PLAN    writes PLAN, after it has verified and simulated it
"""

import sys

from shardplan import plan

LAYERS = ["layers.0", "layers.1", "layers.2"]


def gather(at: plan.Place, layer: str) -> None:
    output = f"{layer}.all_gather_output"
    at.allocate(output, stream="gather").copy_in(f"{layer}.param_sharded", output, stream="gather")
    at.all_gather(output, output, stream="gather").record(f"{layer}.gathered", stream="gather")


def use(at: plan.Place, layer: str) -> None:
    output, unsharded = f"{layer}.all_gather_output", f"{layer}.param_unsharded"
    at.wait(f"{layer}.gathered", stream="compute").allocate(unsharded).copy_out(output, unsharded).bind_unsharded(
        unsharded
    )
    at.record(f"{layer}.copied", stream="compute").wait(f"{layer}.copied", stream="gather").free(
        output, stream="gather"
    )


def drop(at: plan.Place, layer: str) -> None:
    at.bind_sharded(f"{layer}.param_sharded").free(f"{layer}.param_unsharded")


def reduce(at: plan.Place, layer: str) -> None:
    made, given, taken = f"{layer}.grad_unsharded", f"{layer}.reduce_scatter_input", f"{layer}.reduce_scatter_output"
    at.allocate(given).grad_copy_in(made, given).free(made).record(f"{layer}.ready", stream="compute").wait(
        f"{layer}.ready", stream="reduce"
    )
    at.allocate(taken, stream="reduce").reduce_scatter(given, taken, stream="reduce")
    at.grad_cast(taken, f"{layer}.grad_sharded", stream="reduce").free(taken, stream="reduce").record(
        f"{layer}.reduced", stream="reduce"
    )


def schedule(builder: plan.Builder) -> None:
    for stream in ("gather", "reduce"):
        builder.add_stream(stream, priority=-1)
    begin = builder.at("pre_forward", plan.ROOT).record("stepped", stream="compute").wait("stepped", stream="gather")
    gather(begin, LAYERS[0])
    for layer, ahead in zip(LAYERS, [*LAYERS[1:], None]):
        use(builder.at("pre_forward", layer), layer)
        if ahead:
            gather(builder.at("pre_forward", layer), ahead)
            drop(builder.at("post_forward", layer), layer)
    for layer, ahead in zip(LAYERS[::-1], [*LAYERS[-2::-1], None]):
        before = builder.at("pre_backward", layer)
        if layer != LAYERS[-1]:
            use(before, layer)
        if ahead:
            gather(before, ahead)
        # The inputs of the first need no gradient.
        after = builder.at("post_backward", layer) if ahead else builder.at("backward_end")
        drop(after, layer)
        reduce(after, layer)
    for layer in LAYERS[::-1]:
        builder.at("backward_end").wait(f"{layer}.reduced", stream="compute").free(f"{layer}.reduce_scatter_input")


def main(trace: str, cluster: str, path: str) -> None:
    builder = plan.new(trace, cluster=cluster, units=["layers.*"], name="last_layer_stays")
    schedule(builder)
    made = builder.build()
    for violation in made.verify():
        print(violation)
    report = made.simulate()
    print(
        f"{made.document['policy']}: step {report['step_ns'] / 1e6:.1f} ms, peak {report['memory']['peak_bytes']:,} "
        f"bytes, {len(made.verify())} violations"
    )
    made.save(path)


if __name__ == "__main__":
    main(*sys.argv[1:])

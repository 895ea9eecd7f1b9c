# SPDX-License-Identifier: Apache-2.0
"""Records what one training step of a torch.nn.Module does, on fake CUDA tensors: no GPU, no weights.

`session.trace_module` is the entry point from Python, `python -m shardplan.tracer` the command,
docs/internals/tracer.md the manual.
"""

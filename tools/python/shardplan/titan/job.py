# SPDX-License-Identifier: Apache-2.0
"""A torchtitan job as its trainer sets it up (torchtitan/trainer.py, Trainer.__init__), as rank 0 of a fake process
group: without data, weights or an optimizer."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import types
from typing import Any

import torch

from shardplan.titan import absent, muon
from shardplan.titan.configuration import configuration
from shardplan.tracer.errors import TracerError
from shardplan.tracer.fake_meshes import join_fake_group
from shardplan.tracer.muon_options import MuonOptions

_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}
_IMPLEMENTATIONS = {"fused": "fused", "foreach": "foreach", "for-loop": "for_loop"}


class Job:
    """config: torchtitan's Trainer.Config."""

    def __init__(self, words: list[str], ranks: int) -> None:
        """words: torchtitan's arguments. Raises TracerError; SystemExit where torchtitan's parser refuses them."""
        absent.stand_in()
        logging.getLogger().setLevel(logging.ERROR)  # it warns of data and checkpoints that are not there
        self.config = configuration(words, "shardplan torchtitan")
        self.ranks = ranks
        self._step = contextlib.ExitStack()
        if self.config.parallelism.spmd_backend == "full_dtensor":
            raise TracerError(
                "parallelism.spmd_backend full_dtensor is not traced (expected spmd_types or partial_dtensor)"
            )
        for name in ("local_batch_size", "seq_len"):
            if (found := getattr(self.config.training, name)) < 1:
                raise TracerError(f"training.{name} is {found} (expected 1 or more)")

    @property
    def name(self) -> str:
        spec = self.config.model_spec
        return f"{spec.name} {spec.flavor}"

    @property
    def has_experts(self) -> bool:
        from torchtitan.models.common.moe import MoE

        return any(True for _ in self.config.model_spec.model.traverse(MoE.Config))

    @property
    def batch(self) -> int:
        return self.config.training.local_batch_size

    @property
    def seq(self) -> int:
        return self.config.training.seq_len

    def parallelized(self) -> tuple[torch.nn.Module, Any]:
        """The model on meta tensors, its loss."""
        from torchtitan.components.loss import ChunkedLossWrapper
        from torchtitan.config import TORCH_DTYPE_MAP
        from torchtitan.config.override import apply_overrides
        from torchtitan.distributed import ParallelDims, utils as distributed
        from torchtitan.tools import utils

        config, spec, degrees = self.config, self.config.model_spec, self.config.parallelism
        together = math.prod(
            (degrees.data_parallel_replicate_degree, degrees.context_parallel_degree, degrees.tensor_parallel_degree)
        )
        if together > self.ranks:  # torchtitan says no more than that an assertion does not hold
            raise ValueError(f"the degrees of parallelism are {together} together, and the job has {self.ranks} ranks")
        join_fake_group(self.ranks)
        self.dims = dims = ParallelDims.from_config(config.parallelism, self.ranks)
        divisor = (dims.tp if config.parallelism.enable_sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
        if self.seq % divisor:
            raise ValueError(f"training.seq_len ({self.seq}) is no multiple of {divisor}")
        distributed.set_spmd_backend(config.parallelism.spmd_backend)
        dims.build_mesh()
        spec.model.update_from_config(config=config)
        if config.override.imports:
            apply_overrides(config.override, config)
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
            model = spec.model.build()
        loss = config.loss.build(compile_config=config.compile)
        model = spec.parallelize_fn(
            model, parallel_dims=dims, training=config.training, parallelism=config.parallelism,
            compile_config=config.compile, ac_config=config.activation_checkpoint, dump_folder=config.dump_folder,
        )
        model.train()
        if isinstance(loss, ChunkedLossWrapper):
            loss.set_lm_head(model.lm_head)
            model._skip_lm_head = True
        return model, loss

    def build(self) -> tuple:
        """The model, its inputs, its loss: the builder of a trace."""
        from torchtitan.distributed import utils

        model, loss = self.parallelized()
        inputs, labels, more = self._batch(model)
        self._step.enter_context(utils.get_spmd_context(parallel_dims=self.dims)())
        valid = torch.ones((), dtype=torch.int64, device="cuda")
        positions = {"positions": more["positions"]} if "positions" in more else {}
        first = next(iter(inspect.signature(model.forward).parameters))
        return model, {first: inputs, **more}, lambda output: loss(output, labels, valid, **positions)[0]

    def _batch(self, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """A rank's part of a batch of the data loader, as the trainer gives it; positions begin once a sample."""
        shape = (self.batch, self.seq)
        tokens, labels = (torch.zeros(shape, dtype=torch.long, device="cuda") for _ in range(2))
        positions = torch.arange(self.seq, device="cuda").expand(shape)
        trainer = types.SimpleNamespace(
            config=self.config, model_config=self.config.model_spec.model, model_parts=[model],
            parallel_dims=self.dims, device=torch.device("cuda"), ntokens_seen=0,
        )
        kind = type(self.config)._owner
        return kind.post_dataloading_process(trainer, {"input": tokens, "positions": positions}, labels)

    @contextlib.contextmanager
    def running(self):
        """Inside the job is built, and its step may run: the step's contexts end here. Backwards run in the thread that
        has the meshes, as torchtitan's init_distributed sets it."""
        with self._step, torch.autograd.set_multithreading_enabled(False):
            yield

    def micro_batches(self) -> int:
        """Their number in a step (gradient accumulation)."""
        of_all_ranks = self.batch * self.dims.dp_replicate * self.dims.dp_shard
        wanted = self.config.training.global_batch_size
        if wanted < 0:
            return 1
        if wanted == 0 or wanted % of_all_ranks:
            raise TracerError(
                f"training.global_batch_size is {wanted}, and the ranks' batches are {of_all_ranks} together"
            )
        return wanted // of_all_ranks

    def optimizer(self, fqns: list[str]) -> tuple[dict[str, Any], MuonOptions | None]:
        """The strategy's field, and the steps of Muon that the trace has to have. fqns: of the model's parameters that
        train."""
        config = self.config.optimizer
        groups = getattr(config, "param_groups", [])
        kinds = {group.optimizer_name for group in groups}
        others = kinds - {muon.NAME}
        if len(others) > 1 or not kinds or not others <= _OPTIMIZERS.keys():
            raise TracerError(f"a strategy document has no optimizer {' and '.join(sorted(kinds)) or 'of this job'}")
        if config.implementation not in _IMPLEMENTATIONS:
            raise TracerError(f"a strategy document has no optimizer.implementation {config.implementation}")
        fields: dict[str, Any] = {"kind": "none"}
        for kind in others:
            fields = {"kind": _OPTIMIZERS[kind], "implementation": _IMPLEMENTATIONS[config.implementation]}
        if any(group.optimizer_kwargs.get("amsgrad") for group in groups):
            fields["amsgrad"] = True
        if muon.NAME not in kinds:
            return fields, None
        fields["muon"], options = muon.field(config, muon.stepped_by(groups, fqns)[muon.NAME])
        return fields, options

    def compiles(self, component: str) -> bool:
        return self.config.compile.enable and component in self.config.compile.components

    def notes(self) -> list[str]:
        """The plan has no part of these, and a training of the job does."""
        found = []
        if not self.config.training.disable_cuda_graphs:
            found.append("the step is planned without CUDA graphs (training.disable_cuda_graphs)")
        if self.compiles("loss"):
            found.append("the compiled loss is traced as it is written (compile.components)")
        return found

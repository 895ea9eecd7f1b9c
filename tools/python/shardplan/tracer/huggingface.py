# SPDX-License-Identifier: Apache-2.0
"""Models from a Hugging Face architecture config: no weights, no network.

The class is the one the config's `architectures` names; the batch is what a user of that kind of model gives it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from shardplan import files
from shardplan.tracer.errors import EnvironmentProblem, TracerError, UsageProblem

LOSSES = ("cross_entropy", "cross_entropy_no_upcast", "model", "sum")


@dataclass
class Batch:
    kwargs: dict
    inputs: list[tuple[str, torch.Tensor]]
    loss: Callable | None
    tokens: int


def _transformers():
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentProblem(
            f"a Hugging Face config needs the transformers package, which cannot be imported here: {error}"
        ) from error
    return transformers


def read_config(path: Path) -> dict:
    try:
        data = json.loads(files.read_text(path))
    except OSError as error:
        raise TracerError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TracerError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TracerError(f"{path} holds a {type(data).__name__}; expected a JSON object, a Hugging Face model config")
    for name, kind in (("model_type", str), ("architectures", list)):
        if name not in data:
            raise TracerError(
                f'{path} has no "{name}"; expected a Hugging Face model config, with "model_type" and "architectures"'
            )
        if not isinstance(data[name], kind) or not data[name]:
            raise TracerError(
                f'{path}: "{name}" is {json.dumps(data[name])}; expected a {"name" if kind is str else "list with a class name"}'
            )
    return data


def _family(model_type: str, architecture: str) -> str:
    from transformers.models.auto import modeling_auto as auto

    families = {
        "causal_lm": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,),
        "masked_lm": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,),
        "seq2seq_lm": (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,),
        "image_classification": (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,),
    }
    for family, mappings in families.items():
        for mapping in mappings:
            names = mapping.get(model_type, ())
            if architecture in ((names,) if isinstance(names, str) else names):
                return family
    raise TracerError(
        f'architecture "{architecture}" of model type "{model_type}" is not one that can be traced from its config; expected a class for causal,'
        " masked or sequence-to-sequence language modelling or image classification (any other model: give package.module:callable)"
    )


class HuggingFaceModel:
    """A config file: builds the module, then the batch."""

    def __init__(self, path: Path):
        self._transformers = _transformers()
        self._data = read_config(path)
        self.name = path.stem
        model_type, self._architecture = self._data["model_type"], self._data["architectures"][0]
        try:
            config_class = self._transformers.CONFIG_MAPPING[model_type]
        except KeyError:
            raise TracerError(
                f'{path}: model type "{model_type}" is not known to transformers {self._transformers.__version__}'
            ) from None
        self._family = _family(model_type, self._architecture)
        try:
            self.config = config_class.from_dict(self._data)
        except Exception as error:
            raise TracerError(
                f"{path}: {config_class.__name__} refuses the config: {type(error).__name__}: {error}"
            ) from error

    def build(self, attention: str, experts: str) -> nn.Module:
        """The module in training mode, float32, uninitialized. Call inside FakeTensorMode and on the wanted device."""
        from transformers.initialization import no_init_weights

        model_class = getattr(self._transformers, self._architecture)
        self.config.use_cache = False
        options = {"attn_implementation": attention} if attention != "default" else {}
        if experts != "default" and model_class._can_set_experts_implementation():
            options["experts_implementation"] = experts
        with no_init_weights():
            try:
                model = model_class._from_config(self.config, dtype=torch.float32, **options)
            except ValueError as error:
                if attention != "sdpa" or "scaled_dot_product_attention" not in str(error):
                    raise TracerError(f"{model_class.__name__} cannot be built: {error}") from error
                options.pop("attn_implementation")
                model = model_class._from_config(self.config, dtype=torch.float32, **options)
        model.tie_weights()  # part of the initialisation that was skipped
        return model.train()

    def batch(self, batch: int, seq: int, dtype: torch.dtype, loss: str) -> Batch:
        """Fake CUDA inputs and the loss of the model's output."""
        if self._family == "image_classification":
            size = self.config.image_size
            height, width = (size, size) if isinstance(size, int) else size
            images = torch.empty(batch, self.config.num_channels, height, width, dtype=dtype, device="cuda")
            given, labels, tokens = {"pixel_values": images}, torch.empty(batch, dtype=torch.long, device="cuda"), batch
        else:
            limit = getattr(self.config, "max_position_embeddings", None)
            if limit is not None and self._learned_positions() and seq > limit:
                raise TracerError(
                    f"sequence {seq} is longer than the {limit} positions that this model has learned embeddings for"
                )
            given = {"input_ids": torch.empty(batch, seq, dtype=torch.long, device="cuda")}
            if self._family == "seq2seq_lm":
                given["decoder_input_ids"] = torch.empty(batch, seq, dtype=torch.long, device="cuda")
            labels, tokens = torch.empty(batch, seq, dtype=torch.long, device="cuda"), batch * seq
        inputs = [*given.items(), ("labels", labels)]
        if loss == "model":
            return Batch({**given, "labels": labels}, inputs, lambda output: output.loss, tokens)
        if loss == "sum":
            return Batch(given, inputs[:-1], lambda output: output.logits.float().sum(), tokens)
        if loss not in ("cross_entropy", "cross_entropy_no_upcast"):
            raise UsageProblem(f"unknown loss {loss}; expected one of {', '.join(LOSSES)}")

        def cross_entropy(output):
            logits = output.logits.flatten(0, -2)
            return F.cross_entropy(logits if loss == "cross_entropy_no_upcast" else logits.float(), labels.flatten())

        return Batch(given, inputs, cross_entropy, tokens)

    def notes(self, module: nn.Module, experts: str) -> list[str]:
        """What a reader of the trace should know of how it was made."""
        notes = [f"transformers {self._transformers.__version__}"]
        if module._can_set_experts_implementation():
            notes.append(f"experts {experts}, any routing")
        return notes

    def _learned_positions(self) -> bool:
        return self._data["model_type"] in (
            "gpt2",
            "bert",
            "roberta",
            "opt",
            "distilbert",
            "electra",
            "camembert",
            "xlm-roberta",
        )

# SPDX-License-Identifier: Apache-2.0
"""Models from a Hugging Face architecture config: no weights, no network.

The class is the one the config's `architectures` names; the batch is what a user of that kind of model gives it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from shardplan import files
from shardplan.tracer.errors import EnvironmentProblem, TracerError, UsageProblem
from shardplan.tracer.places import one_line, place

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


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def read_config(path: Path) -> dict:
    try:
        data = json.loads(files.read_text(path))
    except OSError as error:
        raise TracerError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TracerError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        kind = next(name for kinds, name in _JSON_KINDS if isinstance(data, kinds))
        raise TracerError(f"{path} holds {kind}; expected a JSON object, a Hugging Face model config")
    for name, kind in (("model_type", str), ("architectures", list)):
        if name not in data:
            raise TracerError(
                f'{path} has no "{name}"; expected a Hugging Face model config, with "model_type" and "architectures"'
            )
        if not data[name] or not (isinstance(data[name], str) if kind is str else _is_names(data[name])):
            raise TracerError(
                f'{path}: "{name}" is {json.dumps(data[name])}; expected a '
                f'{"name" if kind is str else "list with a class name"}'
            )
    return data


_JSON_KINDS = (
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "a string"),
    (list, "a list"),
    (type(None), "null"),
)

_FAMILIES = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
_MULTIMODAL = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
_TEXT_PARTS = ("text_config", "llm_config", "language_config")  # of configs whose own model type is unknown


def _classes(mapping: str, model_type: str) -> tuple[str, ...]:
    from transformers.models.auto import modeling_auto as auto

    names = getattr(auto, mapping, {}).get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _family(model_type: str, architecture: str) -> str | None:
    return next(
        (family for family, mapping in _FAMILIES.items() if architecture in _classes(mapping, model_type)), None
    )


def _not_traceable(architecture: str, model_type: str) -> TracerError:
    return TracerError(
        f'architecture "{architecture}" of model type "{model_type}" is not one that can be traced from its config; '
        'expected a class for causal,'
        " masked or sequence-to-sequence language modelling, image classification, or a multimodal one that has a "
        "text model (any other model: give"
        " package.module:callable)"
    )


def _text_alone(architecture: str, modalities: tuple[str, ...]) -> str:
    others = [name for name in modalities if name != "text"] or ["other inputs"]
    return (
        f"{architecture} takes {' and '.join(others)}, too: the batch is text alone, what reads "
        f"{' and '.join(others)} gets no gradient"
    )


def _pixels(count: int, config, dtype: torch.dtype) -> torch.Tensor:
    height, width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
    return torch.empty(count, getattr(config, "num_channels", 3), height, width, dtype=dtype, device="cuda")


def _with_room(placeholders: Callable, images: int) -> Callable:
    """get_placeholder_mask of transformers' models, which finds the tokens that images take: there must be as many in
    the batch."""

    @functools.wraps(placeholders)
    def checked(input_ids, inputs_embeds, image_features=None, *more, **others):
        if image_features is not None and image_features.numel() > inputs_embeds.numel():
            samples, seq, width = inputs_embeds.shape
            needed = image_features.numel() // (samples * width)
            raise UsageProblem(f"--images {images} take {needed} tokens of each sample, more than --seq {seq}")
        return placeholders(input_ids, inputs_embeds, image_features, *more, **others)

    return checked


class HuggingFaceModel:
    """A config file: builds the module, then the batch. `facts`: how the trace was made. `notes`: what a reader of the
    config would not expect of it."""

    def __init__(self, path: Path, images: int = 0):
        """images: in each sample of a multimodal config, which is built whole then; 0: its text model, or text
        alone."""
        self._transformers = _transformers()
        self._images = images
        self.name = path.stem
        self.facts = [f"transformers {self._transformers.__version__}"]
        self.notes: list[str] = []
        data = read_config(path)
        self._choose(data, path)
        if quantization := data.get("quantization_config"):
            method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else "unnamed"
            self.notes.append(
                f"quantization ({method}) is of the published weights: the parameters are traced unquantized"
            )
        self.config.quantization_config = None

    def _choose(self, data: dict, path: Path) -> None:
        """Sets the class, its config and its family."""
        model_type, architecture = data["model_type"], data["architectures"][0]
        config_class = self._config_class(data, path)
        if config_class is None and self._images:
            raise UsageProblem(
                f'--images: transformers has neither the model type "{model_type}" nor a class "{architecture}" that '
                'could read them'
            )
        if config_class is None:
            name = next((name for name in _TEXT_PARTS if isinstance(data.get(name), dict)), None)
            part = data.get(name, {})
            text_type = part.get("model_type") if isinstance(part.get("model_type"), str) else None
            named = (
                part.get("architectures")
                if _is_names(part.get("architectures"))
                else _classes(_FAMILIES["causal_lm"], text_type)
            )
            inner = {**part, "model_type": text_type, "architectures": list(named) or [None]}
            if self._config_class(dict(inner), path) is None:
                text = f', nor is model type {json.dumps(part.get("model_type"))} of its "{name}"' if name else ""
                raise TracerError(
                    f'{path}: model type "{model_type}" is not known to transformers '
                    f'{self._transformers.__version__}, nor is a class "{architecture}"{text};'
                    ' where the code of a known type computes the same, set "model_type" and "architectures" to those'
                )
            self._choose(inner, path)
            self.notes.append(
                f'model type "{model_type}" is not known to transformers: its text model alone '
                f'({self.model_class.__name__})'
            )
            return
        try:
            self.config = config_class.from_dict(data)
        except Exception as error:
            said = " ".join(str(error).split())  # of several lines
            raise TracerError(
                f"{path}: {config_class.__name__} refuses the config: {type(error).__name__}: {said}"
            ) from error
        for size in ("num_hidden_layers", "hidden_size", "vocab_size"):
            if isinstance(found := getattr(self.config, size, None), int) and found < 1:
                raise TracerError(
                    f'{path}: "{self.config.attribute_map.get(size, size)}" is {found}; expected at least 1'
                )
        known = self.config.model_type
        if self._images:
            self._choose_with_images(known, architecture)
            return
        self._family = _family(known, architecture)
        if self._family in (None, "causal_lm") and self._choose_text_model(known, architecture):
            return
        if self._family is None:
            raise _not_traceable(architecture, model_type)
        self._set_class(architecture)
        if model_type not in self._transformers.CONFIG_MAPPING:
            self.notes.append(
                f'model type "{model_type}" is not known to transformers: traced as {architecture} of model type '
                f'"{known}", without code of its own'
            )
        if self._family != "image_classification" and len(self._modalities()) > 1 and self._reads_more():
            self.notes.append(_text_alone(architecture, self._modalities()))

    def _config_class(self, data: dict, path: Path) -> type | None:
        """That of the model type, else that of the class; None: transformers has neither."""
        if data["model_type"] in self._transformers.CONFIG_MAPPING:
            return self._transformers.CONFIG_MAPPING[data["model_type"]]
        model_class = getattr(self._transformers, str(data["architectures"][0]), None)
        if not (isinstance(model_class, type) and issubclass(model_class, self._transformers.PreTrainedModel)):
            return None
        del data["model_type"]  # the class's own
        return model_class.config_class

    def _choose_with_images(self, model_type: str, architecture: str) -> None:
        if not any(architecture in _classes(mapping, model_type) for mapping in _MULTIMODAL):
            raise UsageProblem(
                f'--images is for multimodal configs; {architecture} of model type "{model_type}" is none'
            )
        self._family = "causal_lm"
        self._set_class(architecture)
        taken = inspect.signature(self.model_class.forward).parameters
        size = getattr(getattr(self.config, "vision_config", None), "image_size", None)
        if "pixel_values" not in taken or "image_grid_thw" in taken or not isinstance(size, (int, list, tuple)):
            raise UsageProblem(
                "--images needs a class that takes pixel_values of one size, image_size of its vision_config; "
                f"{architecture} does not"
                " (give package.module:callable)"
            )
        self.facts.append(f"{self._images} images a sample")

    def _choose_text_model(self, model_type: str, architecture: str) -> bool:
        """Takes the text model of a composite config, and says so; its whole model where transformers has no class for
        the text model alone."""
        if self.config.is_encoder_decoder:
            return False
        whole = next((mapping for mapping in _MULTIMODAL if architecture in _classes(mapping, model_type)), None)
        try:
            text = self.config.get_text_config(decoder=True)
        except ValueError:  # there are several
            return False
        if not isinstance(text, self._transformers.PreTrainedConfig):  # a field of a config that has no parts
            text = self.config
        if whole is None and (self._family is None or text is self.config):
            return False
        self._family = "causal_lm"
        for name in (*_classes(_FAMILIES["causal_lm"], text.model_type), *_classes(_FAMILIES["causal_lm"], model_type)):
            self._set_class(name)
            if text is not self.config and self.model_class.config_class is type(text):
                self.config = text
                self.notes.append(
                    f"composite config ({architecture}): its text model alone ({name}), without what makes tokens of "
                    "images or sounds"
                )
                return True
        self._set_class(architecture)
        self.notes.append(_text_alone(architecture, self._modalities()))
        return True

    def _reads_more(self) -> bool:
        """Whether a part of the config is of images or sounds. The class alone says so of text models, too, that
        inherit from one of images."""
        return any(
            part in name for name in self.config.sub_configs for part in ("vision", "image", "video", "audio", "speech")
        )

    def _set_class(self, name: str) -> None:
        try:
            self.model_class = getattr(self._transformers, name)
        except (AttributeError, ImportError, RuntimeError) as error:  # a class that needs a package
            raise EnvironmentProblem(
                f"{name} of transformers {self._transformers.__version__} cannot be imported: {one_line(error)}"
            ) from error

    def _parts(self) -> list:
        return [part for name in self.config.sub_configs if (part := getattr(self.config, name, None)) is not None]

    def _modalities(self) -> tuple[str, ...]:
        found = getattr(self.model_class, "input_modalities", "text")
        return (found,) if isinstance(found, str) else tuple(found)

    def build(self, experts: str) -> nn.Module:
        """The module in training mode, float32, uninitialized. Call inside FakeTensorMode and on the wanted device."""
        from transformers.initialization import no_init_weights

        # The answer is of the class: those with an attention of their own (sinks, say) have no other than eager.
        options = {"attn_implementation": "sdpa" if self.model_class._supports_sdpa else "eager"}
        if options["attn_implementation"] == "eager" and hasattr(self.config, "num_attention_heads"):
            self.notes.append("attention eager, as the class supports no other")
        for config in (self.config, *self._parts()):
            config.use_cache = False
        if self.model_class._can_set_experts_implementation():
            options["experts_implementation"] = experts
            self.facts.append(f"experts {experts}, any routing")
        try:
            with no_init_weights():
                model = self.model_class._from_config(self.config, dtype=torch.float32, **options)
            model.tie_weights()  # part of the initialisation that was skipped
        except ImportError as error:
            raise EnvironmentProblem(
                f"{self.model_class.__name__} needs a package that is not here: {one_line(error)}"
            ) from error
        except Exception as error:
            raise TracerError(
                f"{self.model_class.__name__} cannot be built: {type(error).__name__}: "
                f"{one_line(error)}{place(error, None)}"
            ) from error
        if self._images:
            for module in model.modules():
                if hasattr(module, "get_placeholder_mask"):
                    module.get_placeholder_mask = _with_room(module.get_placeholder_mask, self._images)
        return model.train()

    def batch(self, batch: int, seq: int, dtype: torch.dtype, loss: str) -> Batch:
        """Fake CUDA inputs and the loss of the model's output."""
        if self._family == "image_classification":
            given, labels, tokens = (
                {"pixel_values": _pixels(batch, self.config, dtype)},
                torch.empty(batch, dtype=torch.long, device="cuda"),
                batch,
            )
        else:
            limit = getattr(self.config, "max_position_embeddings", None)
            if limit is not None and self._learned_positions() and seq > limit:
                raise TracerError(
                    f"sequence {seq} is longer than the {limit} positions that this model has learned embeddings for"
                )
            given = {"input_ids": torch.empty(batch, seq, dtype=torch.long, device="cuda")}
            if self._family == "seq2seq_lm":
                given["decoder_input_ids"] = torch.empty(batch, seq, dtype=torch.long, device="cuda")
            if self._images:
                given["pixel_values"] = _pixels(batch * self._images, self.config.vision_config, dtype)
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

    def _learned_positions(self) -> bool:
        return self.config.model_type in (
            "gpt2",
            "bert",
            "roberta",
            "opt",
            "distilbert",
            "electra",
            "camembert",
            "xlm-roberta",
        )

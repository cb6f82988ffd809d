"""Pretrained encoders from local files, each with a new linear head.

Nothing is downloaded and no code of a model's folder is run: weights come from safetensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedbasin.core.catalogue import entry
from fedbasin.models.lora import without_lora
from fedbasin.models.network import Network
from fedbasin.models.parts import Shape, one_of

Freeze = Literal["backbone", "none"]
_BLIND = (
    -1e9
)  # added to attention scores of padding; finite, so a row of padding alone gives no NaN
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_ABSENT = "{name} needs the package {package}; pip install 'fedbasin[{extra}]'"


class MeanPooled(nn.Module):
    """A token encoder whose features are the mean of its last layer over the tokens of a row.

    The mask goes in as numbers [B, 1, 1, L] that are added to attention scores, 0 at tokens and
    very negative at padding: under `vmap` this is plain arithmetic, where a mask [B, L] is not.

    Args:
        encoder: a Hugging Face encoder with plain ("eager") attention.
        pad: the number of the padding token.
    """

    def __init__(self, encoder: nn.Module, pad: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.pad = pad

    def forward(self, tokens: Tensor) -> Tensor:
        """Return features [B, d] of tokens [B, L]."""
        held = tokens != self.pad
        mask = torch.where(held, 0.0, _BLIND)[:, None, None, :]
        states: Tensor = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = held.to(states.dtype)[:, :, None]
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


@entry("model", paper="Reimers and Gurevych, EMNLP 2019", url="https://arxiv.org/abs/1908.10084")
def hf(
    shape: Shape,
    classes: int,
    *,
    path: str,
    freeze: Freeze = "backbone",
    pad: int = 0,
    dropout: float | None = None,
) -> Network:
    """A Hugging Face encoder from a local folder, mean pooling, and a new linear head.

    Input is a batch of int64 tokens [B, L]. The folder holds config.json and model.safetensors, as
    `save_pretrained` writes them. A matrix of clients is no faster than a loop: ``stacks=False``.

    Args:
        path: the folder.
        freeze: ``"backbone"`` trains the head alone, ``"none"`` the whole network.
        pad: the number of the padding token, which is left out of attention and mean.
        dropout: probability of every dropout layer in training; None is what config.json says.
    """
    one_of("freeze", freeze, ("backbone", "none"))
    if len(shape) != 1:
        raise ValueError(f"hf takes token sequences (length,), got shape {shape}")
    if dropout is not None and not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    encoder = _encoder(_folder(path))
    for part in encoder.modules():
        if isinstance(part, nn.Dropout) and dropout is not None:
            part.p = dropout  # attention reads it from there, too
    config = encoder.config
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and shape[0] > longest:
        raise ValueError(
            f"hf takes at most {longest} tokens a row with path={path!r}, got {shape[0]}: cut them"
        )
    vocabulary = config.vocab_size
    if not 0 <= pad < vocabulary:
        raise ValueError(f"pad must be a token below {vocabulary}, got {pad}")
    return _network(MeanPooled(encoder, pad), int(config.hidden_size), classes, freeze)


@entry("model", paper="Wightman, 2019", url="https://github.com/huggingface/pytorch-image-models")
def timm(
    shape: Shape,
    classes: int,
    *,
    name: str,
    weights: str = "",
    freeze: Freeze = "backbone",
) -> Network:
    """An image network of the package timm with weights of a local file, and a new linear head.

    Args:
        name: what timm calls it, such as ``"resnet18"`` or ``"vit_tiny_patch16_224"``.
        weights: a safetensors file with its tensors; the classifier in it is left out. Without
            one the network starts at random, which wants ``freeze="none"``.
        freeze: ``"backbone"`` trains the head alone, ``"none"`` the whole network.
    """
    one_of("freeze", freeze, ("backbone", "none"))
    if len(shape) != 3:
        raise ValueError(f"timm takes images (channels, height, width), got shape {shape}")
    if not weights and freeze == "backbone":
        raise ValueError(
            "freeze='backbone' keeps weights that start at random: name a file with weights=, or "
            "set freeze='none'"
        )
    try:
        import timm as library
    except ModuleNotFoundError as error:
        if error.name not in ("timm", "torchvision"):
            raise
        raise ValueError(_ABSENT.format(name="timm", package=error.name, extra="timm")) from None
    if not library.is_model(name):
        raise ValueError(f"name={name!r} is no network of timm: see timm.list_models()")
    settings: dict[str, Any] = {"in_chans": shape[0], "num_classes": 0}
    known = library.get_pretrained_cfg(name)
    if known is not None and known.fixed_input_size:  # position embeddings of one size
        settings["img_size"] = shape[1:]
    body = library.create_model(name, pretrained=False, **settings)
    if weights:
        _load(body, weights, body.default_cfg.get("classifier") or ())
    return _network(body, int(body.num_features), classes, freeze)


def _load(body: nn.Module, path: str, classifier: str | tuple[str, ...]) -> None:
    """Load a file's tensors into a network that has no classifier of its own."""
    try:
        stored = load_file(Path(path).expanduser())
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"weights={path!r} cannot be read: {error}; name a local safetensors file"
        ) from error
    heads = (classifier,) if isinstance(classifier, str) else classifier
    starts = tuple(f"{head}." for head in heads)
    stored = {key: value for key, value in stored.items() if not key.startswith(starts)}
    own = body.state_dict()
    for key in sorted(own.keys() ^ stored.keys()):
        told = "lacks" if key in own else "holds"
        raise ValueError(f"weights={path!r} {told} {key!r}: name the file of this very network")
    for key, value in own.items():
        if stored[key].shape != value.shape:
            raise ValueError(
                f"weights={path!r}: {key!r} has the shape {list(stored[key].shape)}, images of "
                f"this data want {list(value.shape)}"
            )
    body.load_state_dict(stored)


def _folder(path: str) -> Path:
    """Return the folder of a model if it holds what is read from it."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"path={path!r} is not a folder; name a local one that holds config.json and "
            "model.safetensors (nothing is downloaded)"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"path={path!r} holds no config.json; write it with save_pretrained")
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise ValueError(
            f"path={path!r} holds no model.safetensors; save the model again with a recent "
            "transformers (pickled weights are not read)"
        )
    return folder


def _encoder(folder: Path) -> Any:
    """Load an encoder without its pooling layer, which mean pooling does not use."""
    try:
        from transformers import AutoConfig, AutoModel
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ValueError(_ABSENT.format(name="hf", package="transformers", extra="hf")) from None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with _quiet():
            encoder, found = AutoModel.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation="eager",
                dtype=torch.float32,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"path={str(folder)!r} cannot be loaded: {error}") from error
    if hasattr(encoder, "pooler"):
        encoder.pooler = None
    missing = sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise ValueError(
            f"path={str(folder)!r}: model.safetensors lacks {', '.join(missing[:5])}, which would "
            "start at random; save the whole model"
        )
    return encoder


@contextmanager
def _quiet() -> Iterator[None]:
    """Load without a progress bar: a run has its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _network(body: nn.Module, width: int, classes: int, freeze: str) -> Network:
    """Return a pretrained body with a new head, frozen or not."""
    if freeze == "backbone":
        for parameter in body.parameters():
            parameter.requires_grad_(False)
    return Network(body, nn.Linear(width, classes), compiles=False, stacks=False)


def save_encoder(network: nn.Module, folder: Path) -> list[Path]:
    """Write a trained `hf` network as Hugging Face and torch load it, and return the files.

    The encoder is written by its `save_pretrained`, with A/B pairs of LoRA added to the weights
    they stand beside. ``head.safetensors`` holds weight and bias of the linear head.
    """
    body = getattr(network, "body", None)
    if not isinstance(body, MeanPooled):
        raise ValueError(
            "to='hf' is for networks of hf(path=...), alone or in lora(...); for others use "
            "safetensors, torch or onnx"
        )
    encoder: Any = without_lora(body.encoder)
    encoder.save_pretrained(folder, safe_serialization=True)
    head = folder / "head.safetensors"
    save_file({name: t.contiguous() for name, t in network.head.state_dict().items()}, head)  # type: ignore[union-attr]
    return [folder / "config.json", folder / "model.safetensors", head]

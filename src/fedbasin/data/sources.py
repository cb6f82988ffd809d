"""The datasets fedbasin knows by name: where they lie and how they are read.

A new dataset is one entry in `SOURCES`; anything else on the Hugging Face hub is reached as
``hf:owner/name`` and described by what its own files say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl

from fedbasin.core.suggest import nearest
from fedbasin.data import labels
from fedbasin.data.dataset import DataError, Kind
from fedbasin.data.embedded import EMBEDDED

Layout = Literal["images", "roles", "windows", "tcga_brca", "heart_disease", "heart_disease_pooled"]
CHANNELS = {"L": 1, "RGB": 3}


@dataclass(frozen=True)
class Part:
    """One dataset repository and the columns that matter in it.

    Args:
        repo: ``owner/name``, as on the hub and in a mirror.
        configs: folder or configuration names, best first; empty for the only one there is.
        inputs: column of images or text; None to find it in the schema.
        label: column of labels; None to find it in the schema.
        group: column naming the writer, role or domain.
        group_optional: whether the files may lack the group column.
        group_name: the one group all rows of this part belong to.
        revision: commit of the hub repository; None for its newest.
        on_hub: whether the hub has it; otherwise it is read from a mirror only.
    """

    repo: str
    configs: tuple[str, ...] = ()
    inputs: str | None = None
    label: str | None = None
    group: str | None = None
    group_optional: bool = False
    group_name: str | None = None
    revision: str | None = None
    on_hub: bool = True


@dataclass(frozen=True)
class Holdout:
    """How a test split is cut from a dataset published without one.

    Args:
        share: fraction held out of every stratum.
        by: what makes a stratum.
    """

    share: float
    by: tuple[Literal["label", "group"], ...]


@dataclass(frozen=True)
class Source:
    """A dataset: its parts, how they are decoded, and what is known about it.

    Args:
        name: the name users type.
        parts: repositories whose rows are joined.
        layout: how a file's rows become inputs.
        classes: class names; empty to take them from the files.
        channels: 1 or 3; None to take them from the first image.
        size: (height, width) every image is resized to; None to keep the published size.
        holdout: how to cut a test split where none is published.
        mean: per channel, in [0, 1]; empty for 0.
        std: per channel; empty for 1.
        rows: published (train, test) rows; test is 0 where a share of the first is held out.
        shape: published shape of one input.
        groups: what a group is.
        paper: where the dataset is used.
    """

    name: str
    parts: tuple[Part, ...]
    layout: Layout = "images"
    classes: tuple[str, ...] = ()
    channels: int | None = None
    size: tuple[int, int] | None = None
    holdout: Holdout | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    rows: tuple[int, int] | None = None
    shape: tuple[int, ...] = ()
    groups: str = ""
    paper: str = ""

    @property
    def kind(self) -> Kind:
        """Whether inputs are images, text or a table."""
        kinds: dict[Layout, Kind] = {"images": "image", "roles": "text", "windows": "text"}
        return kinds.get(self.layout, "table")

    @property
    def needs_test(self) -> bool:
        """Whether a test split must be published with it; text is cut by its position instead."""
        return self.kind != "text" and self.holdout is None


_HALF = (0.5, 0.5, 0.5)
_CIFAR_MEAN = (0.491, 0.482, 0.447)
_CIFAR_STD = (0.247, 0.243, 0.262)
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_CIFAR100 = ("uoft-cs/cifar100", ("cifar100",), "img")
_CIFAR100_COMMIT = "aadb3af77e9048adbea6b47c21a81e47dd092ae5"

_MNIST = Part(
    "ylecun/mnist", ("mnist",), "image", "label", group="writer_id", group_optional=True,
    revision="77f3279092a1c1579b2250db8eafed0ad422088c",
)  # fmt: skip
_USPS = Part("flwrlabs/usps", ("data", "default"), "image", "label")
_SVHN = Part("ufldl-stanford/svhn", ("cropped_digits",), "image", "label")
_MNIST_M = Part("Mike0307/MNIST-M", ("data", "default"), "image", "label")
_HEART = Part("local/fed-heart-disease", ("flamby",), on_hub=False)
_SYNTHETIC = Part("local/synthetic-digits", ("data",), "image", "label", on_hub=False)


def _domain(part: Part, name: str) -> Part:
    """Return a part whose rows all belong to one named domain."""
    return Part(
        part.repo, part.configs, part.inputs, part.label,
        group_name=name, revision=part.revision, on_hub=part.on_hub,
    )  # fmt: skip


_TABLE = (
    Source(
        "fashion-mnist",
        (
            Part(
                "zalando-datasets/fashion_mnist", ("fashion_mnist",), "image", "label",
                revision="531be5e2ccc9dba0c201ad3ae567a4f3d16ecdd2",
            ),
        ),
        classes=labels.FASHION, channels=1,
        rows=(60_000, 10_000), shape=(1, 28, 28), paper="FedIMA, FedLAW, FedCDA",
    ),
    Source(
        "cifar10",
        (
            Part(
                "uoft-cs/cifar10", ("plain_text",), "img", "label",
                revision="0b2714987fa478483af9968de7c934580d0bb9a2",
            ),
        ),
        classes=labels.CIFAR10, channels=3, mean=_CIFAR_MEAN, std=_CIFAR_STD,
        rows=(50_000, 10_000), shape=(3, 32, 32), paper="FedIMA, FedLAW, WIMA, FedCDA, FedWCM",
    ),
    Source(
        "cifar100",
        (Part(*_CIFAR100, "fine_label", revision=_CIFAR100_COMMIT, group="coarse_label"),),
        classes=labels.CIFAR100, channels=3, mean=_CIFAR_MEAN, std=_CIFAR_STD,
        rows=(50_000, 10_000), shape=(3, 32, 32), groups="coarse class",
        paper="FedIMA, FedLAW, WIMA, FedCDA",
    ),
    Source(
        "cifar100-coarse",
        (Part(*_CIFAR100, "coarse_label", revision=_CIFAR100_COMMIT),),
        classes=labels.CIFAR100_COARSE, channels=3, mean=_CIFAR_MEAN, std=_CIFAR_STD,
        rows=(50_000, 10_000), shape=(3, 32, 32), paper="Pachinko (WIMA)",
    ),
    Source(
        "mnist", (_MNIST,), classes=labels.DIGITS, channels=1,
        rows=(60_000, 10_000), shape=(1, 28, 28), groups="writer", paper="Digit-Five",
    ),
    Source(
        "usps", (_USPS,), classes=labels.DIGITS, channels=1,
        rows=(7_291, 2_007), shape=(1, 16, 16), paper="Digit-Five",
    ),
    Source(
        "svhn", (_SVHN,), classes=labels.DIGITS, channels=3, mean=_HALF, std=_HALF,
        rows=(73_257, 26_032), shape=(3, 32, 32), paper="Digit-Five",
    ),
    Source(
        "mnist-m", (_MNIST_M,), classes=labels.DIGITS, channels=3, mean=_HALF, std=_HALF,
        rows=(59_001, 9_001), shape=(3, 32, 32), paper="Digit-Five",
    ),
    Source(
        "synthetic-digits", (_SYNTHETIC,), classes=labels.DIGITS, channels=3, mean=_HALF, std=_HALF,
        rows=(4_000, 1_000), shape=(3, 32, 32), paper="Digit-Five",
    ),
    Source(
        "digit-five",
        (
            _domain(_MNIST, "mnist"),
            _domain(_SVHN, "svhn"),
            _domain(_USPS, "usps"),
            _domain(_SYNTHETIC, "synthetic-digits"),
            _domain(_MNIST_M, "mnist-m"),
        ),
        classes=labels.DIGITS, channels=3, size=(28, 28), mean=_HALF, std=_HALF,
        rows=(203_549, 48_040), shape=(3, 28, 28), groups="domain", paper="FedIMA",
    ),
    Source(
        "pacs",
        (Part("flwrlabs/pacs", ("data", "default"), "image", "label", group="domain"),),
        classes=labels.PACS, channels=3, mean=_IMAGENET_MEAN, std=_IMAGENET_STD,
        holdout=Holdout(0.1, ("group", "label")),
        rows=(9_991, 0), shape=(3, 227, 227), groups="domain", paper="FedIMA",
    ),
    Source(
        "femnist",
        (
            Part(
                "flwrlabs/femnist", ("data", "default"), "image", "character", group="writer_id",
                revision="df739a2b09df2b5cc1ec93107659b9a9a8566487",
            ),
        ),
        classes=labels.FEMNIST, channels=1, holdout=Holdout(0.1, ("group",)),
        rows=(814_277, 0), shape=(1, 28, 28), groups="writer", paper="WIMA",
    ),
    Source(
        "shakespeare",
        (Part("local/shakespeare-roles", ("data",), "text", on_hub=False),),
        layout="roles", classes=labels.CHARACTERS,
        rows=(51_069, 0), shape=(80,), groups="role", paper="WIMA",
    ),
    Source(
        "shakespeare",
        (Part("flwrlabs/shakespeare", ("data", "default"), "x", "y", group="character_id"),),
        layout="windows", classes=labels.CHARACTERS,
        rows=(4_226_158, 0), shape=(80,), groups="role", paper="WIMA",
    ),
    Source(
        "fed_tcga_brca", (Part("local/fed-tcga-brca", ("data",), on_hub=False),),
        layout="tcga_brca",
        rows=(866, 222), shape=(39,), groups="centre", paper="FLamby",
    ),
    Source(
        "fed_heart_disease", (_HEART,), layout="heart_disease", classes=("healthy", "ill"),
        rows=(486, 254), shape=(13,), groups="centre", paper="FLamby",
    ),
    Source(
        "fed_heart_pooled", (_HEART,), layout="heart_disease_pooled",
        classes=("healthy", "ill"),
        rows=(486, 254), shape=(13,), groups="centre", paper="FLamby",
    ),
)  # fmt: skip

# A name may have several sources of different layout; the first one present is read.
SOURCES: dict[str, tuple[Source, ...]] = {
    name: tuple(source for source in _TABLE if source.name == name)
    for name in dict.fromkeys(source.name for source in _TABLE)
}

_WORD = r"\w[\w.-]*"
_HF_NAME = re.compile(
    rf"hf:(?P<repo>{_WORD}/{_WORD})(/(?P<config>{_WORD}))?"
    r"(@(?P<revision>[^?\s]+))?(\?(?P<options>\S*))?"
)
_HF_FORM = "hf:OWNER/NAME[/CONFIG][@REVISION][?label=COLUMN&size=PIXELS&mode=L|RGB]"


def resolve(name: str) -> tuple[Source, ...]:
    """Return the sources of a dataset name, best first."""
    if name.startswith("hf:"):
        return (_from_hub_name(name),)
    if name not in SOURCES:
        known = [*EMBEDDED, *SOURCES]
        hint = nearest(name.lower().replace("_", "-"), known)
        raise DataError(
            f"unknown dataset {name!r}: {hint} (write others on the hub as {_HF_FORM}, and give "
            "arrays of your own in Python as data=, when a run is resumed too)"
        )
    return SOURCES[name]


def _from_hub_name(name: str) -> Source:
    """Describe a dataset the catalogue does not list, from the way it is named."""
    match = _HF_NAME.fullmatch(name)
    if match is None:
        raise DataError(f"{name!r} is not of the form {_HF_FORM}")
    options = dict(parse_qsl(match["options"] or "", keep_blank_values=True))
    mode, size, label = (options.pop(key, None) for key in ("mode", "size", "label"))
    if options:
        raise DataError(
            f"unknown option {next(iter(options))!r} in {name!r}; the form is {_HF_FORM}"
        )
    if mode is not None and mode not in CHANNELS:
        raise DataError(f"mode={mode} in {name!r} must be L (grey) or RGB (colour)")
    if size is not None and not (size.isdecimal() and 1 <= int(size) <= 1024):
        raise DataError(f"size={size} in {name!r} must be a number of pixels from 1 to 1024")
    part = Part(
        match["repo"],
        (match["config"],) if match["config"] else (),
        label=label,
        revision=match["revision"],
    )
    return Source(
        name,
        (part,),
        channels=CHANNELS[mode] if mode else None,
        size=(int(size), int(size)) if size else None,
        holdout=Holdout(0.2, ("label",)),
        paper="your own",
    )

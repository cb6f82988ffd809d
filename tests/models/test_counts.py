"""Parameter counts of every network against sums written out layer by layer."""

import re
from pathlib import Path

import pytest
import torch

import fedbasin.models
from fedbasin.core.catalogue import cards

assert fedbasin.models  # importing the room fills the catalogue
MODELS = {card.name: card.make for card in cards("model")}


def conv(inputs, outputs, kernel, bias=True):
    return inputs * outputs * kernel**2 + bias * outputs


def fc(inputs, outputs):
    return inputs * outputs + outputs


def gn(channels):
    return 2 * channels


def cifar_resnet(per_stage, k=1, shortcut=True):
    total = conv(3, 16 * k, 3, bias=False) + gn(16 * k) + fc(64 * k, 10)
    for before, width in ((16 * k, 16 * k), (16 * k, 32 * k), (32 * k, 64 * k)):
        total += conv(before, width, 3, bias=False) + gn(width)
        total += (2 * per_stage - 1) * (conv(width, width, 3, bias=False) + gn(width))
        if shortcut and before != width:
            total += conv(before, width, 1, bias=False) + gn(width)
    return total


def resnet(per_stage, classes=10, stem=3):
    total = conv(3, 64, stem, bias=False) + gn(64) + fc(512, classes)
    for before, width, blocks in zip(
        (64, 64, 128, 256), (64, 128, 256, 512), per_stage, strict=True
    ):
        total += conv(before, width, 3, bias=False) + gn(width)
        total += (2 * blocks - 1) * (conv(width, width, 3, bias=False) + gn(width))
        if before != width:
            total += conv(before, width, 1, bias=False) + gn(width)
    return total


def densenet():
    total, channels = conv(3, 64, 3, bias=False), 64
    for stage, blocks in enumerate((6, 12, 24, 16)):
        for _ in range(blocks):
            total += gn(channels) + conv(channels, 128, 1, bias=False)
            total += gn(128) + conv(128, 32, 3, bias=False)
            channels += 32
        if stage < 3:
            total += gn(channels) + conv(channels, channels // 2, 1, bias=False)
            channels //= 2
    assert channels == 1024
    return total + gn(1024) + fc(1024, 10)


def mobilenet(classes):
    def block(inputs, expansion, outputs):
        wide = expansion * inputs
        widen = conv(inputs, wide, 1, bias=False) + gn(wide) if expansion > 1 else 0
        return widen + 9 * wide + gn(wide) + conv(wide, outputs, 1, bias=False) + gn(outputs)

    return (
        conv(3, 32, 3, bias=False)
        + gn(32)
        + block(32, 1, 16)
        + (block(16, 6, 24) + block(24, 6, 24))
        + (block(24, 6, 32) + 2 * block(32, 6, 32))
        + (block(32, 6, 64) + 3 * block(64, 6, 64))
        + (block(64, 6, 96) + 2 * block(96, 6, 96))
        + (block(96, 6, 160) + 2 * block(160, 6, 160))
        + block(160, 6, 320)
        + (conv(320, 1280, 1, bias=False) + gn(1280))
        + fc(1280, classes)
    )


VGG = sum(
    conv(before, after, 3) + gn(after)
    for before, after in (
        (3, 64),
        (64, 128),
        (128, 256),
        (256, 256),
        (256, 512),
        (512, 512),
        (512, 512),
        (512, 512),
    )
)
ALEX = (
    conv(3, 64, 11) + conv(64, 192, 5) + conv(192, 384, 3) + conv(384, 256, 3) + conv(256, 256, 3)
)
ALEX_NORMS = gn(64) + gn(192) + gn(384) + gn(256) + gn(256)
LSTM = 90 * 8 + (8 + 256 + 1) * 4 * 256 + (256 + 256 + 1) * 4 * 256 + fc(256, 90)
DIGIT = conv(3, 64, 5) + gn(64) + conv(64, 64, 5) + gn(64) + conv(64, 128, 5) + gn(128)

# name: the paper's shape and classes, and the sum over its layers (default arguments)
COUNTS = {
    "logistic": ((1, 28, 28), 10, fc(784, 10)),
    "mlp": ((1, 28, 28), 10, fc(784, 200) + fc(200, 200) + fc(200, 10)),
    "fmnist_cnn": (
        (1, 28, 28),
        10,
        conv(1, 32, 5) + conv(32, 32, 5) + fc(32 * 4 * 4, 384) + fc(384, 128) + fc(128, 10),
    ),
    "cifar_cnn": (
        (3, 32, 32),
        10,
        conv(3, 64, 5) + conv(64, 64, 5) + fc(64 * 5 * 5, 384) + fc(384, 128) + fc(128, 10),
    ),
    "digit_cnn": ((3, 28, 28), 10, DIGIT + fc(128 * 3 * 3, 384) + fc(384, 128) + fc(128, 10)),
    "vgg11": ((3, 32, 32), 100, VGG + fc(512, 128) + fc(128, 100)),
    "alexnet": (
        (3, 224, 224),
        7,
        ALEX + ALEX_NORMS + fc(256 * 6 * 6, 1024) + fc(1024, 512) + fc(512, 7),
    ),
    "fedcda_cnn": (
        (1, 28, 28),
        10,
        conv(1, 32, 5) + conv(32, 64, 5) + fc(64 * 7 * 7, 512) + fc(512, 10),
    ),
    "lenet": ((1, 28, 28), 10, conv(1, 16, 5) + conv(16, 32, 5) + fc(32 * 7 * 7, 10)),
    "simple_cnn": (
        (3, 32, 32),
        10,
        conv(3, 32, 3) + conv(32, 64, 3) + conv(64, 64, 3) + fc(64 * 4 * 4, 64) + fc(64, 10),
    ),
    "emnist_cnn": (
        (1, 28, 28),
        62,
        conv(1, 32, 3) + conv(32, 64, 3) + fc(64 * 12 * 12, 128) + fc(128, 62),
    ),
    "pfl_cnn": (
        (3, 32, 32),
        10,
        conv(3, 32, 3) + conv(32, 64, 3) + fc(64 * 14 * 14, 128) + fc(128, 10),
    ),
    "resnet8": ((3, 32, 32), 10, cifar_resnet(1)),
    "resnet20": ((3, 32, 32), 10, cifar_resnet(3)),
    "resnet56": ((3, 32, 32), 10, cifar_resnet(9)),
    "resnet110": ((3, 32, 32), 10, cifar_resnet(18)),
    "wrn56_4": ((3, 32, 32), 10, cifar_resnet(9, k=4)),
    "resnet18": ((3, 32, 32), 10, resnet((2, 2, 2, 2))),
    "resnet34": ((3, 32, 32), 10, resnet((3, 4, 6, 3))),
    "densenet121": ((3, 32, 32), 10, densenet()),
    "mobilenetv2": ((3, 224, 224), 2028, mobilenet(2028)),
    "shakespeare_lstm": ((80,), 90, LSTM),
}

# Numbers others print for the same networks: papers, FedJAX, pfl-research, torchvision, and the
# widely used CIFAR ports; they check the sums above as much as the code.
PUBLISHED = [
    ("fmnist_cnn", (1, 28, 28), 10, {}, 274_026),
    ("fedcda_cnn", (1, 28, 28), 10, {}, 1_663_370),
    ("mlp", (1, 28, 28), 10, {}, 199_210),
    ("logistic", (1, 28, 28), 10, {}, 7_850),
    ("emnist_cnn", (1, 28, 28), 62, {}, 1_206_590),
    ("pfl_cnn", (3, 32, 32), 10, {}, 1_626_442),
    ("shakespeare_lstm", (80,), 90, {}, 820_522),
    ("resnet20", (3, 32, 32), 10, {"shortcut": "pad"}, 269_722),
    ("resnet56", (3, 32, 32), 10, {"shortcut": "pad"}, 853_018),
    ("resnet110", (3, 32, 32), 10, {"shortcut": "pad"}, 1_727_962),
    ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
    ("resnet18", (3, 224, 224), 1000, {"stem": "imagenet"}, 11_689_512),
    ("resnet34", (3, 224, 224), 1000, {"stem": "imagenet", "norm": "batch"}, 21_797_672),
    ("densenet121", (3, 32, 32), 10, {"norm": "batch"}, 6_956_298),
    ("mobilenetv2", (3, 224, 224), 1000, {"norm": "batch"}, 3_504_872),
    ("alexnet", (3, 224, 224), 1000, {"widths": (4096, 4096), "norm": "none"}, 61_100_840),
]

# Arguments that change the count, against the same arithmetic.
VARIANTS = [
    (
        "resnet18",
        {"projector": 128},
        resnet((2, 2, 2, 2)) - fc(512, 10) + fc(512, 128) + fc(128, 10),
    ),
    ("digit_cnn", {"groups": 4}, COUNTS["digit_cnn"][2]),
    ("digit_cnn", {"norm": "none"}, COUNTS["digit_cnn"][2] - 2 * (64 + 64 + 128)),
    (
        "digit_cnn",
        {"pools": 2, "widths": (2048, 128)},
        DIGIT + fc(6272, 2048) + fc(2048, 128) + fc(128, 10),
    ),
    ("vgg11", {"projector": 0}, VGG + fc(512, 100)),
    ("cifar_cnn", {"widths": (384, 192)}, 797_962),  # FedDyn's CNN
    (
        "cifar_cnn",
        {"channels": (8,), "widths": ()},
        conv(3, 8, 5) + fc(8 * 14 * 14, 10),
    ),
    ("mlp", {"widths": ()}, fc(784, 10)),
    ("resnet8", {"shortcut": "pad"}, cifar_resnet(1, shortcut=False)),
    (
        "shakespeare_lstm",
        {"embedding": 4, "hidden": 16, "layers": 1},
        90 * 4 + (4 + 16 + 1) * 64 + fc(16, 90),
    ),
]


def build(name, shape, classes, **arguments):
    """Build on the meta device: the count needs no memory and no random numbers."""
    with torch.device("meta"):
        return MODELS[name](shape, classes, **arguments)


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"custom", "given", "hf", "lora", "timm"}))
def test_count_is_the_sum_over_layers(name):
    shape, classes, expected = COUNTS[name]  # a new model must add its sum to the table
    assert count(build(name, shape, classes)) == expected


@pytest.mark.parametrize(("name", "shape", "classes", "arguments", "expected"), PUBLISHED)
def test_count_is_the_published_one(name, shape, classes, arguments, expected):
    assert count(build(name, shape, classes, **arguments)) == expected


@pytest.mark.parametrize(("name", "arguments", "expected"), VARIANTS)
def test_count_of_a_variant(name, arguments, expected):
    shape, classes, _ = COUNTS[name]
    assert count(build(name, shape, classes, **arguments)) == expected


def test_the_table_in_the_docs_is_true():
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d,]+) \|$", text, re.MULTILINE)
    stated = {name: int(number.replace(",", "")) for name, number in rows}
    assert stated == {name: total for name, (_, _, total) in COUNTS.items()}

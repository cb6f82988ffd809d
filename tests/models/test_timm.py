"""Image networks of timm with weights of local files."""

import logging

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedbasin import Experiment
from fedbasin.core.net import Net
from fedbasin.data import Dataset, Rows
from fedbasin.experiment import build
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.models import timm

library = pytest.importorskip(
    "timm", reason="needs the extra timm: pip install 'fedbasin[timm]'", exc_type=ImportError
)
SHAPE = (3, 32, 32)
NAMES = ("test_vit", "test_efficientnet_ln")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Files of small networks with a classifier of ten classes, as timm's own files have one."""
    made = {}
    for name in NAMES:
        size = {"img_size": 32} if "vit" in name else {}
        network = library.create_model(name, num_classes=10, **size)
        made[name] = tmp_path_factory.mktemp("timm") / f"{name}.safetensors"
        save_file({k: v.contiguous() for k, v in network.state_dict().items()}, made[name])
    return made


@pytest.mark.parametrize("name", NAMES)
def test_features_are_timms(weights, name):
    ours = timm(SHAPE, 4, name=name, weights=str(weights[name])).eval()
    size = {"img_size": 32} if "vit" in name else {}
    theirs = library.create_model(
        name, num_classes=10, checkpoint_path=str(weights[name]), **size
    ).eval()
    rows = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.forward_head(theirs.forward_features(rows), pre_logits=True)
        torch.testing.assert_close(ours.features(rows), expected)
    assert ours(rows).shape == (2, 4)
    assert Net(ours).layout.names == ("head.weight", "head.bias")


@pytest.mark.parametrize("wrap", ["{}", "lora({}, rank=2, targets=('qkv',))"])
def test_a_vision_transformer_is_trained_in_every_engine(weights, wrap):
    expression = wrap.format(f"timm(name='test_vit', weights={str(weights['test_vit'])!r})")
    draws = np.random.default_rng(0)
    pixels = draws.integers(0, 256, (24, *SHAPE), dtype=np.uint8)
    rows = Rows(pixels, draws.integers(0, 2, 24))
    data = Dataset(
        "made", "image", rows, rows.take(slice(8)), ("a", "b"), (), (0.5,) * 3, (1.0,) * 3
    )
    ends = {}
    for executor in ("loop", "cohort"):
        experiment = Experiment(
            model=expression,
            rounds=1,
            partition=PartitionConfig(how="iid", clients=2),
            local=LocalConfig(lr=0.1, batch=4, steps=2),
            sim=SimConfig("fraction(rate=1.0)", executor=executor, precision="fp64"),
        )
        federation = build(experiment, data=data)
        server, states = federation.begin()
        *_, (ends[executor], _) = federation.rounds_from(server, states)
        federation.close()
        assert not torch.equal(ends[executor].score, server.score)
    torch.testing.assert_close(ends["loop"].score, ends["cohort"].score)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "test_vitt", "freeze": "none"}, "'test_vitt' is no network of timm"),
        ({"name": "test_vit"}, "start at random: name a file with weights="),
        ({"name": "test_vit", "weights": "none.safetensors"}, "none.safetensors.*cannot be read"),
        ({"name": "test_resnet", "weights": "{vit}"}, "lacks|holds"),
        (
            {"name": "test_vit", "weights": "{vit}", "shape": (3, 64, 64)},
            "'pos_embed' has the shape",
        ),
        ({"name": "test_vit", "shape": (64,)}, "takes images"),
        ({"name": "test_vit", "freeze": "half"}, "freeze"),
    ],
)
def test_bad_settings_are_named(weights, settings, message):
    settings = dict(settings)
    shape = settings.pop("shape", SHAPE)
    if "weights" in settings:
        settings["weights"] = settings["weights"].format(vit=weights["test_vit"])
    logging.disable(logging.WARNING)
    with pytest.raises(ValueError, match=message):
        timm(shape, 2, **settings)
    logging.disable(logging.NOTSET)

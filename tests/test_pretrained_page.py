"""docs/pretrained.md: its blocks run, on a small encoder, and its tables are those of the lines."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "pretrained.md").read_text(encoding="utf-8")
SPEC = importlib.util.spec_from_file_location("p", ROOT / "examples" / "pretrained_text.py")
EXAMPLE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(EXAMPLE)
FILE = ROOT / "examples" / "results" / "pretrained_text.jsonl"
LINES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
DATA = sorted({line["data"] for line in LINES})
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(block, names):
    exec(compile(block, "docs/pretrained.md", "exec"), names)
    return names


def test_the_block_of_pairs():
    net = run(BLOCKS[1], {})["net"]
    assert net.layout.pairs
    assert all("lora_A" in a and "lora_B" in b for a, b in net.layout.pairs)


def test_the_block_of_texts(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    monkeypatch.chdir(tmp_path)
    words = {word: at for at, word in enumerate(("[PAD]", "[UNK]", "good", "bad", "phone"))}
    encoder = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    transformers.BertModel(encoder).save_pretrained("folder")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("folder/tokenizer.json")
    given = {
        "texts": ["good phone", "bad phone"] * 12,
        "labels": ["yes", "no"] * 12,
        "products": ["a", "a", "b", "b"] * 6,
    }
    result = run(BLOCKS[0], given)["result"]
    assert result["rounds"] == 2 and result["clients"] == 2


@pytest.mark.parametrize("data", DATA)
def test_the_page_has_the_tables_of_the_lines(data):
    made = EXAMPLE.table(LINES, data)
    assert made.count("\n") > 3 and made in PAGE


@pytest.mark.parametrize("data", DATA)
def test_rates_are_chosen_on_validation_rows_among_all_rates(data):
    lines = [line for line in LINES if line["data"] == data]
    for pair, rate in EXAMPLE.best_rates(lines).items():
        tried = {
            line["lr"]: line["accuracy"]
            for line in lines
            if (line["network"], line["method"], line["part"]) == (*pair, "validation")
        }
        assert sorted(tried) == [0.3, 1, 2, 3, 6] and tried[rate] == max(tried.values())


def test_a_difference_is_paired_by_seed_with_the_interval_of_scipy():
    def of(method):
        found = {
            line["seed"]: 100 * line["accuracy"]
            for line in LINES
            if line["data"] == "clinc150" and line["network"] == "head"
            and (line["method"], line["part"], line["lr"]) == (method, "test", 2)
        }  # fmt: skip
        return np.array([found[seed] for seed in range(5)])

    gaps = of("wima(fedavg, window=5)") - of("fedavg")
    low, high = stats.t.interval(0.95, 4, gaps.mean(), stats.sem(gaps))
    (row,) = [x for x in EXAMPLE.table(LINES, "clinc150").splitlines() if "| head | `wima" in x]
    assert f"| {gaps.mean():+.2f} ± {(high - low) / 2:.2f} |" in row
    assert f"{of('wima(fedavg, window=5)').mean():.2f} ± " in row

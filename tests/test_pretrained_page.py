"""The blocks of docs/pretrained.md run as written, on a small encoder."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "pretrained.md").read_text(encoding="utf-8")
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

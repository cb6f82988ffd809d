"""Store what the code gives today, before a change that must not alter it.

    make generated                         adds models of methods that have none
    python tests/golden/make.py models     models of every method, in loop and cohort
    python tests/golden/make.py records    lines of rounds.jsonl of every method

The last two write over what an earlier version gave: a change that must do so says why.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import text
from fedbasin.core.record import RunFolder
from fedbasin.experiment import build, from_mapping, run

HERE = Path(__file__).parent
MODELS = HERE / "models.safetensors"
RECORDS = HERE / "rounds.jsonl.gz"
EXECUTORS = ("loop", "cohort")
RECORDED_ROUNDS = 70


def machine() -> dict[str, str]:
    """What the last bits of a result depend on."""
    return {
        "torch": torch.__version__.split("+")[0],
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def expressions() -> list[str]:
    """Every method of the catalogue with its defaults."""
    return [text(card.make()) for card in cards("method")]


def settings(method: str, executor: str, rounds: int) -> dict[str, object]:
    """A federation of ten clients on the digits, with data on the server."""
    return {
        "method": method,
        "model": "mlp(widths=(8,))",
        "rounds": rounds,
        "data": {"name": "digits", "proxy_per_class": 2},
        "partition": {"how": "dirichlet(alpha=0.5)", "clients": 10},
        "local": {"lr": 0.1, "batch": 32, "momentum": 0.5, "weight_decay": 1e-4},
        "sim": {
            "executor": executor,
            "compile": "off",
            "participation": "count(clients=4)",
            "device": "cpu",
            "precision": "fp32",
        },
    }


def final_models(method: str, executor: str) -> dict[str, Tensor]:
    """The models after three rounds: the scored one, and the sent one where it is another."""
    federation = build(from_mapping(settings(method, executor, 3)))
    *_, (server, _) = federation.rounds_from(*federation.begin())
    federation.close()
    found = {"score": server.score.clone()}
    if not torch.equal(server.send, server.score):
        found["send"] = server.send.clone()
    return found


def stored() -> tuple[dict[str, Tensor], dict[str, str]]:
    """The stored models by name, and what machine gave them."""
    with safe_open(MODELS, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def method_of(name: str) -> str:
    """The method of a stored model."""
    return name.rsplit(" ", 2)[0]


def without_models() -> list[str]:
    """The methods of which nothing is stored."""
    have = {method_of(name) for name in stored()[0]}
    return [method for method in expressions() if method not in have]


def add_models() -> None:
    """Store the models of methods that have none; those of the others stay as they are."""
    torch.set_num_threads(1)
    methods = without_models()
    if methods:
        models, given_by = stored()
        if machine().items() <= given_by.items():
            elsewhere: list[str] = []
        else:
            elsewhere = methods  # their last bits are not those of the machine that gave the others
        models |= dict(models_of(methods))
        save_file(models, MODELS, metadata=given_by | dict.fromkeys(elsewhere, "another machine"))


def models_of(methods: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors to store by name: method, executor, which model."""
    for method in methods:
        for executor in EXECUTORS:
            for which, vector in final_models(method, executor).items():
                yield f"{method} {executor} {which}", vector


def record_lines() -> Iterator[str]:
    """Lines of rounds.jsonl of a run of every method."""
    for method in expressions():
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "run"
            run(from_mapping(settings(method, "loop", RECORDED_ROUNDS)), path)
            yield from RunFolder(path).rounds.read_text(encoding="utf-8").splitlines()


def main(what: str) -> None:
    """Write one of the two files."""
    torch.set_num_threads(1)
    if what == "models":
        save_file(dict(models_of(expressions())), MODELS, metadata=machine())
    elif what == "records":
        content = "".join(line + "\n" for line in record_lines())
        RECORDS.write_bytes(gzip.compress(content.encode(), mtime=0))
    else:
        sys.exit(f"{what!r}: write models or records")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")

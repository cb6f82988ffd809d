"""Store what the code gives today, before a change that must not alter it.

    python tests/golden/make.py models     models of every method, in loop and cohort
    python tests/golden/make.py records    lines of rounds.jsonl of every method

Run it only to add a method. The stored numbers of other methods must not change.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
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


def all_models() -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor by name: method, executor, which model."""
    for method in expressions():
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
        save_file(dict(all_models()), MODELS, metadata=machine())
    elif what == "records":
        content = "".join(line + "\n" for line in record_lines())
        RECORDS.write_bytes(gzip.compress(content.encode(), mtime=0))
    else:
        sys.exit(f"{what!r}: write models or records")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")

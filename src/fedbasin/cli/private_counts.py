"""``fedbasin private-counts``: what encrypted class counts cost, beside FedWCM's Table 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Annotated, NamedTuple, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

T = TypeVar("T")
# FedWCM (arXiv 2507.14980), Table 2: bytes of plain and encrypted counts by number of classes.
_PAPER = {10: (136, 88_556), 20: (216, 88_554), 50: (456, 88_631), 100: (856, 88_548)}


class Cost(NamedTuple):
    """The cost of one gathering of counts."""

    public: int  # bytes of a public key
    message: float  # mean bytes of a client's encrypted counts
    keys_ms: float  # holder
    read_ms: float  # each client: the public key, least of all clients
    encrypt_ms: float  # each client: its counts, least of all clients
    add_ms: float  # server, all clients
    decrypt_ms: float  # holder


def private_counts(
    clients: Annotated[int, typer.Option(help="How many clients send counts, 3 or more.")] = 100,
    classes: Annotated[str, typer.Option(help="Numbers of classes, with commas.")] = "10,20,50,100",
    seed: Annotated[int, typer.Option(help="Of the made-up counts; keys are never seeded.")] = 0,
) -> None:
    """Gather made-up class counts under encryption; print sizes and times beside the paper's.

    Needs the extra he. Every sum is decrypted and compared with the plain one.
    """
    try:
        numbers = [int(part) for part in classes.split(",")]
    except ValueError as error:
        raise ValueError(f"--classes is {classes!r}; write numbers, as in 10,100") from error
    table = Table(box=box.SIMPLE_HEAD, title=f"{clients} clients", title_justify="left")
    table.padding = (0, 1, 0, 0)
    for name in ("classes", "plain\nbytes", "(paper)", "cipher\nbytes", "(paper)"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("encrypt\nms", "(paper)", "add\nms", "decrypt\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    costs = [measure(clients, number, seed) for number in numbers]
    for number, cost in zip(numbers, costs, strict=True):
        plain, encrypted = _PAPER.get(number, ("", ""))
        table.add_row(
            f"{number}",
            f"{56 + 8 * number}",
            f"{plain}",
            f"{cost.message:.0f}",
            f"{encrypted}",
            f"{cost.encrypt_ms:.1f}",
            "1.7" if number == 10 else "",
            f"{cost.add_ms:.1f}",
            f"{cost.decrypt_ms:.1f}",
        )
    console = Console()
    first = costs[0]
    console.print(table)
    up = clients * first.message / 1e6
    down = clients * first.public / 1e6
    console.print(
        f"{numbers[0]} classes in all: {up:.2f} MB of encrypted counts up, {down:.2f} MB of public "
        f"keys down ({first.public} bytes each), which take {first.keys_ms:.0f} ms to make and "
        f"{first.read_ms:.1f} ms to read. The paper says 13.05 MB for 100 clients and does not "
        "break it down.\nPlain bytes are those of a Python list of n numbers, 56 + 8 n, as in the "
        "paper. All sums were decrypted and are exact.",
        highlight=False,
        soft_wrap=True,
    )


def measure(clients: int, classes: int, seed: int) -> Cost:
    """Run the protocol once on made-up counts and check its result."""
    from fedbasin.core.rng import root  # imports torch, which would delay --help
    from fedbasin.local import private_counts as he

    if classes < 1 or clients < 1:
        raise ValueError(f"{clients} clients and {classes} classes; both must be at least 1")
    counts = root(seed).fold("made-up counts").numpy().integers(0, 500, (clients, classes))
    keys, made = _timed(he.make_keys)
    read = min(_timed(partial(he.read_public, keys.public))[1] for _ in counts)
    sent = [_timed(partial(he.encrypt_counts, keys.public, row)) for row in counts]
    messages = [message for message, _ in sent]
    added, summed = _timed(partial(he.add_counts, keys.public, messages, classes))
    rows = int(counts.sum())
    total, decrypted = _timed(partial(he.decrypt_counts, keys.secret, added, classes, rows))
    if total != counts.sum(0).tolist():
        raise RuntimeError("the decrypted sum differs from the plain one")
    size = sum(map(len, messages)) / clients
    encrypt = min(ms for _, ms in sent) - read  # encrypting reads the key, too
    return Cost(len(keys.public), size, made, read, encrypt, summed, decrypted)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a function and the milliseconds it took."""
    began = perf_counter()
    return work(), 1000 * (perf_counter() - began)

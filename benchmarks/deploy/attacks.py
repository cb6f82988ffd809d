"""What one hostile client of ten does to every method of the catalogue, by what it forges.

    python benchmarks/deploy/attacks.py --out benchmarks/deploy/results/attacks.json
    python benchmarks/deploy/attacks.py --methods fedavg scaffold --forgeries samples steps
    python benchmarks/deploy/attacks.py --table attacks.json --before attacks_before.json

Ten clients (Dirichlet, alpha 1) train a small network on the digits, behind Flower's messages in
one process. FedAvg has trained it for some rounds; the method goes on for four, and one client
forges in each of them. Each case runs as the strategy is by default ("plain") and with the guard of
the app that `fedbasin flower new` writes ("template"). Then the run is started again from its
folder with honest clients, for one round. The accuracy is the final model's on the test rows.

To measure an older version of fedbasin, put its ``src`` first in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # the grid of the tests: Flower's messages in one process

import numpy as np  # noqa: E402
import torch  # noqa: E402
from deploy.grids import LocalGrid, app_for  # noqa: E402
from flwr.app import Array, ArrayRecord, Error, Message  # noqa: E402

import fedbasin.methods  # noqa: E402, F401  (fills the catalogue)
from fedbasin.core.catalogue import cards, needs_of  # noqa: E402
from fedbasin.core.expressions import parse  # noqa: E402
from fedbasin.core.protocols import is_private, needs_gradients  # noqa: E402
from fedbasin.core.rng import Key  # noqa: E402
from fedbasin.deploy import Guard, Handling, Records, strategy_of  # noqa: E402
from fedbasin.experiment import build, from_mapping  # noqa: E402
from fedbasin.sim import Federation  # noqa: E402

CLIENTS = 10
CULPRIT = 3
ROUNDS = 4
EPOCHS = 1
BATCH = 32
LR = 0.2
WARM = 25  # rounds of FedAvg before
MANY = 10**6  # rows that are claimed
ARGUMENTS = {
    "dp": "dp(noise=0.0)",  # the noise is new in every run and moves the accuracy by 0.1
    "fedgen": "fedgen(alpha=1.0, beta=1.0)",  # its defaults are for a rate of 0.01
}
COLUMNS = ("plain", "template")
BAR = {"nothing": 0.0, "number": 0.9, "model": 0.85}  # of the honest accuracy
Forge = Callable[["Attack", Message], None]


@dataclass
class Attack:
    """The hostile client of one run.

    Args:
        forge_reply: changes what it answers after training.
        forge_answer: changes what it says of itself, its gradients and its evaluations.
        absent: whether it is not hostile, but fails to train.
    """

    forge_reply: Forge | None = None
    forge_answer: Forge | None = None
    absent: bool = False
    grid: LocalGrid | None = None
    rounds: int = 0  # in which it has trained

    def trained(self, client: int, reply: Message) -> Iterable[Message]:
        """Return what arrives in place of a trained model."""
        if client != CULPRIT:
            return [reply]
        if self.absent:
            return [_error(reply)]
        if self.forge_reply is not None:
            self.forge_reply(self, reply)
            self.rounds += 1
        return [reply]

    def answered(self, client: int, reply: Message) -> Iterable[Message]:
        """Return what arrives in place of another answer."""
        if client == CULPRIT and self.forge_answer is not None:
            self.forge_answer(self, reply)
        return [reply]

    def sent(self) -> ArrayRecord:
        """Return the model that the hostile client was sent."""
        assert self.grid is not None
        arrays = self.grid.sent[-1].content["arrays"]
        assert isinstance(arrays, ArrayRecord)
        return arrays


def _error(reply: Message) -> Message:
    """Return what Flower sends for a client that fails."""
    failed = Message(Error(2, "it does not train"), reply_to=reply)
    for name in ("_reply_to_message_id", "_src_node_id", "_dst_node_id"):
        failed.metadata.__dict__[name] = reply.metadata.__dict__[name]
    return failed


@dataclass(frozen=True)
class Forgery:
    """One thing to forge.

    Args:
        what: in words.
        kind: whether a ``"number"`` is forged, or what is learnt: a ``"model"``. ``"nothing"`` is
            forged where the client is absent: what nine honest clients learn.
        reply: changes the answer after training.
        answer: changes other answers.
        needs: what a method must use to be touched: ``"reports"``, ``"gradients"``, or a need.
        evaluates: whether clients evaluate.
    """

    what: str
    kind: str = "number"
    reply: Forge | None = None
    answer: Forge | None = None
    needs: str = ""
    evaluates: bool = False

    def touches(self, method: Any) -> bool:
        """Whether a method uses what is forged."""
        if self.needs == "gradients":
            return needs_gradients(method)
        if self.needs == "reports":
            return _reports(str(method))
        return not self.needs or self.needs in needs_of(method)


@cache
def _reports(method: str) -> bool:
    """Whether clients send more than their model, which is seen in one round."""
    federation = federation_of(method)
    found: list[bool] = []

    def look(client: int, reply: Message) -> Iterable[Message]:
        found.append("report" in reply.content)
        return [reply]

    grid = _grid(federation, look, _nothing)
    _strategy(federation, None, None, False).start(grid, _first(federation), 1, timeout=5)
    return any(found)


def says(**numbers: Any) -> Forge:
    """Return a forger of numbers."""

    def forge(attack: Attack, reply: Message) -> None:
        metrics = reply.content["metrics"]
        named = {key.replace("_", "-"): value for key, value in numbers.items()}
        metrics.update({k.replace("train-loss", "train_loss"): v for k, v in named.items()})

    return forge


def in_turn(*forgers: Forge) -> Forge:
    """Return one that forges another thing every round."""

    def forge(attack: Attack, reply: Message) -> None:
        forgers[attack.rounds % len(forgers)](attack, reply)

    return forge


def who_says(**numbers: Any) -> Forge:
    """Return a forger of what a node says of itself."""

    def forge(attack: Attack, reply: Message) -> None:
        if "num-partitions" in reply.content.get("metrics", {}):
            says(**numbers)(attack, reply)

    return forge


def junk(attack: Attack, reply: Message) -> None:
    """Send a model drawn at random."""
    draws = Key(7).fold("junk").numpy()
    arrays = reply.content["arrays"]
    for name in list(arrays):
        values = arrays[name].numpy()
        arrays[name] = Array(draws.normal(size=values.shape).astype(values.dtype))


def claims_rows(attack: Attack, reply: Message) -> None:
    """Send a junk model that is said to come of very many rows."""
    junk(attack, reply)
    says(num_examples=MANY)(attack, reply)


def lives_up_to_rows(attack: Attack, reply: Message) -> None:
    """Do so with all numbers that follow from them."""
    claims_rows(attack, reply)
    steps = EPOCHS * -(-MANY // BATCH)
    says(steps=steps, lr_sum=LR * steps, length=float(steps))(attack, reply)


def states_rows(attack: Attack, reply: Message) -> None:
    """Claim very many rows also when asked, and with a gradient."""
    metrics = reply.content.get("metrics", {})
    if "num-examples" in metrics and "accuracy" not in metrics:
        metrics["num-examples"] = MANY
    if "class-counts" in metrics:
        counts = [0] * len(metrics["class-counts"])
        metrics["class-counts"] = [MANY, *counts[1:]]


def report_of(value: float) -> Forge:
    """Return a forger of reports: all numbers the same."""

    def forge(attack: Attack, reply: Message) -> None:
        for name, array in reply.content["report"].items():
            reply.content["report"][name] = Array(np.full_like(array.numpy(), value))

    return forge


def scaled(times: float, model: bool = True) -> Forge:
    """Return a forger of updates and reports: both longer, or backwards."""

    def forge(attack: Attack, reply: Message) -> None:
        if model:
            before, after = attack.sent(), reply.content["arrays"]
            for name in list(after):
                start = before[name].numpy()
                after[name] = Array(start + times * (after[name].numpy() - start))
        for name, array in reply.content.get("report", {}).items():
            reply.content["report"][name] = Array(_times(array.numpy(), times))

    return forge


def _times(values: np.ndarray, times: float) -> np.ndarray:
    return values if values.dtype.kind in "bu" else (values * times).astype(values.dtype)


def gradient_of(value: float | None) -> Forge:
    """Return a forger of gradients: of their values, or of the rows they come of."""

    def forge(attack: Attack, reply: Message) -> None:
        if "shape" not in reply.content:
            return
        if value is None:
            says(num_examples=MANY)(attack, reply)
        else:
            arrays = reply.content["arrays"]
            for name, array in arrays.items():
                arrays[name] = Array(np.full_like(array.numpy(), value))

    return forge


def far_too_large(attack: Attack, reply: Message) -> None:
    """Add two megabytes that nobody asked for."""
    where = "arrays" if "arrays" in reply.content else "more"
    record = reply.content.get(where, ArrayRecord())
    record["more"] = Array(np.zeros(1 << 18))
    reply.content[where] = record


def evaluates_to(**numbers: Any) -> Forge:
    """Return a forger of evaluations."""

    def forge(attack: Attack, reply: Message) -> None:
        if "accuracy" in reply.content.get("metrics", {}):
            says(**numbers)(attack, reply)

    return forge


ABSENT = "absent"
FORGERIES = {
    ABSENT: Forgery("nothing; one client does not train", kind="nothing"),
    "samples": Forgery(
        "10^6 samples and a junk model; asked, it stated its rows", reply=claims_rows
    ),
    "stated samples": Forgery(
        "10^6 samples stated from the first, all numbers to match, and a junk model",
        reply=lives_up_to_rows,
        answer=states_rows,
    ),
    "numbers": Forgery(
        "10^15 steps, step sizes of sum 10^-11, a length of 10^-11, losses of 10^15, in turn",
        reply=in_turn(
            says(steps=1e15),
            says(lr_sum=1e-11),
            says(length=1e-11),
            says(last_loss=1e15, train_loss=1e15),
        ),
    ),
    "low loss": Forgery("losses of -99", reply=says(last_loss=-99.0, train_loss=-99.0)),
    "report": Forgery("reports of 9e14", reply=report_of(9e14), needs="reports"),
    "counts, width": Forgery(
        "class counts of 10,000 classes",
        answer=who_says(class_counts=[1] * 10_000, num_examples=10_000),
        needs="class_counts",
    ),
    "counts, size": Forgery(
        "2^50 rows of one class",
        answer=who_says(class_counts=[2**50] + [0] * 9, num_examples=2**50),
        needs="class_counts",
    ),
    "gradient's samples": Forgery(
        "10^6 samples for its gradient", answer=gradient_of(None), needs="gradients"
    ),
    "gradient": Forgery("a gradient of 9e14", answer=gradient_of(9e14), needs="gradients"),
    "identity": Forgery(
        "the number of another client",
        reply=says(partition_id=CULPRIT + 1),
        answer=who_says(partition_id=CULPRIT + 1),
    ),
    "clients": Forgery("2^53 clients in all", answer=who_says(num_partitions=2**53)),
    "size": Forgery("2 MB more than asked for", reply=far_too_large, answer=far_too_large),
    "evaluation": Forgery(
        "an evaluation of 10^15 rows and accuracy 1e308",
        answer=evaluates_to(num_examples=10**15, accuracy=1e308, loss=1e308),
        evaluates=True,
    ),
    "long report": Forgery(
        "reports 50 times as long", kind="model", reply=scaled(50.0, model=False), needs="reports"
    ),
    "sign flip": Forgery("the update backwards", kind="model", reply=scaled(-1.0)),
    "x100": Forgery("the update 100 times as long", kind="model", reply=scaled(100.0)),
}


@dataclass
class Outcome:
    """What came of one case."""

    method: str
    forgery: str  # empty for honest runs
    column: str
    accuracy: float  # 0 where the run stopped
    stopped: str = ""  # why, if it did
    named: bool = False  # whether the log names the hostile client
    blamed: list[int] = field(default_factory=list)  # honest clients whose reply was refused
    resumed: bool = False  # whether the run goes on from its folder with honest clients


def federation_of(method: Any, seed: int = 0) -> Federation:
    """Return the federation that is attacked."""
    settings = {
        "method": str(method),
        "model": "mlp(widths=(24,))",
        "seed": seed,
        "rounds": WARM,
        "data": {"name": "digits", "proxy_per_class": 5},
        "partition": {"how": "dirichlet(alpha=1.0, minimum=20)", "clients": CLIENTS},
        "local": {"lr": LR, "epochs": EPOCHS, "batch": BATCH},
        "sim": {"participation": "fraction(rate=1.0)"},
    }
    return build(from_mapping(settings).resolved())


@cache
def _warm() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model that all cases begin with."""
    federation = federation_of("fedavg")
    server, states = federation.begin()
    trained, _ = list(federation.rounds_from(server, states))[-1]
    return trained.send, trained.buffers


def _first(federation: Federation) -> ArrayRecord:
    return ArrayRecord(federation.net.state_dict(*_warm()))


def _grid(federation: Federation, tamper: Any, misstate: Any) -> LocalGrid:
    app = app_for(federation)
    return LocalGrid(app, CLIENTS, tamper, misstate=misstate, carry=lambda message: message)


def _nothing(client: int, reply: Message) -> Iterable[Message]:
    return [reply]


def _strategy(federation: Federation, folder: Path | None, guard: Any, evaluates: bool) -> Any:
    return strategy_of(
        federation,
        seed=0,
        handling=Handling(guard=guard, patience=2.0),
        records=Records(folder),
        fraction_evaluate=1.0 if evaluates else 0.0,
        min_train_nodes=2,
    )


class _Listener(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def attacked(case: tuple[str, str, str]) -> Outcome:
    """Run one case: a method, what is forged (nothing if empty), and the column."""
    name, forgery, column = case
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    log = logging.getLogger("flwr")
    log.handlers = [listener := _Listener()]
    chosen = FORGERIES.get(forgery, Forgery("nothing"))
    federation = federation_of(parse(ARGUMENTS.get(name, name), "method"))
    guarded = column == "template" and not is_private(federation.method)  # dp takes no guard
    guard = Guard() if guarded else None
    attack = Attack(chosen.reply, chosen.answer, forgery == ABSENT)
    outcome = Outcome(name, forgery, column, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        strategy = _strategy(federation, Path(folder), guard, chosen.evaluates)
        attack.grid = _grid(federation, attack.trained, attack.answered)
        try:
            strategy.start(attack.grid, _first(federation), ROUNDS, timeout=5)
            record = strategy.journal.records[-1]
            outcome.accuracy = float(record.metric("accuracy") or 0.0)
            if chosen.evaluates:
                mean = record.metrics.get("clients_accuracy_mean_by_rows")
                if not isinstance(mean, float) or not 0 <= mean <= 1:
                    outcome.stopped = f"clients' mean accuracy is {mean}"
        except Exception as error:
            outcome.stopped = f"{type(error).__name__}: {error}"[:200]
        node = next(n for n in attack.grid.contexts if attack.grid.client(n) == CULPRIT)
        told = (f"client {CULPRIT}:", f"client {CULPRIT} ", f"node {node}")
        outcome.named = any(word in line for line in listener.lines for word in told)
        refused = getattr(strategy.journal, "refused", {})
        ids = {
            int(why.split(":")[0].removeprefix("client "))
            for why in refused
            if why.startswith("client ") and "times the median norm" not in why
        }
        outcome.blamed = sorted(ids - {CULPRIT})
        again = _strategy(federation, Path(folder), guard, False)
        try:
            honest = _grid(federation, _nothing, _nothing)
            again.start(honest, _first(federation), ROUNDS + 1, timeout=5)
            outcome.resumed = again.journal.records[-1].replies == CLIENTS
        except Exception as error:
            outcome.stopped = outcome.stopped or f"when resumed: {error}"[:200]
    return outcome


def cases_of(
    methods: list[str], forgeries: list[str], columns: Iterable[str]
) -> list[tuple[str, str, str]]:
    """Return all cases that touch the methods, honest runs without the guard first."""
    found = []
    for name in methods:
        method = parse(ARGUMENTS.get(name, name), "method")
        hostile = [f for f in forgeries if f != ABSENT]
        touching = [f for f in hostile if FORGERIES[f].touches(method)]
        for column in columns:
            honest = ["", ABSENT] if column == "plain" else []
            found += [(name, forgery, column) for forgery in [*honest, *touching]]
    return found


def method_table(now: list[Outcome], before: list[Outcome]) -> str:
    """Return what forged numbers and hostile models do to each method."""
    heads = ["method", "honest", "nine of ten", "forged numbers: before", "now", "template"]
    heads += [f"{name}: {when}" for name in ("sign flip", "x100") for when in ("now", "template")]
    rows = []
    for name in dict.fromkeys(each.method for each in now):
        own = [o for o in now if o.method == name]
        old = [o for o in before if o.method == name]
        cells = [f"`{name}`", _text(_accuracy(own, "", "plain"))]
        cells.append(_text(_accuracy(own, ABSENT, "plain")))
        cells += [_worst(old, "plain"), _worst(own, "plain"), _worst(own, "template")]
        for forgery in ("sign flip", "x100"):
            cells += [_text(_accuracy(own, forgery, column)) for column in COLUMNS]
        rows.append(cells)
    return _table(heads, rows)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a table without the columns in which nothing was measured."""
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    lines = [[heads[i] for i in kept], ["---"] * len(kept)]
    lines += [[row[i] for i in kept] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def forgery_table(now: list[Outcome], before: list[Outcome]) -> str:
    """Return what each forgery does: how many methods it takes below the bar, and to what share.

    Where a client is refused, the others learn alone: the share of what nine honest clients learn
    is beside the share of what ten learn.
    """
    heads = ["forged", "methods", "below the bar: before", "now", "template"]
    heads += ["lowest share of ten honest: now", "template", "of nine: now", "template"]
    heads += ["stopped or not resumed: before", "now"]
    lines = []
    for name, forgery in FORGERIES.items():
        if name == ABSENT:
            continue
        ten = {
            "before": _shares(before, name, "plain", ""),
            "now": _shares(now, name, "plain", ""),
            "template": _shares(now, name, "template", ""),
        }
        nine = [_shares(now, name, column, ABSENT) for column in COLUMNS]
        if not (ten["now"] or ten["template"]):
            continue
        tried = {method for share in ten.values() for method in share}
        below = {k: sum(v < BAR[forgery.kind] for v in s.values()) for k, s in ten.items()}
        cells = [
            str(len(tried)),
            *(f"{below[k]} of {len(ten[k])}" if ten[k] else "" for k in ten),
            *(_lowest(share) for share in (ten["now"], ten["template"], *nine)),
            *(_stopped(rows, name) for rows in (before, now)),
        ]
        lines.append([f"{name}: {forgery.what}", *cells])
    return _table(heads, lines)


def _shares(rows: list[Outcome], forgery: str, column: str, honest: str) -> dict[str, float]:
    """Return each method's accuracy under a forgery, as a share of that of honest clients."""
    usual = {o.method: o.accuracy for o in rows if o.forgery == honest and o.column == "plain"}
    return {
        o.method: o.accuracy / max(usual[o.method], 1e-9)
        for o in rows
        if o.forgery == forgery and o.column == column and o.method in usual
    }


def _lowest(share: dict[str, float]) -> str:
    low = min(share, key=lambda method: share[method], default="")
    return f"{share[low]:.2f} ({low})" if low else ""


def _stopped(rows: list[Outcome], forgery: str) -> str:
    cases = [o for o in rows if o.forgery == forgery]
    return str(sum(bool(o.stopped or not o.resumed) for o in cases)) if cases else ""


def failures(now: list[Outcome]) -> list[str]:
    """Return in words what misses the bar."""
    said = []
    honest = {o.method: o.accuracy for o in now if not o.forgery and o.column == "plain"}
    nine = {o.method: f"{o.accuracy:.3f}" for o in now if o.forgery == ABSENT}
    for o in now:
        if not o.forgery:
            continue
        kind = FORGERIES[o.forgery].kind
        where = f"{o.method}, {o.forgery}, {o.column}"
        if o.accuracy < BAR[kind] * honest[o.method]:
            others = nine.get(o.method, "not measured")
            said.append(
                f"{where}: {o.accuracy:.3f}, ten honest {honest[o.method]:.3f}, nine {others}"
            )
        if o.stopped or not o.resumed:
            said.append(f"{where}: {o.stopped or 'does not go on with all clients'}")
        if o.blamed:
            said.append(f"{where}: honest clients {o.blamed} were refused")
    return said


def _accuracy(rows: list[Outcome], forgery: str, column: str) -> float | None:
    found = [o.accuracy for o in rows if o.forgery == forgery and o.column == column]
    return median(found) if found else None


def _worst(rows: list[Outcome], column: str) -> str:
    numbers = [
        o
        for o in rows
        if o.column == column and o.forgery and FORGERIES[o.forgery].kind == "number"
    ]
    if not numbers:
        return ""
    low = min(numbers, key=lambda o: o.accuracy)
    return (
        f"{'stops' if low.stopped and not low.accuracy else f'{low.accuracy:.2f}'} ({low.forgery})"
    )


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def read(path: Path | None) -> list[Outcome]:
    """Return the outcomes of a file."""
    return [] if path is None else [Outcome(**row) for row in json.loads(path.read_text())]


def write(path: Path, found: list[Outcome]) -> None:
    """Write outcomes, a line each."""
    rows = sorted(found, key=lambda o: (o.method, o.forgery, o.column))
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(json.dumps(asdict(o)) for o in rows) + "\n]\n")
    part.replace(path)


def main() -> None:
    """Attack and print the tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--methods", nargs="*", default=[])
    options.add_argument("--forgeries", nargs="*", default=list(FORGERIES), choices=FORGERIES)
    options.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=COLUMNS)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument(
        "--out", type=Path, help="where the outcomes go, as JSON; what it holds is not run again"
    )
    options.add_argument("--before", type=Path, help="outcomes of an older version")
    options.add_argument("--table", type=Path, help="print the tables of a file and run nothing")
    chosen = options.parse_args()
    if chosen.table is None:
        own = [c.name for c in cards("method") if c.make.__module__.startswith("fedbasin.")]
        logging.disable(logging.INFO)
        cases = cases_of(chosen.methods or sorted(own), chosen.forgeries, chosen.columns)
        found = read(chosen.out) if chosen.out is not None and chosen.out.exists() else []
        done = {(o.method, o.forgery, o.column) for o in found}
        cases = [case for case in cases if case not in done]
        with ProcessPoolExecutor(chosen.workers, get_context("spawn")) as pool:
            for number, outcome in enumerate(pool.map(attacked, cases), 1):
                found.append(outcome)
                if chosen.out is not None:
                    write(chosen.out, found)
                if sys.stderr.isatty() or number % 50 == 0:
                    print(f"{number} of {len(cases)}: {outcome.method}", file=sys.stderr)
    else:
        found = read(chosen.table)
    before = read(chosen.before)
    print(method_table(found, before))
    print()
    print(forgery_table(found, before))
    print()
    print("\n".join(failures(found)) or "All within the bar.")


if __name__ == "__main__":
    main()

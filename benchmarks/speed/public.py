"""The public simulator benchmark: fedbasin, pfl-research, FedLab and a plain loop on one device.

    python benchmarks/speed/public.py --out public.json

W1 is pfl-research's CIFAR-10 setting (1000 clients of 50 images, 50 a round, one epoch, batch 10,
learning rate 0.1, their CNN with dropout, 1500 rounds, the test rows scored every 10 rounds); W0
is FedIMA's Fashion-MNIST CNN (100 clients of 500, 10 a round, batch 50). fedbasin runs all rounds;
a peer runs a few blocks of ten in between, each block with one scoring. Every peer has a process of
its own and starts from the same model and rows: real ones where FEDBASIN_DATA has them, else
synthetic ones of the same shape. Peers that are not installed are looked for in .carry/peers
(benchmarks/speed/carry.sh fills it for a machine without network).
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from peers import driver, work
from rich.console import Console

PEERS = {
    "fedbasin": "ours",
    "pfl-research": "pfl_research",
    "FedLab": "fedlab_serial",
    "plain loop": "plain",
}
BLOCK = 10


def device_by_default() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def measure(
    shape: str,
    args: argparse.Namespace,
    folder: Path,
    keep: Callable[[list[driver.Row], str], None],
) -> tuple[list[driver.Row], str]:
    """Take turns: a block of every peer, then a share of our rounds, until all is run.

    Rows are kept after every turn, so that an interrupted run leaves what it has.
    """
    path = folder / f"{shape}.npz"
    made = work.make(work.SHAPES[shape])
    work.write(made, path)
    rows, running = [], []
    for name in args.peers.split(","):
        row = driver.Row(name, shape, 1)
        rows.append(row)
        driver.note(f"{shape}: starting {name}")
        try:
            running.append(driver.Running(row, sys.executable, PEERS[name], path, args.device))
        except driver.Gone as reason:
            row.missing = str(reason)
    running = [peer for peer in running if driver.warm_up(peer, args.warmup, score=True)]
    turns = max(args.repeats, 1)
    for turn in range(turns):
        for peer in list(running):
            blocks = 1
            if peer.row.peer == "fedbasin":
                blocks = -(-args.rounds // (args.block * turns))
            driver.note(f"{shape}: {peer.row.peer}, turn {turn + 1} of {turns}")
            for _ in range(blocks):
                if not driver.measure(peer, args.block, score=True):
                    running.remove(peer)
                    break
        keep(rows, made.source)
    for peer in running:
        peer.close()
    return rows, made.source


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="W1,W0")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=1500, help="rounds of fedbasin")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of each peer")
    parser.add_argument("--block", type=int, default=BLOCK, help="rounds between two scorings")
    parser.add_argument("--warmup", type=int, default=5, help="unmeasured rounds before the first")
    parser.add_argument("--device", default=device_by_default())
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    facts, found, console = driver.machine(args.device), [], Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes.split(","):

            def keep(rows: list[driver.Row], source: str, shape: str = shape) -> None:
                facts[f"rows_of_{shape}"] = source
                if args.out:
                    driver.save(args.out, found + rows, facts)

            rows, source = measure(shape, args, Path(folder), keep)
            found.extend(rows)
            ours = next((row for row in rows if row.peer == "fedbasin" and row.seconds), None)
            console.print(
                driver.table(
                    rows, f"{shape}: {work.SHAPES[shape].what}, {facts['device']}, {source}"
                )
            )
            if ours:
                spent = sum(ours.seconds) * args.block
                console.print(f"fedbasin: {len(ours.seconds) * args.block} rounds in {spent:.1f} s")


if __name__ == "__main__":
    main()

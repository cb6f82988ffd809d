"""Pack datasets into pieces that fit through a limited transfer to another machine.

    FEDBASIN_DATA=FOLDER python benchmarks/evidence/carry_data.py uoft-cs/cifar10 [OWNER/NAME...]

The pieces are a tar archive cut into equal parts of at most --mib, in .carry/ (which git ignores):
part00, part01, ... On the other machine, put them into one folder and unpack them:

    cat PIECES/part* | tar -x -C DATA && export FEDBASIN_DATA=DATA
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tarfile
from pathlib import Path

CARRY = Path(__file__).parents[2] / ".carry"
MIB = 1 << 20


def packed(data: Path, names: list[str]) -> bytes:
    """Return a tar archive of some datasets, with paths as below the data folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            if not (data / name).is_dir():
                sys.exit(f"{name} is not a folder in {data}")
            archive.add(data / name, arcname=name)
    return buffer.getvalue()


def cut(content: bytes, most: int) -> list[bytes]:
    """Cut bytes into as few equal pieces as keep to a size."""
    pieces = -(-len(content) // most)
    size = -(-len(content) // pieces)
    return [content[start : start + size] for start in range(0, len(content), size)]


def main() -> None:
    """Write the pieces and print their names and sizes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="OWNER/NAME")
    parser.add_argument("--data", type=Path, default=os.environ.get("FEDBASIN_DATA"))
    parser.add_argument("--mib", type=int, default=45, help="size of a piece; 45 by default")
    options = parser.parse_args()
    if options.data is None:
        parser.error("name the folder of the datasets: --data or FEDBASIN_DATA")
    CARRY.mkdir(exist_ok=True)
    for old in CARRY.glob("part*"):
        old.unlink()
    for number, piece in enumerate(cut(packed(options.data, options.names), options.mib * MIB)):
        path = CARRY / f"part{number:02d}"
        path.write_bytes(piece)
        print(f"{path} {len(piece) / MIB:.1f} MiB")


if __name__ == "__main__":
    main()

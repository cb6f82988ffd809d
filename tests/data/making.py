"""Small parquet files in the hub's layout, made on the spot."""

import hashlib
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def encoded(pixels, form="PNG", mode=None):
    """Encode [H, W] or [H, W, 3] pixels losslessly."""
    image = Image.fromarray(np.asarray(pixels, dtype=np.uint8))
    buffer = io.BytesIO()
    (image.convert(mode) if mode else image).save(buffer, form, lossless=True)
    return buffer.getvalue()


def bomb(width, height):
    """A PNG of a few bytes that claims to be enormous."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def cell(data):
    return {"bytes": data, "path": None}


def pictures(rng, count, height=6, width=5, channels=1):
    shape = (count, height, width) if channels == 1 else (count, height, width, channels)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def write(path: Path, columns, classes=None, row_group_size=None):
    """Write one parquet file; `classes` maps a column to its class names, as on the hub."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    features = {
        name: {"_type": "ClassLabel", "names": names} for name, names in (classes or {}).items()
    }
    for name in columns:
        if isinstance(columns[name], list) and columns[name] and isinstance(columns[name][0], dict):
            features[name] = {"_type": "Image"}
    meta = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(meta), path, row_group_size=row_group_size)
    return path


def images_file(
    path, pixels, labels, *, image="image", label="label", form="PNG", classes=None, **more
):
    columns = {
        image: [cell(encoded(p, form)) for p in pixels],
        label: list(map(int, labels)),
        **more,
    }
    return write(path, columns, classes)


def usps(root, rng, train=20, test=10, **options):
    """A mirror with a small stand-in for USPS; return the pixels and labels of both splits."""
    made = {}
    for split, count in (("train", train), ("test", test)):
        pixels, labels = pictures(rng, count), np.arange(count) % 10
        path = root / "flwrlabs/usps/data" / f"{split}-00000-of-00001.parquet"
        images_file(path, pixels, labels, **options)
        made[split] = (pixels, labels)
    return made


def sums(root, files, where=None):
    """Write SHA256SUMS for some files, relative to the folder it lies in."""
    where = where or root
    lines = [
        f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.relative_to(where)}\n" for f in files
    ]
    (where / "SHA256SUMS").write_text("".join(lines))

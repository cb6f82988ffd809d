"""Write the network of a finished run as a file that loads without fedbasin.

The files hold the network and its input transform. An exported program takes rows as the run
stored them: pixels 0..255, tokens, or the encoded numbers of a table. ``interface.json`` beside it
gives the shape of a row, the number of outputs and the names of classes. ``encoding.json`` says
how a table became numbers.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fedbasin.api.network import trained_network
from fedbasin.core.record import RunFolder
from fedbasin.core.suggest import nearest
from fedbasin.data.transform import Transform
from fedbasin.experiment.interface import Interface
from fedbasin.experiment.objects import Factory
from fedbasin.models.pretrained import save_encoder

_STORED = {"image": torch.uint8, "text": torch.int64, "table": torch.float32}


class Exported(nn.Module):
    """A network behind its input transform.

    Args:
        network: the trained network.
        interface: what it takes.
    """

    def __init__(self, network: nn.Module, interface: Interface) -> None:
        super().__init__()
        self.network = network
        self._transform = Transform(interface.mean, interface.std, kind=interface.kind)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the outputs [n, k] of stored rows [n, ...]."""
        outputs: Tensor = self.network(self._transform(rows))
        return outputs


def export(
    run: Path | str, out: Path | str, *, to: str, model: nn.Module | Factory | None = None
) -> list[Path]:
    """Write the network of a finished run into a folder and return the files.

    Args:
        run: the run's folder.
        out: the folder to write; it must not exist, or be empty.
        to: ``"safetensors"`` (weights by name), ``"torch"`` (a program for `torch.export.load`),
            ``"onnx"`` (for ONNX Runtime and others) or ``"hf"`` (a Hugging Face encoder with
            its head, for runs with ``hf(...)``).
        model: the module or function that the run was started with, where it was given as one.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r} is no format; {nearest(to, FORMATS)}")
    folder = RunFolder(Path(run))
    network = trained_network(folder.path, model).cpu()
    interface = Interface.read(folder.interface)
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: choose another")
    target.mkdir(parents=True, exist_ok=True)
    written = FORMATS[to](network, interface, folder, target)
    for extra in (folder.interface, folder.encoding):
        if extra.exists():
            written.append(Path(shutil.copyfile(extra, target / extra.name)))
    return written


def _safetensors(
    network: nn.Module, interface: Interface, folder: RunFolder, target: Path
) -> list[Path]:
    return [Path(shutil.copyfile(folder.model, target / "model.safetensors"))]


def _torch(network: nn.Module, interface: Interface, folder: RunFolder, target: Path) -> list[Path]:
    path = target / "model.pt2"
    with _quiet():
        program = torch.export.export(
            Exported(network, interface),
            (_example(interface),),
            dynamic_shapes=({0: torch.export.Dim("rows", min=1)},),
        )
        torch.export.save(program, path)
    return [path]


def _onnx(network: nn.Module, interface: Interface, folder: RunFolder, target: Path) -> list[Path]:
    path = target / "model.onnx"
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"to='onnx' needs the package {error.name}; pip install 'fedbasin[onnx]'"
        ) from None
    with _quiet():
        torch.onnx.export(
            Exported(network, interface),
            (_example(interface),),
            path,
            input_names=["rows"],
            output_names=["outputs"],
            dynamic_shapes=({0: torch.export.Dim("rows", min=1)},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    return [path]


def _hf(network: nn.Module, interface: Interface, folder: RunFolder, target: Path) -> list[Path]:
    return save_encoder(network, target)


FORMATS: dict[str, Callable[[nn.Module, Interface, RunFolder, Path], list[Path]]] = {
    "safetensors": _safetensors,
    "torch": _torch,
    "onnx": _onnx,
    "hf": _hf,
}


def _example(interface: Interface) -> Tensor:
    """Return two rows of zeros as a run stores them: the exporter runs the network on them."""
    return torch.zeros((2, *interface.shape), dtype=_STORED[interface.kind])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' notices; their errors are raised."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)

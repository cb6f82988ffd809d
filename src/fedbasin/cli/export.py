"""``fedbasin export``: the network of a run as a file that loads without fedbasin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.text import Text


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    to: Annotated[
        str,
        typer.Option(
            click_type=click.Choice(["safetensors", "torch", "onnx", "hf"]),
            help="safetensors: weights by name. torch: a program for torch.export.load. onnx: for "
            "ONNX Runtime. hf: a Hugging Face encoder and its head.",
        ),
    ] = "torch",
    out: Annotated[
        Path | None, typer.Option(help="A new folder; RUN/exported-FORMAT by default.")
    ] = None,
    trust: Annotated[
        bool, typer.Option(help="Import and run the modules that the run's settings name.")
    ] = False,
) -> None:
    """Write the trained network so that other programs can use it without fedbasin.

    The program takes rows as the run stored them and gives the network's outputs.
    interface.json beside it says the shape of a row and the names of the classes.
    """
    import fedbasin.experiment  # noqa: F401  (fills the catalogue)
    from fedbasin.api.export import export as write
    from fedbasin.experiment.checks import check_imports

    if not trust:
        check_imports(run)
    written = write(run, out or run / f"exported-{to}", to=to)
    Console().print(Text("\n".join(str(path) for path in written)), soft_wrap=True)

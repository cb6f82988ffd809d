"""``python -m fedbasin`` is ``fedbasin``."""

from fedbasin.cli import main

main()

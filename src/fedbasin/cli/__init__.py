"""The command line."""

from fedbasin.cli.app import app as app
from fedbasin.cli.app import main as main

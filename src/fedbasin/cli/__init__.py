"""The command line: run, compare, resume, and look around."""

from fedbasin.cli.app import app as app
from fedbasin.cli.app import main as main

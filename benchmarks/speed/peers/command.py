"""What every peer script reads from its command line."""

import argparse

from peers import work


def read():
    """Return the work and the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", help="file written by peers.work")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="processes that train clients")
    parser.add_argument("--compile", default="auto", help="fedbasin's sim.compile")
    parser.add_argument("--precision", default="auto", help="fedbasin's sim.precision")
    options = parser.parse_args()
    return work.read(options.work), options

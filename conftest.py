"""Rooms whose extra is not installed are left out when their doctests are collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["src/fedbasin/deploy/*.py"]

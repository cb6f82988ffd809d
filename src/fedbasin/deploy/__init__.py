"""The same methods and client rules in a real federation, on Flower (``fedbasin[flower]``)."""

from fedbasin.deploy.app import first_arrays, nested, strategy_of, write_app
from fedbasin.deploy.client import ClientSetup, app_of, client_app, place
from fedbasin.deploy.own_rows import node_table, read_encoding, read_table
from fedbasin.deploy.replies import Guard
from fedbasin.deploy.secure import Secure
from fedbasin.deploy.settings import Handling, Records, ServerSide
from fedbasin.deploy.strategy import FedbasinStrategy

__all__ = [
    "ClientSetup",
    "FedbasinStrategy",
    "Guard",
    "Handling",
    "Records",
    "Secure",
    "ServerSide",
    "app_of",
    "client_app",
    "first_arrays",
    "nested",
    "node_table",
    "place",
    "read_encoding",
    "read_table",
    "strategy_of",
    "write_app",
]

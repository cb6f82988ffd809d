"""Room 5: the ways of merging, one file each. Importing the room fills the catalogue."""

from fedbasin.methods.fedavg import FedAvg as FedAvg
from fedbasin.methods.fedprox import FedProx as FedProx
from fedbasin.methods.scaffold import Scaffold as Scaffold

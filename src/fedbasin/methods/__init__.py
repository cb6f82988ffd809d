"""Room 5: the ways of merging, one file each. Importing the room fills the catalogue."""

from fedbasin.methods.adabest import AdaBest as AdaBest
from fedbasin.methods.fedacg import FedACG as FedACG
from fedbasin.methods.fedasam import FedASAM as FedASAM
from fedbasin.methods.fedavg import FedAvg as FedAvg
from fedbasin.methods.fedcda import FedCDA as FedCDA
from fedbasin.methods.fedcm import FedCM as FedCM
from fedbasin.methods.feddyn import FedDyn as FedDyn
from fedbasin.methods.fedlaw import FedLAW as FedLAW
from fedbasin.methods.fedlesam import FedLESAM as FedLESAM
from fedbasin.methods.fedprox import FedProx as FedProx
from fedbasin.methods.fedsam import FedSAM as FedSAM
from fedbasin.methods.fedsmoo import FedSMOO as FedSMOO
from fedbasin.methods.fedspeed import FedSpeed as FedSpeed
from fedbasin.methods.fedwcm import FedWCM as FedWCM
from fedbasin.methods.ima import IMA as IMA
from fedbasin.methods.mime import Mime as Mime
from fedbasin.methods.mimelite import MimeLite as MimeLite
from fedbasin.methods.mofedsam import MoFedSAM as MoFedSAM
from fedbasin.methods.scaffold import Scaffold as Scaffold
from fedbasin.methods.swa import SWA as SWA
from fedbasin.methods.wima import WIMA as WIMA

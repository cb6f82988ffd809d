"""Room 5: the ways of merging, one file each. Importing the room fills the catalogue."""

from fedbasin.methods.fedadagrad import FedAdagrad as FedAdagrad
from fedbasin.methods.fedadam import FedAdam as FedAdam
from fedbasin.methods.fedavg import FedAvg as FedAvg
from fedbasin.methods.fedavgm import FedAvgM as FedAvgM
from fedbasin.methods.fedcda import FedCDA as FedCDA
from fedbasin.methods.fedcm import FedCM as FedCM
from fedbasin.methods.fedexp import FedExP as FedExP
from fedbasin.methods.fedgma import FedGMA as FedGMA
from fedbasin.methods.fedlaw import FedLAW as FedLAW
from fedbasin.methods.fedma import FedMA as FedMA
from fedbasin.methods.fednova import FedNova as FedNova
from fedbasin.methods.fedprox import FedProx as FedProx
from fedbasin.methods.fedwcm import FedWCM as FedWCM
from fedbasin.methods.fedyogi import FedYogi as FedYogi
from fedbasin.methods.gamf import GAMF as GAMF
from fedbasin.methods.ima import IMA as IMA
from fedbasin.methods.ldawa import LDAWA as LDAWA
from fedbasin.methods.scaffold import Scaffold as Scaffold
from fedbasin.methods.swa import SWA as SWA
from fedbasin.methods.wima import WIMA as WIMA

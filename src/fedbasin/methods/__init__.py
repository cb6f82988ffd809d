"""Room 5: the ways of merging, one file each. Importing the room fills the catalogue."""

from fedbasin.core.catalogue import CATALOGUE as _CATALOGUE
from fedbasin.methods.adabest import AdaBest as AdaBest
from fedbasin.methods.balancefl import BalanceFL as BalanceFL
from fedbasin.methods.bucketing import Bucketing as Bucketing
from fedbasin.methods.bulyan import Bulyan as Bulyan
from fedbasin.methods.centered_clipping import CenteredClipping as CenteredClipping
from fedbasin.methods.creff import CReFF as CReFF
from fedbasin.methods.dp import DP as DP
from fedbasin.methods.fedacg import FedACG as FedACG
from fedbasin.methods.fedadagrad import FedAdagrad as FedAdagrad
from fedbasin.methods.fedadam import FedAdam as FedAdam
from fedbasin.methods.fedasam import FedASAM as FedASAM
from fedbasin.methods.fedavg import FedAvg as FedAvg
from fedbasin.methods.fedavgm import FedAvgM as FedAvgM
from fedbasin.methods.fedbe import FedBE as FedBE
from fedbasin.methods.fedcda import FedCDA as FedCDA
from fedbasin.methods.fedcm import FedCM as FedCM
from fedbasin.methods.feddf import FedDF as FedDF
from fedbasin.methods.feddyn import FedDyn as FedDyn
from fedbasin.methods.fedexp import FedExP as FedExP
from fedbasin.methods.fedfa import FedFA as FedFA
from fedbasin.methods.fedgen import FedGEN as FedGEN
from fedbasin.methods.fedgma import FedGMA as FedGMA
from fedbasin.methods.fedgrab import FedGraB as FedGraB
from fedbasin.methods.fedlaw import FedLAW as FedLAW
from fedbasin.methods.fedlesam import FedLESAM as FedLESAM
from fedbasin.methods.fedma import FedMA as FedMA
from fedbasin.methods.fednova import FedNova as FedNova
from fedbasin.methods.fedprox import FedProx as FedProx
from fedbasin.methods.fedsam import FedSAM as FedSAM
from fedbasin.methods.fedsmoo import FedSMOO as FedSMOO
from fedbasin.methods.fedspeed import FedSpeed as FedSpeed
from fedbasin.methods.fedwcm import FedWCM as FedWCM
from fedbasin.methods.fedyogi import FedYogi as FedYogi
from fedbasin.methods.gamf import GAMF as GAMF
from fedbasin.methods.ima import IMA as IMA
from fedbasin.methods.krum import Krum as Krum
from fedbasin.methods.ldawa import LDAWA as LDAWA
from fedbasin.methods.median import Median as Median
from fedbasin.methods.mime import Mime as Mime
from fedbasin.methods.mimelite import MimeLite as MimeLite
from fedbasin.methods.mofedsam import MoFedSAM as MoFedSAM
from fedbasin.methods.norm_bound import NormBound as NormBound
from fedbasin.methods.rfa import RFA as RFA
from fedbasin.methods.scaffold import Scaffold as Scaffold
from fedbasin.methods.serverft import ServerFT as ServerFT
from fedbasin.methods.swa import SWA as SWA
from fedbasin.methods.trimmed_mean import TrimmedMean as TrimmedMean
from fedbasin.methods.wima import WIMA as WIMA

# `from fedbasin.methods import ima` gives what makes the method. Its file has the same name, and
# `from fedbasin.methods.ima import ...` reads that.
for _card in tuple(_CATALOGUE.values()):
    if _card.make.__module__.startswith("fedbasin.methods."):
        globals()[_card.name] = _card.make

"""Room 5: the ways of merging, one file each. Importing the room fills the catalogue."""

from fedbasin.methods.balancefl import BalanceFL as BalanceFL
from fedbasin.methods.creff import CReFF as CReFF
from fedbasin.methods.fedavg import FedAvg as FedAvg
from fedbasin.methods.fedbe import FedBE as FedBE
from fedbasin.methods.fedcda import FedCDA as FedCDA
from fedbasin.methods.fedcm import FedCM as FedCM
from fedbasin.methods.feddf import FedDF as FedDF
from fedbasin.methods.fedfa import FedFA as FedFA
from fedbasin.methods.fedgen import FedGEN as FedGEN
from fedbasin.methods.fedgrab import FedGraB as FedGraB
from fedbasin.methods.fedlaw import FedLAW as FedLAW
from fedbasin.methods.fedprox import FedProx as FedProx
from fedbasin.methods.fedwcm import FedWCM as FedWCM
from fedbasin.methods.ima import IMA as IMA
from fedbasin.methods.scaffold import Scaffold as Scaffold
from fedbasin.methods.serverft import ServerFT as ServerFT
from fedbasin.methods.swa import SWA as SWA
from fedbasin.methods.wima import WIMA as WIMA

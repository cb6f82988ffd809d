"""Types of the names of `fedbasin`, which are fetched when they are first used."""

from collections.abc import Callable

from fedbasin import data as data
from fedbasin import testing as testing
from fedbasin.api import Comparison as Comparison
from fedbasin.api import RunResult as RunResult
from fedbasin.api import Tuned as Tuned
from fedbasin.api import compare as compare
from fedbasin.api import export as export
from fedbasin.api import predict as predict
from fedbasin.api import resume as resume
from fedbasin.api import run as run
from fedbasin.api import tune as tune
from fedbasin.core.catalogue import entry as entry
from fedbasin.core.expressions import Choice
from fedbasin.core.expressions import parse as parse
from fedbasin.core.expressions import text as text
from fedbasin.core.metric import AUROC as _AUROC
from fedbasin.core.metric import ECE as _ECE
from fedbasin.core.metric import MAE as _MAE
from fedbasin.core.metric import R2 as _R2
from fedbasin.core.metric import RMSE as _RMSE
from fedbasin.core.metric import Accuracy as _Accuracy
from fedbasin.core.metric import AccuracyPerClass as _AccuracyPerClass
from fedbasin.core.metric import AveragePrecision as _AveragePrecision
from fedbasin.core.metric import BalancedAccuracy as _BalancedAccuracy
from fedbasin.core.metric import Brier as _Brier
from fedbasin.core.metric import ByGroup as _ByGroup
from fedbasin.core.metric import CIndex as _CIndex
from fedbasin.core.metric import GroupMean as _GroupMean
from fedbasin.core.metric import Loss as _Loss
from fedbasin.core.metric import MacroF1 as _MacroF1
from fedbasin.core.metric import Perplexity as _Perplexity
from fedbasin.core.sink import Sink as Sink
from fedbasin.core.task import Binary as _Binary
from fedbasin.core.task import Classification as _Classification
from fedbasin.core.task import Multilabel as _Multilabel
from fedbasin.core.task import Regression as _Regression
from fedbasin.core.task import Survival as _Survival
from fedbasin.core.task import Tokens as _Tokens
from fedbasin.experiment import DataConfig as DataConfig
from fedbasin.experiment import Experiment as Experiment
from fedbasin.experiment import LocalConfig as LocalConfig
from fedbasin.experiment import PartitionConfig as PartitionConfig
from fedbasin.experiment import SimConfig as SimConfig
from fedbasin.experiment import SnapshotConfig as SnapshotConfig
from fedbasin.experiment import TableConfig as TableConfig
from fedbasin.experiment import build as build
from fedbasin.local.kept_momentum import KeptMomentum as _KeptMomentum
from fedbasin.local.losses import BalancedRows as _BalancedRows
from fedbasin.local.losses import BalancedSoftmax as _BalancedSoftmax
from fedbasin.local.losses import ClassBalanced as _ClassBalanced
from fedbasin.local.losses import Focal as _Focal
from fedbasin.local.losses import LogitAdjusted as _LogitAdjusted
from fedbasin.local.optimisers import SGD as _SGD
from fedbasin.local.optimisers import Adam as _Adam
from fedbasin.local.optimisers import AdamW as _AdamW
from fedbasin.local.personalise import Epochs as _Epochs
from fedbasin.local.personalise import Steps as _Steps
from fedbasin.local.privacy import ClipUpdate as _ClipUpdate
from fedbasin.local.privacy import LocalDP as _LocalDP
from fedbasin.local.prox import Prox as _Prox
from fedbasin.local.sharpness import ASAM as _ASAM
from fedbasin.local.sharpness import LESAM as _LESAM
from fedbasin.local.sharpness import SAM as _SAM
from fedbasin.methods.adabest import AdaBest as _AdaBest
from fedbasin.methods.balancefl import BalanceFL as _BalanceFL
from fedbasin.methods.bucketing import Bucketing as _Bucketing
from fedbasin.methods.bulyan import Bulyan as _Bulyan
from fedbasin.methods.centered_clipping import CenteredClipping as _CenteredClipping
from fedbasin.methods.creff import CReFF as _CReFF
from fedbasin.methods.dp import DP as _DP
from fedbasin.methods.fedacg import FedACG as _FedACG
from fedbasin.methods.fedadagrad import FedAdagrad as _FedAdagrad
from fedbasin.methods.fedadam import FedAdam as _FedAdam
from fedbasin.methods.fedasam import FedASAM as _FedASAM
from fedbasin.methods.fedavg import FedAvg as _FedAvg
from fedbasin.methods.fedavgm import FedAvgM as _FedAvgM
from fedbasin.methods.fedbe import FedBE as _FedBE
from fedbasin.methods.fedcda import FedCDA as _FedCDA
from fedbasin.methods.fedcm import FedCM as _FedCM
from fedbasin.methods.feddf import FedDF as _FedDF
from fedbasin.methods.feddyn import FedDyn as _FedDyn
from fedbasin.methods.fedexp import FedExP as _FedExP
from fedbasin.methods.fedfa import FedFA as _FedFA
from fedbasin.methods.fedgen import FedGEN as _FedGEN
from fedbasin.methods.fedgma import FedGMA as _FedGMA
from fedbasin.methods.fedgrab import FedGraB as _FedGraB
from fedbasin.methods.fedlaw import FedLAW as _FedLAW
from fedbasin.methods.fedlesam import FedLESAM as _FedLESAM
from fedbasin.methods.fedma import FedMA as _FedMA
from fedbasin.methods.fednova import FedNova as _FedNova
from fedbasin.methods.fedprox import FedProx as _FedProx
from fedbasin.methods.fedsam import FedSAM as _FedSAM
from fedbasin.methods.fedsmoo import FedSMOO as _FedSMOO
from fedbasin.methods.fedspeed import FedSpeed as _FedSpeed
from fedbasin.methods.fedwcm import FedWCM as _FedWCM
from fedbasin.methods.fedyogi import FedYogi as _FedYogi
from fedbasin.methods.gamf import GAMF as _GAMF
from fedbasin.methods.ima import IMA as _IMA
from fedbasin.methods.krum import Krum as _Krum
from fedbasin.methods.ldawa import LDAWA as _LDAWA
from fedbasin.methods.median import Median as _Median
from fedbasin.methods.mime import Mime as _Mime
from fedbasin.methods.mimelite import MimeLite as _MimeLite
from fedbasin.methods.mofedsam import MoFedSAM as _MoFedSAM
from fedbasin.methods.norm_bound import NormBound as _NormBound
from fedbasin.methods.rfa import RFA as _RFA
from fedbasin.methods.scaffold import Scaffold as _Scaffold
from fedbasin.methods.serverft import ServerFT as _ServerFT
from fedbasin.methods.swa import SWA as _SWA
from fedbasin.methods.trimmed_mean import TrimmedMean as _TrimmedMean
from fedbasin.methods.wima import WIMA as _WIMA
from fedbasin.sim.attacks import ALIE as _ALIE
from fedbasin.sim.attacks import IPM as _IPM
from fedbasin.sim.attacks import Backdoor as _Backdoor
from fedbasin.sim.attacks import Gaussian as _Gaussian
from fedbasin.sim.attacks import LabelFlip as _LabelFlip
from fedbasin.sim.attacks import MinMax as _MinMax
from fedbasin.sim.attacks import Scaled as _Scaled
from fedbasin.sim.attacks import SignFlip as _SignFlip

accuracy = _Accuracy
accuracy_per_class = _AccuracyPerClass
adabest = _AdaBest
adam = _Adam
adamw = _AdamW
alie = _ALIE
asam = _ASAM
auroc = _AUROC
average_precision = _AveragePrecision
backdoor = _Backdoor
balanced_accuracy = _BalancedAccuracy
balanced_rows = _BalancedRows
balanced_softmax = _BalancedSoftmax
balancefl = _BalanceFL
binary = _Binary
brier = _Brier
bucketing = _Bucketing
bulyan = _Bulyan
by_group = _ByGroup
c_index = _CIndex
centered_clipping = _CenteredClipping
class_balanced = _ClassBalanced
classification = _Classification
clip_update = _ClipUpdate
creff = _CReFF
dp = _DP
ece = _ECE
epochs = _Epochs
fedacg = _FedACG
fedadagrad = _FedAdagrad
fedadam = _FedAdam
fedasam = _FedASAM
fedavg = _FedAvg
fedavgm = _FedAvgM
fedbe = _FedBE
fedcda = _FedCDA
fedcm = _FedCM
feddf = _FedDF
feddyn = _FedDyn
fedexp = _FedExP
fedfa = _FedFA
fedgen = _FedGEN
fedgma = _FedGMA
fedgrab = _FedGraB
fedlaw = _FedLAW
fedlesam = _FedLESAM
fedma = _FedMA
fednova = _FedNova
fedprox = _FedProx
fedsam = _FedSAM
fedsmoo = _FedSMOO
fedspeed = _FedSpeed
fedwcm = _FedWCM
fedyogi = _FedYogi
focal = _Focal
gamf = _GAMF
gaussian = _Gaussian
group_mean = _GroupMean
ima = _IMA
ipm = _IPM
kept_momentum = _KeptMomentum
krum = _Krum
label_flip = _LabelFlip
ldawa = _LDAWA
lesam = _LESAM
local_dp = _LocalDP
logit_adjusted = _LogitAdjusted
loss = _Loss
macro_f1 = _MacroF1
mae = _MAE
median = _Median
mime = _Mime
mimelite = _MimeLite
min_max = _MinMax
mofedsam = _MoFedSAM
multilabel = _Multilabel
norm_bound = _NormBound
perplexity = _Perplexity
prox = _Prox
r2 = _R2
regression = _Regression
rfa = _RFA
rmse = _RMSE
sam = _SAM
scaffold = _Scaffold
scaled = _Scaled
serverft = _ServerFT
sgd = _SGD
sign_flip = _SignFlip
steps = _Steps
survival = _Survival
swa = _SWA
tokens = _Tokens
trimmed_mean = _TrimmedMean
wima = _WIMA

alexnet: Callable[..., Choice]
at_most: Callable[..., Choice]
bernoulli: Callable[..., Choice]
categorical_dirichlet: Callable[..., Choice]
cifar_cnn: Callable[..., Choice]
class_dirichlet: Callable[..., Choice]
client_dirichlet: Callable[..., Choice]
constant: Callable[..., Choice]
cosine: Callable[..., Choice]
count: Callable[..., Choice]
custom: Callable[..., Choice]
cyclic: Callable[..., Choice]
densenet121: Callable[..., Choice]
digit_cnn: Callable[..., Choice]
dirichlet: Callable[..., Choice]
domain_skew: Callable[..., Choice]
emnist_cnn: Callable[..., Choice]
epoch_decay: Callable[..., Choice]
exponential: Callable[..., Choice]
fedcda_cnn: Callable[..., Choice]
fedlab_dirichlet: Callable[..., Choice]
fedlab_shards: Callable[..., Choice]
fmnist_cnn: Callable[..., Choice]
fraction: Callable[..., Choice]
given: Callable[..., Choice]
grouped_dirichlet: Callable[..., Choice]
hf: Callable[..., Choice]
hybrid_dirichlet: Callable[..., Choice]
iid: Callable[..., Choice]
lenet: Callable[..., Choice]
logistic: Callable[..., Choice]
lora: Callable[..., Choice]
mlp: Callable[..., Choice]
mobilenetv2: Callable[..., Choice]
natural: Callable[..., Choice]
only: Callable[..., Choice]
pachinko: Callable[..., Choice]
pfl_cnn: Callable[..., Choice]
poisson: Callable[..., Choice]
quantiles: Callable[..., Choice]
quantity_skew: Callable[..., Choice]
reseeded: Callable[..., Choice]
resnet110: Callable[..., Choice]
resnet18: Callable[..., Choice]
resnet20: Callable[..., Choice]
resnet34: Callable[..., Choice]
resnet56: Callable[..., Choice]
resnet8: Callable[..., Choice]
shakespeare_lstm: Callable[..., Choice]
shards: Callable[..., Choice]
simple_cnn: Callable[..., Choice]
size_dirichlet: Callable[..., Choice]
stepwise: Callable[..., Choice]
timm: Callable[..., Choice]
vgg11: Callable[..., Choice]
warmup: Callable[..., Choice]
wrn56_4: Callable[..., Choice]

"""Room 4: a client's training, its optimiser and the small rules around it."""

from fedbasin.local.batches import batches as batches
from fedbasin.local.kept_momentum import KeptMomentum as KeptMomentum
from fedbasin.local.losses import BalancedRows as BalancedRows
from fedbasin.local.losses import BalancedSoftmax as BalancedSoftmax
from fedbasin.local.losses import ClassBalanced as ClassBalanced
from fedbasin.local.losses import Focal as Focal
from fedbasin.local.losses import LogitAdjusted as LogitAdjusted
from fedbasin.local.optimisers import SGD as SGD
from fedbasin.local.optimisers import Adam as Adam
from fedbasin.local.optimisers import AdamW as AdamW
from fedbasin.local.optimisers import Optimiser as Optimiser
from fedbasin.local.personalise import Personalisation as Personalisation
from fedbasin.local.privacy import ClipUpdate as ClipUpdate
from fedbasin.local.privacy import LocalDP as LocalDP
from fedbasin.local.prox import Prox as Prox
from fedbasin.local.schedules import constant as constant
from fedbasin.local.sharpness import SAM as SAM
from fedbasin.local.train import Received as Received
from fedbasin.local.train import Shard as Shard
from fedbasin.local.train import Trained as Trained
from fedbasin.local.train import Trainer as Trainer

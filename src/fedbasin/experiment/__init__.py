"""Builds and runs a federation from one frozen configuration."""

import fedbasin.local as _local
import fedbasin.methods as _methods
import fedbasin.models as _models
import fedbasin.partition as _partition
import fedbasin.sim as _sim
from fedbasin.experiment.assemble import build as build
from fedbasin.experiment.comparison import compare as compare
from fedbasin.experiment.config import ConfigError as ConfigError
from fedbasin.experiment.config import DataConfig as DataConfig
from fedbasin.experiment.config import Experiment as Experiment
from fedbasin.experiment.config import LocalConfig as LocalConfig
from fedbasin.experiment.config import PartitionConfig as PartitionConfig
from fedbasin.experiment.config import SimConfig as SimConfig
from fedbasin.experiment.config import SnapshotConfig as SnapshotConfig
from fedbasin.experiment.config import TableConfig as TableConfig
from fedbasin.experiment.config import from_mapping as from_mapping
from fedbasin.experiment.runs import resume as resume
from fedbasin.experiment.runs import run as run

CATALOGUED = (_local, _methods, _models, _partition, _sim)  # importing these fills the catalogue

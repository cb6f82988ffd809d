"""fedbasin: train one model from many clients whose data differ, and see which merge is best.

import fedbasin as fb
data = fb.data.from_table("patients.csv", target="died", client="hospital")
result = fb.compare(data, ["fedavg", fb.ima(fb.scaffold(), window=5)], task="binary", rounds=50)

Every entry of the catalogue is a name here: ``fb.scaffold(server_lr=0.5)`` is what the expression
"scaffold(server_lr=0.5)" says.
"""

from importlib import import_module
from typing import Any

# Torch takes seconds to import, so names are fetched when they are first used.
_HOMES = {
    "Comparison": "api",
    "DataConfig": "experiment",
    "Experiment": "experiment",
    "LocalConfig": "experiment",
    "PartitionConfig": "experiment",
    "RunResult": "api",
    "SimConfig": "experiment",
    "Sink": "core.sink",
    "SnapshotConfig": "experiment",
    "TableConfig": "experiment",
    "Tuned": "api",
    "build": "experiment",
    "compare": "api",
    "entry": "core.catalogue",
    "export": "api",
    "parse": "core.expressions",
    "predict": "api",
    "resume": "api",
    "run": "api",
    "text": "core.expressions",
    "tune": "api",
}
_ROOMS = ("data", "testing")  # modules that users reach as attributes
# The catalogue. `__init__.pyi` tells type checkers what each name is.
_ENTRIES = (
    "accuracy",
    "accuracy_per_class",
    "adabest",
    "adam",
    "adamw",
    "alexnet",
    "asam",
    "at_most",
    "auroc",
    "average_precision",
    "balanced_accuracy",
    "balanced_rows",
    "balanced_softmax",
    "balancefl",
    "bernoulli",
    "binary",
    "brier",
    "by_group",
    "c_index",
    "categorical_dirichlet",
    "cifar_cnn",
    "class_balanced",
    "class_dirichlet",
    "classification",
    "client_dirichlet",
    "constant",
    "cosine",
    "count",
    "creff",
    "custom",
    "cyclic",
    "densenet121",
    "digit_cnn",
    "dirichlet",
    "domain_skew",
    "ece",
    "emnist_cnn",
    "epoch_decay",
    "epochs",
    "exponential",
    "fedacg",
    "fedadagrad",
    "fedadam",
    "fedasam",
    "fedavg",
    "fedavgm",
    "fedbe",
    "fedcda",
    "fedcda_cnn",
    "fedcm",
    "feddf",
    "feddyn",
    "fedexp",
    "fedfa",
    "fedgen",
    "fedgma",
    "fedgrab",
    "fedlab_dirichlet",
    "fedlab_shards",
    "fedlaw",
    "fedlesam",
    "fedma",
    "fednova",
    "fedprox",
    "fedsam",
    "fedsmoo",
    "fedspeed",
    "fedwcm",
    "fedyogi",
    "fmnist_cnn",
    "focal",
    "fraction",
    "gamf",
    "given",
    "group_mean",
    "grouped_dirichlet",
    "hf",
    "hybrid_dirichlet",
    "iid",
    "ima",
    "kept_momentum",
    "ldawa",
    "lenet",
    "lesam",
    "logistic",
    "logit_adjusted",
    "lora",
    "loss",
    "macro_f1",
    "mae",
    "mime",
    "mimelite",
    "mlp",
    "mobilenetv2",
    "mofedsam",
    "multilabel",
    "natural",
    "only",
    "pachinko",
    "perplexity",
    "pfl_cnn",
    "prox",
    "quantiles",
    "quantity_skew",
    "r2",
    "regression",
    "reseeded",
    "resnet110",
    "resnet18",
    "resnet20",
    "resnet34",
    "resnet56",
    "resnet8",
    "rmse",
    "sam",
    "scaffold",
    "serverft",
    "sgd",
    "shakespeare_lstm",
    "shards",
    "simple_cnn",
    "size_dirichlet",
    "steps",
    "stepwise",
    "survival",
    "swa",
    "timm",
    "tokens",
    "vgg11",
    "warmup",
    "wima",
    "wrn56_4",
)
__all__ = sorted({*_HOMES, *_ROOMS, *_ENTRIES})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import_module("fedbasin.experiment")  # fills the catalogue
        return getattr(import_module(f"fedbasin.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return import_module(f"fedbasin.{name}")
    if name in _ENTRIES:
        import_module("fedbasin.experiment")  # fills the catalogue
        from fedbasin.core.catalogue import CATALOGUE
        from fedbasin.core.expressions import constructor

        return constructor(CATALOGUE[name])
    raise AttributeError(f"module 'fedbasin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

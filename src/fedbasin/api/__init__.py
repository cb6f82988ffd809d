"""The Python interface: run and compare on your own data, with results that display themselves."""

from fedbasin.api.calls import compare as compare
from fedbasin.api.calls import resume as resume
from fedbasin.api.calls import run as run
from fedbasin.api.export import export as export
from fedbasin.api.network import predict as predict
from fedbasin.api.results import Comparison as Comparison
from fedbasin.api.results import RunResult as RunResult
from fedbasin.api.tuned import Tuned as Tuned
from fedbasin.api.tuned import tune as tune

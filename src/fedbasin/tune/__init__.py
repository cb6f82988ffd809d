"""Tuned comparisons: every method gets the same budget, and no test row chooses a setting."""

from fedbasin.tune.arguments import TuneError as TuneError
from fedbasin.tune.arguments import read_over as read_over
from fedbasin.tune.arguments import space_of as space_of
from fedbasin.tune.request import Request as Request
from fedbasin.tune.search import Outcome as Outcome
from fedbasin.tune.search import Trial as Trial
from fedbasin.tune.search import tune as tune

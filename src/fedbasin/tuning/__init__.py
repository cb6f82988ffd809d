"""Tuned comparisons: every method gets the same budget, and no test row chooses a setting."""

from fedbasin.tuning.arguments import TuneError as TuneError
from fedbasin.tuning.arguments import read_over as read_over
from fedbasin.tuning.arguments import space_of as space_of
from fedbasin.tuning.request import Request as Request
from fedbasin.tuning.search import Outcome as Outcome
from fedbasin.tuning.search import Trial as Trial
from fedbasin.tuning.search import tune as tune

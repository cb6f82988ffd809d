"""Room 6: the round loop and the executors that train a cohort."""

from fedbasin.sim.loop import LoopExecutor as LoopExecutor
from fedbasin.sim.population import Population as Population
from fedbasin.sim.rounds import Diverged as Diverged
from fedbasin.sim.rounds import Federation as Federation
from fedbasin.sim.runner import Interrupted as Interrupted
from fedbasin.sim.runner import Run as Run
from fedbasin.sim.runner import drive as drive

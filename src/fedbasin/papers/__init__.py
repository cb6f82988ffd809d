"""The papers' tables: what was published, the runs that repeat it, and ours beside theirs."""

from fedbasin.papers.beside import Compared as Compared
from fedbasin.papers.beside import compare as compare
from fedbasin.papers.beside import lines_of as lines_of
from fedbasin.papers.grid import CellRun as CellRun
from fedbasin.papers.grid import cell_runs_of as cell_runs_of
from fedbasin.papers.grid import reason as reason
from fedbasin.papers.results import Result as Result
from fedbasin.papers.tables import PaperError as PaperError
from fedbasin.papers.tables import Table as Table
from fedbasin.papers.tables import load_paper as load_paper
from fedbasin.papers.tables import load_table as load_table
from fedbasin.papers.tables import table_names as table_names

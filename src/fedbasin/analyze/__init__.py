"""Room 7: what vectors and cohort matrices say about why averaging works."""

from fedbasin.analyze import show_cohort as _cohort
from fedbasin.analyze import show_geometry as _geometry
from fedbasin.analyze import show_model as _model
from fedbasin.analyze import show_server as _server
from fedbasin.analyze.subject import CATALOGUE as CATALOGUE
from fedbasin.analyze.subject import AnalysisError as AnalysisError
from fedbasin.analyze.subject import Data as Data
from fedbasin.analyze.subject import Options as Options
from fedbasin.analyze.subject import Subject as Subject
from fedbasin.analyze.subject import find as find

ENTERED = (_cohort, _geometry, _model, _server)  # importing these fills the catalogue

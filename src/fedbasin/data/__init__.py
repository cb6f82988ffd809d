"""Room 1: raw data to arrays in memory, and the train / proxy / test split, made once.

`fedbasin.data.transform` (normalisation and augmentation on the device) is imported from its own
module, so that listing data does not wait for torch.
"""

from fedbasin.data.catalogue import Fetched as Fetched
from fedbasin.data.catalogue import Listing as Listing
from fedbasin.data.catalogue import available as available
from fedbasin.data.catalogue import describe as describe
from fedbasin.data.catalogue import fetch as fetch
from fedbasin.data.catalogue import load as load
from fedbasin.data.dataset import DataError as DataError
from fedbasin.data.dataset import Dataset as Dataset
from fedbasin.data.dataset import Rows as Rows
from fedbasin.data.dataset import Splits as Splits
from fedbasin.data.encoding import Encoding as Encoding
from fedbasin.data.own_arrays import from_arrays as from_arrays
from fedbasin.data.own_arrays import from_torch as from_torch
from fedbasin.data.own_table import from_clients as from_clients
from fedbasin.data.own_table import from_table as from_table
from fedbasin.data.split import split as split

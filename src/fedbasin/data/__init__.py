"""Room 1: raw data to arrays in memory, and the train / proxy / test split, made once.

`fedbasin.data.transform` (normalisation and augmentation on the device) is imported from its own
module, so that listing data does not wait for torch. What makes datasets of a user's own data is
fetched when it is first used, because pyarrow takes time to import too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from fedbasin.data.split import split as split

if TYPE_CHECKING:
    from fedbasin.data.encoding import Encoding as Encoding
    from fedbasin.data.own_arrays import from_arrays as from_arrays
    from fedbasin.data.own_arrays import from_torch as from_torch
    from fedbasin.data.own_folder import from_folder as from_folder
    from fedbasin.data.own_huggingface import from_huggingface as from_huggingface
    from fedbasin.data.own_table import from_clients as from_clients
    from fedbasin.data.own_table import from_table as from_table
    from fedbasin.data.own_texts import HashedWords as HashedWords
    from fedbasin.data.own_texts import from_texts as from_texts

_HOMES = {
    "Encoding": "encoding",
    "HashedWords": "own_texts",
    "from_arrays": "own_arrays",
    "from_clients": "own_table",
    "from_folder": "own_folder",
    "from_huggingface": "own_huggingface",
    "from_table": "own_table",
    "from_texts": "own_texts",
    "from_torch": "own_arrays",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedbasin.data' has no attribute {name!r}")
    return getattr(import_module(f"fedbasin.data.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

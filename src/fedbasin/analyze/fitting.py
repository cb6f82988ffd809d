r"""How soon a fit settles: Li et al. (FedLAW), Figure 14.

    left(e) = |v_e - v_E|_1 / |v_0 - v_E|_1

for numbers v_e after epoch e of E: 1 at the start, 0 at the end. A fit that passes its end and
comes back is above 0 while it does so.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SETTLED = 0.05


def way_left(path: Tensor) -> Tensor:
    """Return the share of the way that is left, [E + 1]; NaN where a path [E + 1, k] ends at its
    start."""
    far = (path - path[-1]).abs().sum(1)
    return far / far[0] if float(far[0]) > 0 else torch.full_like(far, torch.nan)


def settled(left: Tensor) -> int | None:
    """Return the first epoch from which at most 5 % of the way is left; None where none was."""
    if bool(left.isnan().any()):
        return None
    beyond = (left > _SETTLED).nonzero()
    return int(beyond[-1]) + 1 if len(beyond) else 0

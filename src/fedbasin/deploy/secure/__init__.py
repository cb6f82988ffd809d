"""Secure aggregation: the server learns the sum over a cohort, and no client's update.

SecAgg+ (Bell et al. 2020, https://eprint.iacr.org/2020/704) for the methods that use only the mean
of the replies. `docs/secure_aggregation.md` has the protocol step by step.
"""

from fedbasin.deploy.secure.settings import Secure

__all__ = ["Secure"]

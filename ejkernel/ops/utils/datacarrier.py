"""``FwdParams`` and ``BwdParams`` under their documented path; they are defined in ``ejkernel.contracts.params``."""

from ejkernel.contracts.params import BwdParams, FwdParams

__all__ = ["BwdParams", "FwdParams"]

"""Heavy modules that are imported at their first use.

torch costs seconds to import. Configuration, planning and the command line need the names, options and METHOD versions
of checkpointers and workloads, but no torch; so modules on those paths write::

    if TYPE_CHECKING:
        import torch
    else:
        torch = lazy_module("torch")
"""

from __future__ import annotations

import importlib
import types
from typing import Any

__all__ = ["lazy_module"]


class _LazyModule(types.ModuleType):
    def __getattr__(self, attribute: str) -> Any:
        # Kept, since this runs for every `torch.something` of a save; the attribute is not, so that tests may patch it.
        real = self.__dict__.get("_real")
        if real is None:
            real = self.__dict__["_real"] = importlib.import_module(self.__name__)
        return getattr(real, attribute)


def lazy_module(name: str) -> types.ModuleType:
    """Return a stand-in that imports module `name` when an attribute of it is first asked for."""
    return _LazyModule(name)

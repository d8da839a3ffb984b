"""Heavy modules, and names that a package offers, that are imported at their first use.

torch costs seconds to import. Configuration, planning and the command line need the names, options and METHOD versions
of checkpointers and workloads, but no torch; so modules on those paths write ``from lastgood._lazy import torch``. A
package that offers names of modules which need torch keeps a table of them for `lazy_names`, and a stub
(``__init__.pyi``) for type checkers.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

__all__ = ["dist", "lazy_names", "torch"]


class _LazyModule(types.ModuleType):
    """A stand-in that imports the module of its name when an attribute of it is first asked for."""

    def __getattr__(self, attribute: str) -> Any:
        # Kept, since this runs for every `torch.something` of a save; the attribute is not, so that tests may patch it.
        real = self.__dict__.get("_real")
        if real is None:
            real = self.__dict__["_real"] = importlib.import_module(self.__name__)
        return getattr(real, attribute)


if TYPE_CHECKING:
    import torch as torch
    from torch import distributed as dist
else:
    torch = _LazyModule("torch")
    dist = _LazyModule("torch.distributed")


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that offers names of other modules; `homes` has each name's module.

    A name whose home is the package itself is a module in it.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return find

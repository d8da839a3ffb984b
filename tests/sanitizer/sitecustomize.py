"""Takes lastgood._native from where $LASTGOOD_SANITIZED says, in this process and all that it starts (sanitize.sh)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Sanitized:
    """Comes before what an editable installation puts first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "lastgood._native":
            return None
        return importlib.util.spec_from_file_location(name, os.environ["LASTGOOD_SANITIZED"])


if "LASTGOOD_SANITIZED" in os.environ:
    sys.meta_path.insert(0, _Sanitized())  # type: ignore[arg-type]

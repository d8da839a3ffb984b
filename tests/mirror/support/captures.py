"""Real captures with their truth, which are not part of the project: found beside it, or in LASTGOOD_CAPTURES."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def captures(name: str) -> Path:
    """The folder of a set of captures; the test is skipped where there is none."""
    places = [Path(os.environ["LASTGOOD_CAPTURES"])] if "LASTGOOD_CAPTURES" in os.environ else []
    places += [folder / "shared" / "data" for folder in ROOT.parents]
    for place in places:
        if (place / name).is_dir():
            return place / name
    pytest.skip(f"the captures {name} are not here (LASTGOOD_CAPTURES names their folder)")

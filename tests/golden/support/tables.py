"""CSV files from kept records, and values of kept configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.golden.support.adapters import command, configure

DATA = Path(__file__).resolve().parents[1] / "data"
RECORDS = DATA / "records"
CONFIG_FILES = tuple(sorted(path.stem for path in (DATA / "configs").glob("*.yaml")))
PANELS = [
    ("fig8", "transformer_xl"),
    ("fig9", "transformer_xl"),
    ("fig11", "blob"),
    ("fig12", "transformer_xl"),
    ("checkmate", "opt"),
    ("checkmate", "optimizer"),
]


def records_of(figure: str, panel: str) -> list[Path]:
    """The records that the panel is made of; data/records/PANEL.txt would be a second truth, so they lie by folder."""
    results = RECORDS / f"{figure}_{panel}"
    return sorted(path for path in results.rglob("r*.json"))


def collected(figure: str, panel: str, folder: Path) -> dict[str, bytes]:
    """Name to bytes of the two CSV files that `lastgood collect` makes in `folder`."""
    names = (f"{figure}_{panel}_kept.csv", f"{figure}_{panel}_kept_wide.csv")
    paths = [folder / name for name in names]
    command(
        *("collect", figure, panel, *map(str, records_of(figure, panel))),
        *("--ceilings", str(RECORDS / "ceilings.json"), "--out-tidy", str(paths[0]), "--out-wide", str(paths[1])),
    )
    return {path.name: path.read_bytes() for path in paths}


def config_values(name: str) -> Any:
    """Every value of a kept configuration, as JSON."""
    return configure(DATA / "configs" / f"{name}.yaml", ["machine=testbox"]).model_dump(mode="json")

"""The systems that papers' figures and numbers are about: data of those papers. Nothing else asks for one by name."""

from __future__ import annotations

from typing import Final

__all__ = ["CHECKMATE", "FLOWCHECK", "PCCHECK", "PCCHECK_EARLIER"]

PCCHECK: Final = "pccheck"
"""The system whose options figures 12 to 14 of PCcheck's paper vary, and that its numbers compare others with."""

PCCHECK_EARLIER: Final = ("checkfreq", "gpm", "gemini")
"""The systems that PCcheck's paper calls earlier."""

CHECKMATE: Final = "checkmate"
"""The system that Checkmate's figure compares others with."""

FLOWCHECK: Final = "flowcheck"
"""The system whose figure is about mirrored packets."""

"""Parts of a state that compare a checkpoint with themselves before anything is loaded."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["Checked", "loads_last"]


class Checked:
    """A part with state_dict and load_state_dict that says beforehand whether it can take what was saved."""

    saved_keys: ClassVar[tuple[str, ...]]
    """What its state_dict always holds; without them it was another part's."""
    loads_last: ClassVar[bool] = False
    """Whether all other parts are loaded first."""

    def check_saved(self, saved: Any, path: str) -> None:
        """Raise MismatchError or DataError, naming `path`, if `saved` cannot be loaded. Changes nothing.

        Tensors in `saved` have their dtype and shape, and no content yet.
        """


def loads_last(part: Any) -> bool:
    """Whether a part is to be loaded after all others."""
    return isinstance(part, Checked) and part.loads_last

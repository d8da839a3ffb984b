"""A number of each step of a training, exactly: kept once if it never changes, else as a table."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

__all__ = ["MAX_STEPS", "Column", "StrictModel"]

MAX_STEPS: Final = 1 << 21
_ITEM: Final = 8


class StrictModel(BaseModel):
    """Refuses unknown keys and wrong types; never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Column(StrictModel):
    """Values by step, from step 0 on: `<f8` or `<i8` numbers in base64; one number stands for all steps."""

    dtype: Literal["float", "int"]
    base64: Annotated[str, Field(max_length=4 * (_ITEM * MAX_STEPS + 2) // 3 + 4)]

    @classmethod
    def of(cls, values: Sequence[float] | Sequence[int]) -> Column:
        """All values, of one type. A column that never changes is kept as one number."""
        whole = all(type(value) is int for value in values)
        array = np.asarray(values, np.int64 if whole else np.float64)
        bits = array.view(np.int64)
        if (bits == bits[0]).all():
            array = array[:1]
        text = base64.b64encode(array.astype("<i8" if whole else "<f8").tobytes()).decode()
        return cls(dtype="int" if whole else "float", base64=text)

    @cached_property
    def _values(self) -> np.ndarray[tuple[int], np.dtype[np.float64 | np.int64]]:
        data = base64.b64decode(self.base64, validate=True)
        if not data or len(data) % _ITEM:
            raise ValueError(f"a column of {len(data)} bytes")
        return np.frombuffer(data, "<i8" if self.dtype == "int" else "<f8")

    @property
    def steps(self) -> int | None:
        """How many steps it tells; None: it is the same for all."""
        return None if len(self._values) == 1 else len(self._values)

    def at(self, step: int) -> float | int:
        """The value of a step. Raises IndexError after the last one."""
        values = self._values
        found = values[0] if len(values) == 1 else values[step]
        return int(found) if self.dtype == "int" else float(found)

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            values = self._values
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"a column that is no base64 of numbers: {error}") from error
        if not np.isfinite(values).all():
            raise ValueError("a column with values that are not finite")
        return self

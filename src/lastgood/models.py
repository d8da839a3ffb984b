"""The base of models that are read from outside, or kept: unknown keys are refused, and values never change."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

__all__ = ["FrozenModel", "HashedOptions"]


class FrozenModel(BaseModel):
    """A pydantic model that refuses unknown keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HashedOptions(FrozenModel):
    """Options by whose hash records of runs are named."""

    later_options: ClassVar[tuple[str, ...]] = ()
    """Names of those that came later: as long as such an option has its default, older records keep their names."""

    @model_serializer(mode="wrap")
    def _without_what_came_later(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        absent = [name for name in self.later_options if dumped.get(name) == fields[name].default]
        return {name: value for name, value in dumped.items() if name not in absent}

"""The loader of a training, counted: before `attach`, where a framework makes it first, or by `attach` itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lastgood.checkpointers.attach.last_step import EndsAtStep
from lastgood.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from lastgood.checkpointers.attach.attachment import Attachment
    from lastgood.checkpointers.attach.data_cursor import CountedLoader

__all__ = ["Counts"]


class Counts(EndsAtStep):
    """What a checkpointer has for the data of the training that it is attached to."""

    _attachment: Attachment | None
    _counted: CountedLoader | None = None

    @property
    def in_use(self) -> bool:
        """Whether a training is attached."""
        return self._attachment is not None

    def count(self, loader: Iterable[Any]) -> CountedLoader:
        """Count a loader's batches from now on; `attach` then takes it as its data. Iterate over what is returned.

        For frameworks, which make the loader before there is an optimizer to attach. What else is asked of it, the
        loader answers. Raises DataError for an iterator, and for a loader that is in the middle of its batches.
        """
        from lastgood.checkpointers.attach.data_cursor import CountedLoader

        if self._attachment is not None:
            raise CheckpointError(
                f"{self.name}: count() comes before attach(); the loader of an attached training is `data`"
            )
        beneath = getattr(loader, "base_dataloader", loader)
        if getattr(beneath, "_iterator", None) is not None:
            raise DataError(
                f"{self.name}: count() of a {type(loader).__name__} that was begun already: its workers are ahead by "
                "batches that nobody has counted; count it before its first loop"
            )
        self._counted = loader if isinstance(loader, CountedLoader) else CountedLoader(loader)
        return self._counted

    def _data_of(self, given: Iterable[Any] | None) -> Iterable[Any] | None:
        """What `attach` is to count: what it was given, or what was counted before. Raises ConfigError for both."""
        counted = self._counted
        if counted is None:
            return given
        if given is not None and given is not counted and given is not counted.loader:
            raise ConfigError(
                f"{self.name}: attach(data=...) was given another loader than count(); one training has one place in "
                "its data, so leave one of them out"
            )
        counted.check_unused(self.name)
        return counted

    @property
    def data(self) -> CountedLoader:
        """The attached loader, counting; iterate over this one."""
        data = self._attached().data
        if data is None:
            raise CheckpointError(
                f"{self.name}: attach() was given no data; pass the loader, as attach(..., data=loader)"
            )
        return data

    def _attached(self) -> Attachment:
        if self._attachment is None:
            raise CheckpointError(f"{self.name}: attach(...) must be called first, as attach(model=model)")
        return self._attachment

"""What stands for a bucket of torch's DDP."""

from __future__ import annotations

import torch


class Bucket:
    """As DDP gives one to its hook: parameters one after another in a buffer."""

    def __init__(self, index: int, parameters: list[torch.nn.Parameter], *, last: bool) -> None:
        self._index, self._parameters, self._last = index, parameters, last
        self._buffer = torch.ones(sum(one.numel() for one in parameters))
        sizes = [one.numel() for one in parameters]
        views = self._buffer.split(sizes)
        self._gradients = [view.view_as(one) for view, one in zip(views, parameters, strict=True)]

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._last

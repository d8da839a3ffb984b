"""Switch mode's communication hook for DistributedDataParallel: Lastgood's own ring carries the gradients.

``model.register_comm_hook(RingReducer(comm, layout, parameters), ring_all_reduce)``

What a switch between the ranks copies to the shadows are the ring's own final sends: the trainers send nothing twice.
"""

# DDP compares the hook's annotations with torch's classes, so they may not be text: no `annotations` from __future__.
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from lastgood import _native
from lastgood.errors import ConfigError
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.wire.records import ITEM_BYTES, DType
from lastgood.wire.ring_comm import Divide, Place, RingComm

__all__ = ["RingReducer", "ring_all_reduce"]


class RingReducer:
    """Averages DDP's buckets by a ring, in the background while the backward pass goes on, in the order of the calls.

    Each backward pass that reduces is an iteration, counted from `first_iteration`; it ends with an END record after
    its last bucket. CPU tensors only.
    """

    def __init__(
        self,
        comm: RingComm,
        layout: GradientLayout,
        parameters: Sequence[torch.Tensor],
        *,
        divide: Divide = Divide.BEFORE,
        first_iteration: int = 1,
    ) -> None:
        """`parameters` are the layout's, in its order. Raises ConfigError if they are not those that it declares."""
        if len(parameters) != len(layout.parameters):
            raise ConfigError(f"the layout declares {len(layout.parameters)} parameters, {len(parameters)} are given")
        self._comm, self._layout, self._divide = comm, layout, divide
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._parameters = tuple(parameters)  # so that no id passes to another object
        self._plans: dict[tuple[int, ...], _native.RingPlan] = {}
        self.iteration = first_iteration - 1
        """Of the backward pass that reduced last, or reduces now."""
        self._worker = ThreadPoolExecutor(1, "ring-reduce")
        self._failure: Exception | None = None

    def reduce(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch has it where it has distributed
        iteration: int | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to average a bucket. The future holds its buffer, or the error that ended the ring permanently.

        A caller that numbers iterations itself gives this one's, the same on all ranks. Raises the first error of the
        ring once it has ended, and ConfigError for a bucket that the ring cannot reduce, or of undeclared parameters.
        """
        if self._failure is not None:
            raise self._failure
        if iteration is not None:
            self.iteration = iteration
        elif bucket.index() == 0:
            self.iteration += 1
        plan, number, last = self._plan_of(bucket), self.iteration, bucket.is_last()
        buffer: torch.Tensor = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                self._comm.all_reduce(plan, buffer.data_ptr(), number)
                if last:
                    self._comm.end(number)
            except Exception as error:  # whatever it is: DDP waits for the future without a limit
                self._fail(error)
                future.set_exception(error)  # type: ignore[arg-type]  # torch's own types say tensor
            else:
                future.set_result(buffer)

        self._worker.submit(run)
        return future

    def reduce_zeros(self, iteration: int) -> None:
        """Let an iteration go round in which nothing was reduced: zeros for all of the layout, in the background.

        All ranks must call it in the same order among their buckets. An error is raised by the next `reduce`.
        """
        self.iteration = iteration

        def run() -> None:
            try:
                for number, bucket in enumerate(self._layout.buckets):
                    zeros = torch.zeros(bucket.nbytes, dtype=torch.uint8, device="cpu")
                    plan = self._comm.plan(
                        bucket.nbytes // ITEM_BYTES[bucket.dtype],
                        bucket.dtype,
                        [Place(0, bucket.nbytes, number, 0)],
                    )
                    self._comm.all_reduce(plan, zeros.data_ptr(), iteration)
                self._comm.end(iteration)
            except Exception as error:  # nobody looks at what this call comes to
                self._fail(error)

        self._worker.submit(run)

    def _fail(self, error: Exception) -> None:
        """End the ring for all ranks. What fails after the first error only says that the ring was closed."""
        self._failure = self._failure or error
        self._comm.close()

    def close(self) -> None:
        """End the ring and the thread; what is in progress fails."""
        self._comm.close()
        self._worker.shutdown()

    def _plan_of(self, bucket: dist.GradBucket) -> _native.RingPlan:  # type: ignore[name-defined]
        """DDP rebuilds its buckets after the first pass, and may do so later."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(parameters, bucket.gradients(), bucket.buffer())
        return plan

    def _make_plan(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> _native.RingPlan:
        name = str(buffer.dtype).removeprefix("torch.")
        if buffer.device.type != "cpu" or name not in DType.__members__:
            raise ConfigError(
                f"the ring reduces {', '.join(DType.__members__)} on the CPU, and DDP gives it {name} on "
                f"{buffer.device}; use another mode than the switch's"
            )
        dtype = DType[name]
        places = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            index = self._index_of.get(id(parameter))
            if index is None:
                continue  # no optimizer updates it, so no shadow wants it
            declared = self._layout.parameters[index]
            nbytes = gradient.numel() * ITEM_BYTES[dtype]
            if declared.nbytes != nbytes or declared.dtype is not dtype:
                raise ConfigError(
                    f"{declared.name} is declared with {declared.nbytes} bytes of {declared.dtype.name}, and DDP "
                    f"reduces {nbytes} bytes of {name}"
                )
            if not nbytes:
                continue  # it lies nowhere: its address is 0
            start = gradient.data_ptr() - buffer.data_ptr()
            places.append(Place(start, nbytes, declared.bucket, declared.offset))
        return self._comm.plan(buffer.numel(), dtype, places, self._divide)


def ring_all_reduce(
    reducer: RingReducer,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all ranks by the ring, as DDP's own hooks are called."""
    return reducer.reduce(bucket).then(result_of)


def result_of(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    """For `then`: the future that follows fails as this one has. DDP would take an exception in it for a tensor."""
    return done.value()

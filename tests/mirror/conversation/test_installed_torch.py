"""The sequence of collectives against the installed torch: DDP runs on a process group that only writes down."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastgood.mirror.conversation.expected import CollectiveSequence
from lastgood.mirror.job.describe import ddp_settings, describe
from lastgood.mirror.job.factory import Training

RANKS = 2


def done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class Written(dist.ProcessGroup):
    """Rank 0 of two, the other of which has the same; nothing is sent."""

    def __init__(self) -> None:
        super().__init__(0, RANKS)
        self.seen: list[tuple[str, int, str]] = []
        self.contents: list[bytes] = []

    def _note(self, op: str, tensor: torch.Tensor, times: int = 1) -> None:
        self.seen.append((op, tensor.nbytes * times, str(tensor.dtype).removeprefix("torch.")))
        self.contents.append(bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        self._note("allreduce", tensors[0])
        return done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        self._note("broadcast", tensors[0])
        return done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        self._note("allgather", inputs[0], RANKS)
        for one in outputs[0]:
            one.copy_(inputs[0])
        return done(outputs)

    def barrier(self, options: Any = None) -> Any:
        return done(None)

    def getBackendName(self) -> str:  # noqa: N802
        return "written"


@pytest.fixture
def group() -> Iterator[Written]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield Written()
    finally:
        dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.seldom = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        x = self.norm(self.image(x)).mean((2, 3))
        x = self.seldom(x) if seldom else x
        found: torch.Tensor = self.last(x)
        return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small caps": {"bucket_cap_mb": 0.0001},
    "cap list": {"bucket_cap_mb_list": [0.0001, 0.0004]},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.0001},
    "static": {"static_graph": True},
    "no forward buffers": {"forward_sync_buffers": False},
    "no buffers": {"broadcast_buffers": False},
    "views": {"gradient_as_bucket_view": True},
    "fp16": {"hook": "fp16"},
    "bf16": {"hook": "bf16"},
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ddp_sends_what_is_expected(group: Written, case: str, accumulate: int) -> None:
    if case == "static" and accumulate > 1:
        pytest.skip("DDP itself refuses no_sync before the first reduction of a static graph")
    if unknown := [
        key for key in CASES[case] if key not in {"hook", *inspect.signature(DistributedDataParallel).parameters}
    ]:
        pytest.skip(f"this torch's DDP has no {unknown[0]}")
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    job = describe(Training(model, optimizer, ddp=CASES[case]), ranks=RANKS)
    assert job.ddp == ddp_settings(CASES[case])
    arguments = {key: value for key, value in CASES[case].items() if key != "hook"}
    ddp = DistributedDataParallel(model, process_group=group, **arguments)
    if "hook" in CASES[case]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        chosen = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        ddp.register_comm_hook(group, chosen[CASES[case]["hook"]])
    for step in range(5):
        optimizer.zero_grad()
        for number in range(accumulate):
            x = torch.randn(2, 3, 5, 5)
            if number < accumulate - 1:
                with ddp.no_sync():
                    ddp(x, case != "unused" or step % 2 == 0).sum().backward()
            else:
                ddp(x, case != "unused" or step % 2 == 0).sum().backward()
        optimizer.step()

    sequence = CollectiveSequence(job)
    named = dict([*model.named_parameters(), *model.named_buffers()])
    for (op, nbytes, dtype), content in zip(group.seen, group.contents, strict=True):
        found = sequence.candidates()
        assert found, "all content was given"
        item = found[0]
        assert (op, dtype) == (item.op, item.dtype), (item, group.seen)
        if item.nbytes is not None:
            assert nbytes == item.nbytes, item
        sequence.accept(item)
        if item.kind == "bucket-order":
            assert sequence.bucket_order(content) is None
        elif item.kind == "bucket-sizes":
            assert sequence.bucket_sizes(content) is None
        elif item.tensors:
            assert nbytes == sum(named[name].nbytes for name in item.tensors)
    assert sequence.reduction == 5
    assert sequence.inside is None


def test_broadcasts_are_row_major_and_gradients_in_memory_order(group: Written) -> None:
    torch.manual_seed(1)
    model = Model()
    weight = model.image.weight.detach().clone(memory_format=torch.preserve_format)
    ddp = DistributedDataParallel(model, process_group=group, broadcast_buffers=False)
    nbytes = weight.nbytes
    (first,) = [at for at, one in enumerate(group.seen) if one[0] == "broadcast" and one[2] == "float32"]
    row_major = bytes(weight.contiguous().view(-1).view(torch.uint8).numpy())
    assert group.contents[first][:nbytes] == row_major
    assert not weight.is_contiguous()
    ddp(torch.randn(2, 3, 5, 5), True).sum().backward()
    gradient = model.image.weight.grad
    assert gradient is not None
    in_memory = bytes(gradient.permute(0, 2, 3, 1).contiguous().view(-1).view(torch.uint8).numpy())
    assert group.contents[-1][:nbytes] == in_memory

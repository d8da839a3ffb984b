"""A switch's copies on their way to one shadow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from lastgood import _native
from lastgood.errors import ConfigError
from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.protocol.messages import Hello
from lastgood.gradients.switch.faults import parse_faults
from lastgood.gradients.switch.forward import Copier, CopySettings
from lastgood.wire.records import FINAL, DType, Record, RecordKind, pack_header
from tests.gradients.support.receiving_shadow import ReceivingShadow
from tests.support.patience import wait_until
from tests.wire.support.ring_helpers import JOB, TOKEN, WAIT_S

COUNT = 5000
VALUES = np.arange(COUNT, dtype=np.float32)
LAYOUT = plan_layout([("p", (COUNT,), "float32")], {}, ranks=1, shadows=1)
NUMBER = int.from_bytes(bytes.fromhex(JOB)[:8], "little")


@pytest.fixture
def shadow() -> Iterator[ReceivingShadow]:
    one = ReceivingShadow(0, LAYOUT, TOKEN, JOB)
    one.refusing = True
    yield one
    one.close()


@pytest.fixture
def copier(shadow: ReceivingShadow) -> Iterator[Copier]:
    greeting = Hello(role="data", job=JOB, epoch=1, rank=0, layout=LAYOUT.digest)
    one = Copier(0, 1, shadow.address, greeting, CopySettings(TOKEN, timeout_s=WAIT_S))
    yield one
    one.finish(0.0)
    assert one.join(WAIT_S)


def offer(copier: Copier, iteration: int, pieces: int) -> None:
    """All values in so many records, and the end of the iteration."""
    at = 0
    for part in np.array_split(VALUES, pieces):
        payload = part.tobytes()
        checksum = _native.crc32c(payload)
        record = Record(
            RecordKind.GRADIENT, NUMBER, 1, 0, iteration, 0, DType.float32, at, len(payload), checksum, FINAL
        )
        copier.offer(record, pack_header(record) + payload)
        at += len(payload)
    end = Record(RecordKind.END, NUMBER, 1, 0, iteration)
    copier.offer(end, pack_header(end))


@pytest.mark.parametrize(
    ("iteration", "pieces"),
    [
        pytest.param(1, COUNT, id="more pieces of memory than the kernel takes at once"),
        pytest.param(0, 3, id="a ring that counts from 0"),
    ],
)
def test_what_waited_for_a_shadow_arrives(shadow: ReceivingShadow, copier: Copier, iteration: int, pieces: int) -> None:
    offer(copier, iteration, pieces)
    shadow.refusing = False
    assert shadow.wait(iteration), copier.counters()
    assert shadow.bytes_of(0, iteration) == VALUES.tobytes()
    wait_until(
        lambda: copier.counters().get("sent_records") == pieces + 1,
        lambda: f"all records: {copier.counters()}",
        WAIT_S,
        every_s=0.02,
    )
    assert not copier.counters().get("lost_records")


@pytest.mark.parametrize("text", ["delay=1,delay_s=-1", "delay=1,delay_s=nan", "delay=1,delay_s=inf"])
def test_a_delay_that_nobody_can_sleep_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="delay_s"):
        parse_faults(text)

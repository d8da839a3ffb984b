"""What an S3 server of the suite's own has done so far, by its own counters and the kernel's. Needs no torch."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from lastgood.errors import LastgoodError
from lastgood.experiments.records.dcp import ServerWork
from lastgood.models import FrozenModel

__all__ = ["ServerWatch", "difference", "read_work"]

_PATIENCE_S: Final = 10.0
_MOST_BYTES: Final = 16 << 20
_REQUESTS: Final = re.compile(
    r'^SeaweedFS_s3_request_total\{bucket="[^"]*",code="(\d+)",type="(\w+)"\} (\S+)$', re.MULTILINE
)
_BYTES: Final = r"^SeaweedFS_s3_bucket_traffic_{}_bytes_total\{{[^}}]*\}} (\S+)$"


class ServerWatch(FrozenModel):
    """Where to look."""

    pid: int
    metrics_url: str
    folder: str
    """Of its data, on this machine."""


def read_work(watch: ServerWatch) -> ServerWork:
    """All since it was started. Raises LastgoodError if it does not say."""
    try:
        with urllib.request.urlopen(watch.metrics_url, timeout=_PATIENCE_S) as answer:
            text = answer.read(_MOST_BYTES).decode(errors="replace")
        fields = Path(f"/proc/{watch.pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, urllib.error.URLError) as error:
        raise LastgoodError(f"the S3 server of this run (process {watch.pid}) does not answer: {error}") from error
    requests: dict[str, int] = {}
    for code, operation, count in _REQUESTS.findall(text):
        name = f"{operation} {code}"
        requests[name] = requests.get(name, 0) + int(float(count))
    sent, received = (
        sum(int(float(count)) for count in re.findall(_BYTES.format(way), text, re.MULTILINE))
        for way in ("sent", "received")
    )
    # After the state: utime and stime are the 14th and 15th field of the line.
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ServerWork(cpu_s=cpu_s, requests=requests, received_bytes=received, sent_bytes=sent)


def difference(before: ServerWork, after: ServerWork) -> ServerWork:
    """What was done between two looks."""
    counts = {name: count - before.requests.get(name, 0) for name, count in after.requests.items()}
    return ServerWork(
        cpu_s=max(0.0, after.cpu_s - before.cpu_s),
        requests={name: count for name, count in sorted(counts.items()) if count > 0},
        received_bytes=max(0, after.received_bytes - before.received_bytes),
        sent_bytes=max(0, after.sent_bytes - before.sent_bytes),
    )

"""The logs of a run that failed: its scratch folder goes with the run, so they are kept in a folder beside its record.

``python -m lastgood.experiments.runs.logs FOLDER BYTES`` writes the logs below FOLDER to standard output, as JSON: so a
host with a disk of its own is asked for what its ranks have written.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import Base64Bytes, TypeAdapter, ValidationError

from lastgood.cluster.launch.job import LOG_THERE
from lastgood.cluster.ssh.remote import Completed, Remote
from lastgood.errors import HostError, LastgoodError, StorageError
from lastgood.files import open_log, open_regular
from lastgood.text import parse_json

__all__ = ["MAX_LOG_BYTES", "Logs", "fetch_logs", "keep_logs_of_failure", "logs_beside", "main", "read_logs"]

Logs = Mapping[str, bytes]
"""The end of each log, by its path below the run's folder."""

MAX_LOG_BYTES: Final = 1 << 20
"""Kept of each log, from its end."""
_MAX_BYTES: Final = 64 << 20
_MAX_ANSWER_BYTES: Final = 2 * _MAX_BYTES
"""Of all logs here, and as much again of those from other hosts."""
_MAX_LOGS: Final = 4096
_MAX_NAME: Final = 255
_FETCH_S: Final = 60.0
_NAME: Final = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*\.log")
_PACKED: Final = TypeAdapter(dict[str, Base64Bytes])


def logs_beside(record: Path) -> Path:
    """The folder for the logs of the run of `record`: ``r0.logs`` beside ``r0.json``."""
    return record.with_name(f"{record.stem}.logs")


@contextlib.contextmanager
def keep_logs_of_failure(
    folder: Path,
    kept: Path,
    report: Callable[[str], None],
    elsewhere: Callable[[], Mapping[str, Logs | HostError]] = dict,
) -> Iterator[None]:
    """If the block fails, copy the logs below `folder`, the run's own, to `kept`, and name that place in its error.

    What an attempt before has left there is removed first, so `kept` is not there after a run that came to its end. Of
    an error that is not Lastgood's (also Ctrl-C), `report` is told the place. `elsewhere` gets logs from hosts that do
    not share this disk. At most `MAX_LOG_BYTES` of each log are kept, and 128 MiB in all.
    """
    _clear(kept)
    try:
        yield
    except BaseException as error:
        names, lines = _keep(folder, kept, elsewhere)
        if isinstance(error, LastgoodError):
            error.args = ("\n".join([_at_home(str(error), folder, kept, names), *lines]),)
        else:
            for line in lines:
                report(line)
        raise


def read_logs(folder: Path, limit_bytes: int) -> dict[str, bytes]:
    """The ends of all logs below `folder`, equally long if they would be more than `limit_bytes` together."""
    below = (Path(top, name).relative_to(folder).as_posix() for top, _, files in os.walk(folder) for name in files)
    names = sorted(name for name in below if _is_name(name))[:_MAX_LOGS]
    share = min(MAX_LOG_BYTES, limit_bytes // max(1, len(names)))
    found = {}
    for name in names:
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            end = _end_of(folder / name, share)
            if end is not None:
                found[name] = end
    return found


def fetch_logs(remote: Remote, hosts: Sequence[str], folder: Path) -> dict[str, Logs | HostError]:
    """What hosts have below their own `folder`; for each its logs, or why they could not be had."""
    limit_bytes = _MAX_BYTES // max(1, len(hosts))
    command = [sys.executable, "-m", "lastgood.experiments.runs.logs", str(folder), str(limit_bytes)]
    most = limit_bytes * 4 // 3 + _MAX_LOGS * (_MAX_NAME + 16)
    answers = remote.run_everywhere(hosts, command, _FETCH_S, max_output_bytes=most)
    return {
        host: _unpack(host, answer) if isinstance(answer, Completed) else answer for host, answer in answers.items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the logs below a folder to standard output. Always 0: what cannot be read is left out."""
    folder, limit_bytes = sys.argv[1:] if arguments is None else arguments
    ends = read_logs(Path(folder), int(limit_bytes))
    sys.stdout.write(json.dumps({name: base64.b64encode(end).decode() for name, end in ends.items()}))
    return 0


def _is_name(name: str) -> bool:
    return len(name) <= _MAX_NAME and _NAME.fullmatch(name) is not None


def _end_of(path: Path, limit_bytes: int) -> bytes | None:
    """The last bytes of a regular file; None for anything else, which may have no end."""
    try:
        descriptor = open_regular(path)
    except StorageError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_size <= limit_bytes:
            return file.read(limit_bytes)
        note = f"[the end of a log of {found.st_size} bytes]\n".encode()[:limit_bytes]
        file.seek(found.st_size - limit_bytes + len(note))
        return note + file.read(limit_bytes - len(note))


def _unpack(host: str, answer: Completed) -> Logs | HostError:
    if answer.rc:
        said = answer.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return HostError(f"{host}: reading the logs there failed with status {answer.rc}: {''.join(said)[:200]}")
    try:
        packed = parse_json(answer.stdout, host, most_bytes=_MAX_ANSWER_BYTES, error=HostError)
        found = _PACKED.validate_python(packed)
    except (HostError, ValidationError):
        return HostError(f"{host}: something else than logs came from there; its login may write to standard output")
    return {name: end for name, end in found.items() if _is_name(name)}


def _keep(
    folder: Path, kept: Path, elsewhere: Callable[[], Mapping[str, Logs | HostError]]
) -> tuple[set[str], list[str]]:
    """Write all logs to `kept`. The names of those that are there then, and lines that tell of it."""
    logs = read_logs(folder, _MAX_BYTES)
    lines = []
    for answer in elsewhere().values():
        if isinstance(answer, HostError):
            lines.append(f"logs could not be fetched: {str(answer).splitlines()[0]}")
        else:
            logs = {**answer, **logs}
    written: set[str] = set()
    try:
        for name, end in logs.items():
            path = kept / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_log(path) as file:
                file.write(end)
            written.add(name)
    except (OSError, StorageError) as error:
        lines.append(f"logs could not be kept in {kept}: {getattr(error, 'strerror', None) or error}")
    if written:
        lines.insert(0, f"all logs of this attempt are kept until the next one: {kept}")
    return written, lines


def _at_home(text: str, folder: Path, kept: Path, names: set[str]) -> str:
    """An error's text with the places of logs as they are now."""

    def place(match: re.Match[str]) -> str:
        if match["log"] not in names:
            return match[0]
        return f"{'log: ' if match['there'] else ''}{kept / match['log']}"

    folders = "|".join(re.escape(str(one)) for one in (folder.absolute(), folder))
    return re.sub(rf"(?P<there>{LOG_THERE})?(?:{folders})/(?P<log>[\w./-]+\.log)\b", place, text)


def _clear(kept: Path) -> None:
    """Remove the logs of an attempt before, and nothing else."""
    for top, _, files in os.walk(kept, topdown=False):
        # What cannot be removed stays, as does a folder that holds more than logs.
        with contextlib.suppress(OSError):
            for name in files:
                if name.endswith(".log"):
                    Path(top, name).unlink()
            Path(top).rmdir()


if __name__ == "__main__":
    sys.exit(main())

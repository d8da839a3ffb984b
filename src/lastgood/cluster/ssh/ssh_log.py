"""What ssh says when it fails, and what to do about it."""

from __future__ import annotations

import os
import re
from typing import Final

from lastgood.errors import HostError

__all__ = ["SshLog", "last_words", "ssh_failure"]

_MAX_LOG_BYTES = 64 << 10

_FAILURES: Final = (
    (
        "Permission denied",
        "refuses this key",
        "copy it there with ssh-copy-id, or name its user and key in the ssh configuration",
    ),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "shows another host key than the one that is known",
        "if the host was installed again, remove the old key with ssh-keygen -R; if not, somebody is in between",
    ),
    (
        "Host key verification failed",
        "has a host key that is not known here",
        "connect once by hand and compare its fingerprint, or add it to known_hosts",
    ),
    (
        "Could not resolve hostname",
        "is a name that this machine does not know",
        "correct the hostfile, or add the name to the ssh configuration or to /etc/hosts",
    ),
    (
        "Connection refused",
        "is there, and no ssh server answers",
        "start one (Debian, Ubuntu: apt-get install openssh-server), or give its port in the ssh configuration",
    ),
    ("not responding", "stopped answering", "see whether the host and its network are up"),
    ("closed by remote host", "closed the connection", "see whether the host is going down, and its ssh server's log"),
    ("Connection reset", "reset the connection", "see whether the host went down, and its ssh server's log"),
    ("onfiguration option", "is not reached with this ssh configuration", "mend the configuration"),
)


class SshLog:
    """What ssh itself has to say, apart from the remote command's errors. In memory: a kill leaves no file."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("lastgood-ssh-log")

    def added_to(self, words: list[str]) -> list[str]:
        """The ssh command `words`, told to write its messages here."""
        # ssh closes all that it inherits, so it must open the file again, through this process.
        return [words[0], "-E", f"/proc/{os.getpid()}/fd/{self._descriptor}", *words[1:]]

    def text(self) -> str:
        """All that ssh said so far, up to 64 KiB."""
        return os.pread(self._descriptor, _MAX_LOG_BYTES, 0).decode(errors="replace").strip()

    def close(self) -> None:
        """Give the memory back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def ssh_failure(host: str, log: str, connect_timeout_s: int) -> HostError | None:
    """What ssh's own messages mean; None without messages (then 255 was the command's own exit code)."""
    if not log:
        return None
    for sign, what, to_do in _FAILURES:
        if sign in log:
            return HostError(f"{host}: {what}; {to_do}{last_words(log)}")
    if re.search(r"timed out|No route to host|unreachable", log):
        return HostError(
            f"{host}: does not answer within {connect_timeout_s} s; see whether it is up, and its "
            f"address and port right{last_words(log)}"
        )
    return HostError(f"{host}: the connection failed; see ssh's words{last_words(log)}")


def last_words(log: str) -> str:
    """The last line of ssh's messages, as the end of ours; empty if there is none."""
    lines = [line for line in log.splitlines() if line.strip()]
    return f" (ssh: {lines[-1].strip().removeprefix('ssh: ')[:200]})" if lines else ""

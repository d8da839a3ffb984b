"""Questions and answers, a line each, with a program on another host: for what one command and its output cannot do."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from lastgood.cluster.ssh.remote import Remote
from lastgood.cluster.ssh.ssh_log import SshLog, last_words, ssh_failure
from lastgood.errors import HostError
from lastgood.processes import wait_or_kill
from lastgood.text import parse_json

__all__ = ["Conversation"]

_MAX_LINE_BYTES = 256 << 10
_MAX_ERROR_BYTES = 64 << 10
_END_S = 3.0


class Conversation:
    """A remote program that answers each line of JSON on its standard input with one on its standard output.

    The program must end at the end of its input, and by itself after a while: a cut cable brings no end of input.
    One thread at a time may ask.
    """

    def __init__(self, remote: Remote, host: str, argv: Sequence[str]) -> None:
        self.host = host
        self._program = argv[0]
        self._connect_s = remote.options.connect_timeout_s
        self._log = SshLog()
        self._answer = bytearray()
        self._errors = bytearray()
        self._selector = selectors.DefaultSelector()
        try:
            self._process = subprocess.Popen(
                self._log.added_to(remote.command(host, argv)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
            )
        except BaseException:
            self._log.close()
            raise
        assert self._process.stdout is not None and self._process.stderr is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ, self._answer)
        self._selector.register(self._process.stderr, selectors.EVENT_READ, self._errors)

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a question and return the answer.

        Raises HostError if none comes in time, if the connection or the program fails, and if the program
        answers with its own ``{"error": ...}``.
        """
        assert self._process.stdin is not None
        text = json.dumps(question).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # reading tells why
            self._process.stdin.write(text)
        line = self._read_line(time.monotonic() + timeout_s, str(question.get("do")), timeout_s)
        try:
            answer = parse_json(line, self.host, most_bytes=_MAX_LINE_BYTES, error=HostError)
        except HostError:
            answer = None
        if not isinstance(answer, dict):
            raise HostError(f"{self.host}: not an answer: {bytes(line[:200])!r}; does its login shell print something?")
        if "error" in answer:
            raise HostError(f"{self.host}: {str(answer['error'])[:500]}")
        return answer

    def close(self) -> None:
        """End the program by the end of its input, after a few seconds by cutting the connection."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        wait_or_kill(self._process, _END_S, _END_S)
        self._selector.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._log.close()

    def _read_line(self, deadline: float, what: str, timeout_s: float) -> bytearray:
        while True:
            line, found, rest = self._answer.partition(b"\n")
            if found:
                self._answer[:] = rest
                return line
            left = deadline - time.monotonic()
            events = self._selector.select(left) if left > 0 else []
            if not events:
                words = last_words(self._log.text())
                raise HostError(
                    f"{self.host}: no answer to {what!r} within {timeout_s:g} s (host or network hang){words}"
                )
            for key, _ in events:
                part = os.read(key.fd, 1 << 16)
                key.data.extend(part)
                if not part:
                    self._selector.unregister(key.fileobj)
                    if key.data is self._answer:
                        raise self._ended()
                if len(self._answer) > _MAX_LINE_BYTES or len(self._errors) > _MAX_ERROR_BYTES:
                    raise HostError(f"{self.host}: it answers without end; does its login shell print something?")

    def _ended(self) -> HostError:
        """Why there are no more answers."""
        try:
            rc = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return HostError(f"{self.host}: ssh closed its output and did not end; try again")
        failure = ssh_failure(self.host, self._log.text(), self._connect_s) if rc == 255 else None
        if failure is not None:
            return failure
        if rc == 127:
            return HostError(f"{self.host}: there is no command {self._program!r} there; install it, or give its path")
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        with contextlib.suppress(OSError):
            self._errors.extend(os.read(self._process.stderr.fileno(), _MAX_ERROR_BYTES))
        lines = self._errors.decode(errors="replace").strip().splitlines()
        said = f": {lines[-1][:300]}" if lines else ""
        return HostError(f"{self.host}: {self._program} ended with exit code {rc} before it answered{said}")

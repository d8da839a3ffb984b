"""A telemetry that is told by a test what it hears, and keeps what it is told."""

from __future__ import annotations

from lastgood.sparse.control.controller import Setting


class Heard:
    def __init__(self, *settings):
        self.settings = list(settings)
        self.measured = []
        self.joined = None
        self.closed = False

    def join(self, join):
        self.joined = join

    def tell(self, measured):
        self.measured.append(measured)

    def heard(self):
        found, self.settings = self.settings, []
        return found

    def close(self):
        self.closed = True


def setting(number, samples, compression, from_iteration=0):
    return Setting(number=number, from_iteration=from_iteration, samples=tuple(samples), compression=compression)

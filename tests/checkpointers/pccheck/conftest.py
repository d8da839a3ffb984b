"""A real S3 server for the modules that need one."""

from __future__ import annotations

from tests.support.s3_server import proxy, server

__all__ = ["proxy", "server"]

"""A real S3 server for the modules that need one, and a prefix of its own for each test."""

from __future__ import annotations

from tests.support.s3_server import bucket, proxy, server, url

__all__ = ["bucket", "proxy", "server", "url"]

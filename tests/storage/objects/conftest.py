"""A real S3 server for the modules here, and a prefix of its own for each test."""

from __future__ import annotations

from tests.support.s3_server import bucket, faulty, proxy, server, url

__all__ = ["bucket", "faulty", "proxy", "server", "url"]

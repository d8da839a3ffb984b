from tests.support.s3_server import proxy, server, url

__all__ = ["proxy", "server", "url"]

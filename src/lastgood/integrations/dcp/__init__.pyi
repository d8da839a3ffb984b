from lastgood.integrations.dcp.reader import LastgoodReader as LastgoodReader
from lastgood.integrations.dcp.writer import LastgoodWriter as LastgoodWriter
from lastgood.storage.objects.s3 import Credentials as Credentials
from lastgood.storage.objects.s3 import S3Options as S3Options

__all__ = ["Credentials", "LastgoodReader", "LastgoodWriter", "S3Options"]

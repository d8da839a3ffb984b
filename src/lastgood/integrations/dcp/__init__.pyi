from lastgood.integrations.dcp.reader import LastgoodReader as LastgoodReader
from lastgood.integrations.dcp.writer import LastgoodWriter as LastgoodWriter

__all__ = ["LastgoodReader", "LastgoodWriter"]

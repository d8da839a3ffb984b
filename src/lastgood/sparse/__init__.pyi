from lastgood.sparse.correction import Correction as Correction
from lastgood.sparse.engine import Engine as Engine

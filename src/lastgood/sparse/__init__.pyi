from lastgood.sparse.engine import Engine as Engine

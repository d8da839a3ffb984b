import sys
from pathlib import Path

for folder in (Path(__file__).parent / "support", Path(__file__).parents[1] / "storage" / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

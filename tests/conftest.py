"""The tools are scripts, not a package: their folder goes onto the path, as when one of them is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

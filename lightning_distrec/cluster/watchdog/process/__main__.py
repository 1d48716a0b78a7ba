"""Run with `python -I -S <this folder> <settings as JSON>`: see monitor.py.

-I and -S leave out the user's paths and site-packages, so that the process starts fast. The files in this folder import
each other as the package `process`; imported as a part of lightning_distrec they would load torch.
"""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
importlib.import_module("process.monitor").main(sys.argv[1])

"""`python -m lightning_distrec` is the console script `lightning-distrec`."""

import sys

from lightning_distrec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

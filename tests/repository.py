"""Where the files of the repository lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

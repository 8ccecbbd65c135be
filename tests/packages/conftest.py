"""Packages as users install them: ``make test-packages``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

"""Paceline: distributed training of vision models with one command and one answer."""

from __future__ import annotations

__version__ = "0.1.0"

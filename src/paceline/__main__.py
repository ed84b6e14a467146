"""`python -m paceline` is the `paceline` command."""

from __future__ import annotations

from paceline.cli.main import leave

if __name__ == "__main__":
    leave()

"""`python -m paceline` is the `paceline` command."""

from __future__ import annotations

from paceline.cli.main import console_main

if __name__ == "__main__":
    console_main()

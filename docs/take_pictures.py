"""Takes the terminal pictures of the documentation: real commands in a real terminal, drawn by a real Chromium.

    python docs/take_pictures.py docs/images

Needs tmux and Chromium (make terminal-install browser-install). Takes minutes.
"""

from __future__ import annotations

import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from harness.browser import Browser  # noqa: E402
from harness.tmux import PROMPT, Terminal  # noqa: E402

COLUMNS = 128
# The name of a picture, and its commands. Only the last `shown` of them are in it.
PICTURES: dict[str, tuple[int, list[str]]] = {
    "trained-run": (1, ["paceline train shapes-cnn"]),
    "killed-run": (
        2,
        [
            "paceline train shapes-cnn --epochs 5 --output-dir runs/undisturbed",
            'paceline train shapes-cnn --epochs 5 --save-steps 50 --inject "kill rank=1 step=200" --output-dir runs/killed',
            "paceline compare runs/undisturbed runs/killed | tail -n 1",
        ],
    ),
}
_COLOURS = TerminalTheme(
    (32, 33, 36),
    (220, 223, 228),
    [(60, 62, 66), (224, 108, 117), (152, 195, 121), (229, 192, 123), (97, 175, 239), (198, 120, 221), (86, 182, 194)]
    + [(200, 204, 212)],
    [(130, 134, 140), (240, 128, 136), (170, 212, 140), (240, 205, 140), (120, 190, 250), (210, 140, 232)]
    + [(110, 200, 210), (235, 238, 242)],
)
_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #202124; color: #dcdfe4; display: inline-block; }}
pre {{ margin: 0; padding: 16px 20px; font: 15px/1.35 "DejaVu Sans Mono", monospace; }}
</style><pre>{lines}</pre>"""


def take(commands: list[str], shown: int) -> str:
    """Run the commands in one terminal. Returns the last ones with their output, with colour codes."""
    with tempfile.TemporaryDirectory(prefix="picture-") as folder:
        home = Path(folder)
        (home / "bin").mkdir()
        script = home / "bin" / "paceline"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
        script.chmod(0o755)
        terminal = Terminal(home, COLUMNS, 60, {"PS1": PROMPT})
        try:
            for command in commands:
                terminal.type(command)
                terminal.wait_for_prompt(600)
            lines = terminal.screen(colours=True).splitlines()
            first = [number for number, line in enumerate(lines) if PROMPT + commands[-shown][:40] in line][-1]
            return "\n".join(lines[first:])
        finally:
            terminal.close()


def draw(screen: str, path: Path, browser: Browser) -> None:
    console = Console(file=StringIO(), record=True, width=COLUMNS, color_system="truecolor", force_terminal=True)
    lines = screen.removesuffix(PROMPT.strip()).rstrip().replace(PROMPT, "$ ")
    console.print(Text.from_ansi(lines), soft_wrap=True)
    text = console.export_html(inline_styles=True, code_format="{code}", theme=_COLOURS)
    page_file = path.with_suffix(".html")
    page_file.write_text(_PAGE.format(lines=text), encoding="utf-8")
    page = browser.open_page(page_file, width=1280)
    size = page.evaluate("(b => [b.offsetWidth, b.offsetHeight])(document.body)")
    page.resize(*size)
    page.screenshot(path)
    page.close()
    page_file.unlink()


def main(folder: Path, names: list[str]) -> None:
    with Browser() as browser:
        for name in names or list(PICTURES):
            shown, commands = PICTURES[name]
            draw(take(commands, shown), folder / f"{name}.png", browser)
            print(folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

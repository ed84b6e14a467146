"""Takes the picture of the start page: real commands in a real terminal, drawn by a real Chromium.

    python docs/take_pictures.py docs/images/killed-run.png

Needs tmux and Chromium (make terminal-install browser-install), and a minute on two cores that nothing else uses.
"""

from __future__ import annotations

import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from harness.browser import Browser  # noqa: E402
from harness.tmux import PROMPT, Terminal  # noqa: E402

COLUMNS = 128
TRAIN = "paceline train shapes-cnn --epochs 5"
NOT_SHOWN = [f"{TRAIN} --output-dir runs/undisturbed"]
SHOWN = [
    f'{TRAIN} --save-steps 50 --inject "kill rank=1 step=200" --output-dir runs/killed',
    "paceline compare runs/undisturbed runs/killed | tail -n 1",
]
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: {background}; color: #dcdfe4; display: inline-block; }}
pre {{ margin: 0; padding: 16px 20px; font: 15px/1.35 "DejaVu Sans Mono", monospace; }}
</style><pre>{lines}</pre>"""


def record() -> str:
    """Run all commands in one terminal. Returns those that are shown with their output and colour codes."""
    with tempfile.TemporaryDirectory(prefix="picture-") as folder:
        home = Path(folder)
        (home / "bin").mkdir()
        script = home / "bin" / "paceline"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
        script.chmod(0o755)
        terminal = Terminal(home, COLUMNS, 60, {})
        try:
            for command in NOT_SHOWN + SHOWN:
                terminal.type(command)
                terminal.wait_for_prompt(600)
            lines = terminal.screen(colours=True).splitlines()
        finally:
            terminal.close()
    first = next(number for number, line in enumerate(lines) if line.startswith(PROMPT + SHOWN[0]))
    return "\n".join(lines[first:-1]).replace(PROMPT, "$ ")


def draw(screen: str, path: Path) -> None:
    console = Console(file=StringIO(), record=True, width=COLUMNS, color_system="truecolor", force_terminal=True)
    console.print(Text.from_ansi(screen), soft_wrap=True)
    text = console.export_html(inline_styles=True, code_format="{code}", theme=DIMMED_MONOKAI)
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file, Browser() as browser:
        file.write(PAGE.format(lines=text, background=DIMMED_MONOKAI.background_color.hex))
        file.flush()
        page = browser.open_page(Path(file.name), width=1280)
        page.resize(*page.evaluate("(body => [body.offsetWidth, body.offsetHeight])(document.body)"))
        page.screenshot(path)


if __name__ == "__main__":
    draw(record(), Path(sys.argv[1]))

"""Draw README's picture of the demo from a real run in a terminal: `python -m bench.demo_picture.run`.

Lines are those of the run. Of the line that is drawn over itself one state in the middle is shown, and the last; the tables of
settings are left out, which is marked.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "demo.svg"
COLUMNS = 112
LIVE = re.compile(r"━+─* ?\S* ?.*?\d+/\d+")
SETTINGS = re.compile(r"\s*[|+]|-{5,}|--run=|Local start of|their warnings|others their warnings")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_in_terminal(command: list[str], folder: Path) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    if process.wait():
        raise SystemExit(f"the demo failed:\n{shown.decode(errors='replace')}")
    return shown.decode(errors="replace")


def plain(line: str) -> str:
    return CODES.sub("", line)


def picked(shown: str) -> list[str]:
    """The lines worth showing, in their order."""
    found: list[str] = []
    is_cut = False
    for row in shown.replace("\r\n", "\n").split("\n"):
        states = [state for state in row.split("\r") if plain(state).strip()]
        drawn = [state for state in states if LIVE.search(plain(state))]
        if drawn:
            found.append(drawn[len(drawn) * 2 // 3])
        last = states[-1] if states else ""
        if last and last not in drawn:
            is_table = bool(SETTINGS.match(plain(last))) or (is_cut and ": " in plain(last)[:40])
            if is_table and not is_cut:
                found.append("    ⋮")
            elif not is_table:
                found.append(last)
            is_cut = is_table
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "demo.py")]
        lines = picked(run_in_terminal(command, Path(folder)))
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True, color_system="truecolor")
    console.print(Text("$ make demo", style="bold"))
    for line in lines:
        console.print(Text.from_ansi(CODES.sub(lambda code: code[0] if code[0].endswith("m") else "", line)), soft_wrap=False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    svg = console.export_svg(title="make demo")
    # Rich names a font on the network; the reader's own is as good, and a page asks no server.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code,", "ui-monospace, Menlo, Consolas,")
    args.out.write_text(svg, encoding="utf-8")
    print(f"{args.out}: {len(lines)} lines")


if __name__ == "__main__":
    main()

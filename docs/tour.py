"""The tour in README.md: a recorded terminal as an animated SVG, without scripts.

    python docs/tour.py        # runs the commands and writes tour.json and tour.svg

The model is the tiny one of `megatrain demo`, so that it runs anywhere. The text is what the
commands print, speeds included, so record it on an idle machine. The time of the pictures is ours:
typing is slow, and waits are short.
`python docs/generate.py` draws tour.svg from tour.json again, and tests/test_tour.py holds the
commands to the command line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.style import Style
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS, ROWS = 88, 31
CHAR, LINE, LEFT, TOP = 8.4, 19, 16, 44
WIDE, HIGH = round(2 * LEFT + COLUMNS * CHAR), TOP + ROWS * LINE + 12
TYPING_S, PRINTING_S, STEP_S, LOOKING_S, END_S = 0.02, 0.03, 0.1, 1.4, 3.0
"""Per typed character, printed line, line of a step, after each command, and at the end."""
PROMPT = "$ "
_HOLD = "animation-timing-function: step-end"
_CONSOLE = Console(width=COLUMNS, color_system="standard", force_terminal=True)
COLORS = {1: "#ff7b72", 2: "#7ee787", 3: "#e3b341", 4: "#79c0ff", 6: "#79c0ff"}
"""By the number that a terminal knows them by."""
STYLE = """\
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
 fill: #c9d1d9; white-space: pre }
.said { fill: #8b949e } .typed { fill: #f0f6fc; font-weight: 600 } .prompt { fill: #7ee787 }
.dim { fill: #8b949e } .bold { font-weight: 700; fill: #f0f6fc }
.under { text-decoration: underline }
.ground { fill: #0d1117 } .bar { fill: #161b22 } .cover { fill: #0d1117 }
"""
CONFIG = """\
model: tiny-llama
data: {train: sums.jsonl, eval: 0.05, max_length: 64}
train: {steps: 120, batch_tokens: 512}
optim: {learning_rate: 3e-3, schedule: cosine, warmup: 0.05}
save: runs/sums
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A command, what it is for, and when Ctrl-C is pressed."""

    note: str
    command: str
    interrupted_at: str | None = None
    """The start of the line after which it is."""


SCENES = (
    Scene(
        note="Will an 8B model train on my card? No download, no GPU needed to ask.",
        command="megatrain estimate Qwen/Qwen3-8B --gpu 4090 --ram 128GB",
    ),
    Scene(note="Here: a tiny model that learns sums. All settings:", command="cat run.yaml"),
    Scene(
        note="Is the data right? What is trained is underlined.",
        command="megatrain data sums.jsonl -m tiny-llama --samples 2",
    ),
    Scene(
        note="Train. Ctrl-C saves.",
        command="megatrain train run.yaml log.every=10",
        interrupted_at="step 50/",
    ),
    Scene(
        note="Continue: the same bits as a run that was never stopped.",
        command="megatrain train run.yaml log.every=10 --resume",
    ),
    Scene(note="Did it learn?", command='megatrain sample runs/sums "3 + 4" "9 + 8"'),
    Scene(note="Is every byte right?", command="megatrain verify runs/sums"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One line of the terminal: when it appears, and how."""

    at_s: float
    text: Text
    kind: str
    """said, typed or printed."""


def record() -> list[dict[str, str]]:
    """Run the commands in a new folder; return each with what it printed."""
    from megatrain.cli.demo import write_demo

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_demo(folder / "demo")
        (folder / "demo" / "model").rename(folder / "tiny-llama")
        (folder / "demo" / "rows.jsonl").rename(folder / "sums.jsonl")
        (folder / "run.yaml").write_text(CONFIG)
        return [
            {"note": one.note, "command": one.command, "printed": _run(one, folder)}
            for one in SCENES
        ]


def _run(scene: Scene, folder: Path) -> str:
    """Return what a command prints, with colors as on a terminal."""
    words = shlex.split(scene.command)
    program = [sys.executable, "-m", "megatrain"] if words[0] == "megatrain" else words[:1]
    environment = os.environ | {
        "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "MEGATRAIN_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(HERE.parent / "src"), "TERM": "xterm-256color",
    }  # fmt: skip
    process = subprocess.Popen(
        [*program, *words[1:]], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if scene.interrupted_at is not None and line.startswith(scene.interrupted_at):
            printed.append("^C\n")
            process.send_signal(signal.SIGINT)
    code = process.wait()
    assert code == (130 if scene.interrupted_at else 0), "".join(printed)
    return "".join(printed).replace(str(folder), "~")


def shown(recording: Sequence[dict[str, str]]) -> list[Shown]:
    """Return the lines of the recording, each with its time.

    The first scene is there from the beginning: it is what a preview or a print shows.
    """
    first, *others = recording
    lines = [
        Shown(at_s=0.0, text=Text(f"# {first['note']}"), kind="said"),
        Shown(at_s=0.0, text=Text(first["command"]), kind="typed"),
    ]
    printed = Text.from_ansi(first["printed"].rstrip("\n") + "\n").split("\n", allow_blank=True)
    for text in printed:
        parts = text.wrap(_CONSOLE, COLUMNS)
        lines += [Shown(at_s=0.0, text=part, kind="printed") for part in parts]
    now = 2 * LOOKING_S
    for scene in others:
        lines.append(Shown(at_s=now, text=Text(f"# {scene['note']}"), kind="said"))
        now += 0.5
        lines.append(Shown(at_s=now, text=Text(scene["command"]), kind="typed"))
        now += len(scene["command"]) * TYPING_S + 0.4
        printed = Text.from_ansi(scene["printed"].rstrip("\n")).split("\n")
        for text in printed:
            for part in text.wrap(_CONSOLE, COLUMNS):
                lines.append(Shown(at_s=now, text=part, kind="printed"))
            now += STEP_S if text.plain.startswith("step ") else PRINTING_S
        lines.append(Shown(at_s=now, text=Text(""), kind="printed"))
        now += LOOKING_S + 0.02 * len(printed)
    return lines


def drawn(recording: Sequence[dict[str, str]]) -> str:
    """Return the recording as an SVG file that plays for ever."""
    lines = shown(recording)
    whole_s = lines[-1].at_s + LOOKING_S + END_S
    frames, body = [], []
    for number, line in enumerate(lines):
        row = "".join(_row(line, number))
        if line.at_s == 0.0:
            body.append(f"<g>{row}</g>")
            continue
        share = 100 * line.at_s / whole_s
        frames.append(_appears(f"a{number}", share))
        style = f"animation: a{number} {whole_s:.1f}s infinite"
        body.append(f'<g style="{style}">{row}</g>')
        if line.kind == "typed":
            frames.append(_typed(f"t{number}", line, share, whole_s))
            body.append(_cover(line, number, whole_s))
    frames.append(_scrolls(lines, whole_s))
    still = "@media (prefers-reduced-motion: reduce) { g, rect { animation: none !important }\n"
    still += (
        f" .cover {{ display: none }} .page {{ transform: translateY({_rise(len(lines))}px) }} }}"
    )
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}">',
        "<title>A tour of MegaTrain: estimate, data, train, Ctrl-C, resume, sample, verify</title>",
        f"<style>\n{STYLE}{still}\n" + "\n".join(frames) + "\n</style>",
        f'<rect class="ground" width="{WIDE}" height="{HIGH}" rx="8"/>',
        f'<svg y="{TOP - 9}" width="{WIDE}" height="{HIGH - TOP + 8}">',
        f'<g class="page" style="animation: scroll {whole_s:.1f}s infinite">',
        *body,
        "</g></svg>",
        f'<rect class="bar" width="{WIDE}" height="28" rx="8"/>',
        *(f'<circle cx="{18 + 18 * n}" cy="14" r="5" fill="{color}"/>'
          for n, color in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))),
        f'<text x="{WIDE / 2:.0f}" y="19" text-anchor="middle" class="said">'
        "megatrain, recorded on two CPU cores; waits are shortened</text>",
        "</svg>\n",
    ])  # fmt: skip


def _row(line: Shown, number: int) -> Iterator[str]:
    """Yield the texts of a line, one for each style."""
    y = (number + 1) * LINE - 5
    start = 0
    if line.kind == "typed":
        yield _text(PROMPT, 0, y, "prompt")
        yield _text(line.text.plain, len(PROMPT), y, "typed")
        return
    if line.kind == "said":
        yield _text(line.text.plain, 0, y, "said")
        return
    for piece in line.text.render(_CONSOLE):
        style = piece.style or Style.null()
        if piece.text.strip():
            looks = {"bold": style.bold, "dim": style.dim, "under": style.underline}
            color = None if style.color is None else COLORS.get(style.color.number or 0)
            kind = " ".join(name for name, on in looks.items() if on)
            yield _text(piece.text, start, y, kind, color)
        start += len(piece.text)


def _text(text: str, column: int, y: int, kind: str, color: str | None = None) -> str:
    """Return a text of exactly its columns, whatever font the reader has."""
    lead = len(text) - len(text.lstrip(" "))
    text = text.strip(" ")
    look = f' class="{kind}"' if kind else ""
    look += f' style="fill: {color}"' if color else ""
    x, length = LEFT + (column + lead) * CHAR, len(text) * CHAR
    return (
        f'<text x="{x:.1f}" y="{y}" textLength="{length:.1f}" '
        f'lengthAdjust="spacingAndGlyphs"{look}>{escape(text)}</text>'
    )


def _appears(name: str, share: float) -> str:
    return (
        f"@keyframes {name} {{ 0%, {share:.3f}% {{ opacity: 0 }} "
        f"{share + 0.001:.3f}%, 100% {{ opacity: 1 }} }}"
    )


def _typed(name: str, line: Shown, share: float, whole_s: float) -> str:
    """Return the way of the cover over a command that is being typed."""
    num = len(line.text.plain)
    end = share + 100 * num * TYPING_S / whole_s
    return (
        f"@keyframes {name} {{ 0%, {share:.3f}% {{ transform: none; "
        f"animation-timing-function: steps({num}) }} "
        f"{end:.3f}%, 100% {{ transform: translateX({num * CHAR:.1f}px) }} }}"
    )


def _cover(line: Shown, number: int, whole_s: float) -> str:
    x = LEFT + len(PROMPT) * CHAR
    return (
        f'<rect class="cover" x="{x:.1f}" y="{number * LINE}" width="{WIDE}" height="{LINE}" '
        f'style="animation: t{number} {whole_s:.1f}s infinite"/>'
    )


def _rise(num_lines: int) -> int:
    return -LINE * max(0, num_lines - ROWS)


def _scrolls(lines: Sequence[Shown], whole_s: float) -> str:
    """Return how the page rises so that the newest line is seen: at once, line by line."""
    steps = [f"0% {{ transform: translateY(0px); {_HOLD} }}"]
    for number in range(ROWS, len(lines)):
        share = 100 * lines[number].at_s / whole_s
        steps.append(f"{share:.3f}% {{ transform: translateY({_rise(number + 1)}px); {_HOLD} }}")
    steps.append(f"100% {{ transform: translateY({_rise(len(lines))}px) }}")
    return "@keyframes scroll { " + " ".join(steps) + " }"


def main() -> None:
    """Record and draw; tell how busy the machine was, as the speeds in the picture depend on it."""
    load = os.getloadavg()[0]
    recording = record()
    (HERE / "tour.json").write_text(json.dumps(recording, indent=1) + "\n")
    (HERE / "tour.svg").write_text(drawn(recording))
    speeds = re.findall(r"[\d.,]+ tok/s", recording[-3]["printed"])
    print(f"load {load:.1f} before the first command; last step {speeds[-1]}")
    if load > 1.0:
        print("the machine was busy: record again when it is idle, or the picture shows slow steps")


if __name__ == "__main__":
    main()

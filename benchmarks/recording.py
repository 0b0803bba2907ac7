# SPDX-License-Identifier: Apache-2.0
"""docs/images/demo.gif: `lbproxy demo --traffic` from begin to end, as an animated GIF of what its terminal shows.

    make recording        or .venv/bin/python -m benchmarks.recording [--seed N] [--frames FOLDER]

It is the demo itself, with its servers, its lbproxy and its clients; only instead of a terminal each picture goes to
this file, which draws its characters. Played faster than it was. Needs Pillow and DejaVu Sans Mono, which come with
matplotlib (`pip install '.[plots]'`).
"""

from __future__ import annotations

import argparse
import asyncio
import io
from pathlib import Path

import matplotlib as mpl
import uvloop
from PIL import Image, ImageColor, ImageDraw, ImageFont
from rich.console import Console
from rich.segment import Segment
from rich.style import Style

from lbproxy import __version__
from lbproxy.demo.show import EIGHTHS, picture, summary
from lbproxy.demo.traffic import TrafficOptions, View, run_traffic

OUT = Path(__file__).parents[1] / "docs" / "images" / "demo.gif"
COLUMNS, ROWS = 80, 21
EVERY_S = 2.0
"""Of the demo, from frame to frame."""
FRAME_MS, LAST_MS = 500, 6000
"""How long each is shown."""
SIZE, CELL, PAD, BAR = 18, (11, 23), 18, 34
"""Pixels: of the letters, of a character's cell, of the margin, of the window's head."""
BACK, HEAD, INK = "#0d1117", "#161b22", "#e6edf3"
COLOURS = {
    "green": "#3fb950",
    "yellow": "#e3b341",
    "red": "#ff7b72",
    "cyan": "#79c0ff",
    "dim": "#8b949e",
}
STEPS = 6
"""Mixtures of an ink with the background."""
LIGHTS = ("#ff5f57", "#febc2e", "#28c840")


def colour(style: Style) -> str:
    """Of the letters."""
    if style.color is not None:
        return COLOURS[style.color.name]
    return COLOURS["dim"] if style.dim else INK


def lines(view: View) -> list[list[Segment]]:
    """A moment, as the terminal would have it."""
    console = Console(width=COLUMNS, height=ROWS, file=io.StringIO(), force_terminal=True, highlight=False)
    return console.render_lines(picture(view), pad=False)


class Painter:
    """Characters to pixels."""

    def __init__(self) -> None:
        folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
        self._fonts = [ImageFont.truetype(str(folder / f"DejaVuSansMono{bold}.ttf"), SIZE) for bold in ("", "-Bold")]

    def frame(self, text: list[list[Segment]]) -> Image.Image:
        """One frame: a window with these lines in it."""
        size = (2 * PAD + COLUMNS * CELL[0], BAR + 2 * PAD + ROWS * CELL[1])
        image = Image.new("RGB", size, BACK)
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 0, size[0], BAR), fill=HEAD)
        for number, light in enumerate(LIGHTS):
            x = PAD + 22 * number
            draw.ellipse((x, BAR // 2 - 6, x + 12, BAR // 2 + 6), fill=light)
        for row, line in enumerate(text[:ROWS]):
            column = 0
            for segment in line:
                style = segment.style or Style()
                for character in segment.text:
                    self._character(draw, character, (column, row), style)
                    column += 1
        return image

    def _character(self, draw: ImageDraw.ImageDraw, character: str, cell: tuple[int, int], style: Style) -> None:
        x, y = PAD + cell[0] * CELL[0], BAR + PAD + cell[1] * CELL[1]
        if character in EIGHTHS[1:]:
            # A font's blocks leave gaps between cells.
            width = round(CELL[0] * EIGHTHS.index(character) / 8)
            draw.rectangle((x, y + 3, x + width - 1, y + CELL[1] - 4), fill=colour(style))
        elif character != " ":
            draw.text((x, y), character, font=self._fonts[bool(style.bold)], fill=colour(style))


async def record(seed: int) -> tuple[list[Image.Image], View]:
    """The demo's frames, and its last moment."""
    painter, frames = Painter(), []
    due_s, number, last = 0.0, -1, None

    def show(view: View) -> None:
        nonlocal due_s, number, last
        last = view
        if view.elapsed_s >= due_s or view.number != number:
            frames.append(painter.frame(lines(view)))
            due_s, number = view.elapsed_s + EVERY_S, view.number

    end = await run_traffic(
        TrafficOptions(listen="127.0.0.1:8080", admin="127.0.0.1:9901", seed=seed), asyncio.Event(), show
    )
    assert end is not None
    frames.append(painter.frame(lines(end)))
    return frames, end


def palette() -> Image.Image:
    """Every ink in a few mixtures with the background, for the edges of letters."""
    inks = [INK, *COLOURS.values(), *LIGHTS]
    back = ImageColor.getrgb(BACK)
    values = [*back, *ImageColor.getrgb(HEAD)]
    for ink in map(ImageColor.getrgb, inks):
        for step in range(1, STEPS + 1):
            values += [round(b + (i - b) * step / STEPS) for b, i in zip(back, ink, strict=True)]
    image = Image.new("P", (1, 1))
    image.putpalette(values)
    return image


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=Path, metavar="FOLDER", help="write some as PNG, to look at")
    options = parser.parse_args()
    frames, end = uvloop.run(record(options.seed))
    few = palette()
    flat = [frame.quantize(palette=few, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * (len(flat) - 1) + [LAST_MS]
    flat[0].save(
        OUT,
        save_all=True,
        append_images=flat[1:],
        duration=durations,
        loop=0,
        optimize=True,
        comment=f"lbproxy {__version__}",
    )
    if options.frames is not None:
        options.frames.mkdir(parents=True, exist_ok=True)
        for number in range(0, len(frames), 8):
            frames[number].save(options.frames / f"frame-{number:03d}.png")
        frames[-1].save(options.frames / "frame-last.png")
    faster = EVERY_S * 1000.0 / FRAME_MS
    print(f"{OUT}: {OUT.stat().st_size / 1024:.0f} KiB, {len(flat)} frames, {faster:g} times as fast as it was")
    summary(end, Console())


if __name__ == "__main__":
    main()

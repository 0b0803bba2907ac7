# SPDX-License-Identifier: Apache-2.0
"""What a picture of the dashboard says of itself: of which version it is, and by which words the page names things."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

import lbproxy.control.admin.dashboard
from lbproxy import __version__

COLOURS = 128
FOLDER = Path(lbproxy.control.admin.dashboard.__file__).parent
_WORDS = re.compile(r'<h[123][^>]*>([^<]+)<|\bhead: "([^"]+)"|\["([a-z0-9 ,.]+)", (?:percent|figure)\(')


def shown() -> dict[str, str]:
    """The version, and the page's titles, heads of columns and names of values."""
    texts = [(FOLDER / name).read_text("utf-8") for name in ("page.html", "fleet.js", "picture.js")]
    words = [word.strip() for text in texts for found in _WORDS.findall(text) for word in found if word.strip()]
    return {"Software": f"lbproxy {__version__}", "Comment": "; ".join(words)}


def save(picture: bytes, path: Path) -> None:
    """Write a screenshot of the page with few colours, which is a third of the bytes, and with what it shows."""
    info = PngInfo()
    for key, text in shown().items():
        info.add_text(key, text)
    image = Image.open(BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(path, optimize=True, pnginfo=info)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB", flush=True)

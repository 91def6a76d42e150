"""Charts as PNG files for slides: the page's own SVG in the page's light colours, on white, rasterised by resvg."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from review.logs.output import ReviewError
from review.report.chart import Chart
from review.report.svg import draw_picture

SCALE = 2  # pixels a CSS pixel: pictures are 1920 x 1080
_TEMPLATES = Path(__file__).parent / "templates"
_FONTS = "Liberation Sans", "DejaVu Sans", "Noto Sans", "Arial", "Helvetica"


def draw(chart: Chart, subject: str) -> bytes:
    """A PNG of 1920 x 1080 pixels. ``subject`` is what the result is called. Raises ReviewError without resvg."""
    family = _font()
    return _render(draw_picture(chart, subject), f"{style_sheet()} svg text {{ font-family: '{family}', sans-serif; }}")


@functools.cache
def style_sheet() -> str:
    """chart.css with the page's light colours in the place of the variables, which the renderer does not know."""
    colours = (_TEMPLATES / "colours.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"--([\w-]+): (#\w+);", colours.partition("@media")[0]))
    runs = " ".join(re.findall(r"\.run-\d+ \{[^}]*\}", colours))
    css = f"{runs}\n{(_TEMPLATES / 'chart.css').read_text(encoding='utf-8')}"
    css = css.replace("--c:", "color:").replace("var(--c)", "currentColor")  # what a variable inherits, color does too
    return re.sub(r"var\(--([\w-]+)\)", lambda match: light[match[1]], css)


@functools.cache
def _font() -> str:
    """A sans-serif font of this machine. Raises ReviewError where there is none: the text would be left out."""
    empty = _render('<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16"/>', "")
    for family in _FONTS:
        text = f"<text y='12' font-family='{family}' font-size='12'>M</text>"
        if _render(f'<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16">{text}</svg>', "") != empty:
            return family
    raise ReviewError(f"PNG files need a font, one of {', '.join(_FONTS)}: apt-get install fonts-dejavu-core")


def _render(svg: str, css: str) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise ReviewError("PNG files need resvg: pip install resvg-py") from None
    return resvg_py.svg_to_bytes(svg_string=svg, style_sheet=css, zoom=SCALE, background="#ffffff")

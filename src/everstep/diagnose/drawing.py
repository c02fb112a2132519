"""A picture of boxes, lines and words: as SVG written here, as PNG through matplotlib. Both
are drawn from one list, so they cannot differ.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from everstep.errors import UserError

INK = "#22223b"


@dataclass(slots=True)
class DrawnBox:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = "#ffffff"
    stroke_width: float = 0.7
    tip: str = ""


@dataclass(slots=True)
class Word:
    x: float
    y: float
    text: str
    size: float = 11.0
    fill: str = INK
    anchor: str = "start"
    bold: bool = False


@dataclass(slots=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str
    dashed: bool = False


@dataclass(slots=True)
class Picture:
    width: float
    height: float
    boxes: list[DrawnBox] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)


def svg(drawing: Picture) -> str:
    """The picture as an SVG document; hovering over a box names its op."""
    size = f"{drawing.width:g} {drawing.height:g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width:g}" height="{drawing.height:g}" '
        f'viewBox="0 0 {size}" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for box in drawing.boxes:
        tip = f"<title>{escape(box.tip)}</title>" if box.tip else ""
        parts.append(
            f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" '
            f'height="{box.height:.2f}" rx="2" fill="{box.fill}" '
            f'stroke="{box.stroke}" stroke-width="{box.stroke_width:g}">{tip}</rect>'
        )
    for line in drawing.lines:
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(
            f'<line x1="{line.x1:.2f}" y1="{line.y1:.2f}" x2="{line.x2:.2f}" y2="{line.y2:.2f}" '
            f'stroke="{line.stroke}" stroke-width="1.2"{dash}/>'
        )
    for word in drawing.words:
        weight = ' font-weight="bold"' if word.bold else ""
        parts.append(
            f'<text x="{word.x:.2f}" y="{word.y:.2f}" font-size="{word.size:g}" fill="{word.fill}" '
            f'text-anchor="{word.anchor}"{weight}>{escape(word.text)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def png(drawing: Picture, *, dots_per_inch: int = 144) -> bytes:
    """The picture as PNG bytes."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
    except ImportError:
        raise UserError("a PNG needs matplotlib: pip install matplotlib, or ask for an .svg.") from None
    figure = Figure(figsize=(drawing.width / 96, drawing.height / 96), dpi=dots_per_inch, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for box in drawing.boxes:
        axes.add_patch(
            FancyBboxPatch(
                (box.x, box.y),
                box.width,
                box.height,
                facecolor=box.fill,
                boxstyle="round,pad=0,rounding_size=2",
                edgecolor=box.stroke,
                linewidth=box.stroke_width * 0.75,
            )
        )
    for line in drawing.lines:
        axes.plot(
            (line.x1, line.x2),
            (line.y1, line.y2),
            color=line.stroke,
            linewidth=0.9,
            linestyle=(0, (5, 4)) if line.dashed else "-",
        )
    for word in drawing.words:
        axes.text(
            word.x,
            word.y,
            word.text,
            fontsize=word.size * 0.72,
            color=word.fill,
            va="baseline",
            ha={"start": "left", "end": "right", "middle": "center"}[word.anchor],
            fontweight="bold" if word.bold else "normal",
        )
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()

"""Paint a sheet as SVG text."""

from __future__ import annotations

from html import escape

from npu_pipe.timeline.palette import LANE_COLOURS
from npu_pipe.timeline.shapes import Anchor, Box, Label, Line, Shape, Sheet

__all__ = ["svg"]

_FONTS = "system-ui, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
_HEADS = {colour: f"head-{lane}" for lane, colour in LANE_COLOURS.items()}


def svg(sheet: Sheet) -> str:
    """A standalone SVG document; hints become the titles that browsers show."""
    width, height = _number(sheet.width), _number(sheet.height)
    markers = "".join(
        f'<marker id="{head}" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="5" '
        f'markerHeight="5" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0 10 5 0 10z" fill="{colour}"/></marker>'
        for colour, head in _HEADS.items()
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="{_FONTS}">',
            f"<title>{_text(sheet.title)}</title>",
            f"<desc>{_text(sheet.summary)}</desc>",
            f"<defs>{markers}</defs>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *map(_element, sheet.shapes),
            "</svg>\n",
        )
    )


def _element(shape: Shape) -> str:
    match shape:
        case Box():
            place = _attributes(x=shape.x, y=shape.y, width=shape.width, height=shape.height)
            return _hinted("rect", f'{place} fill="{shape.fill}"', shape.hint)
        case Line():
            place = _attributes(x1=shape.x, y1=shape.y, x2=shape.to_x, y2=shape.to_y)
            head = f' marker-end="url(#{_HEADS[shape.colour]})"' if shape.arrow else ""
            return _hinted("line", f'{place} stroke="{shape.colour}"{head}', shape.hint)
        case Label():
            # A third of the size below the middle: where the base line of digits lies.
            place = _attributes(x=shape.x, y=shape.y + 0.35 * shape.size, font_size=shape.size)
            anchor = "" if shape.anchor is Anchor.START else f' text-anchor="{shape.anchor}"'
            bold = ' font-weight="600"' if shape.bold else ""
            # The pointer shall find the bar below, which has the hint.
            look = f'{place} fill="{shape.colour}"{anchor}{bold} pointer-events="none"'
            return f"<text {look}>{_text(shape.text)}</text>"


def _hinted(tag: str, attributes: str, hint: str) -> str:
    if not hint:
        return f"<{tag} {attributes}/>"
    return f"<{tag} {attributes}><title>{_text(hint)}</title></{tag}>"


def _text(text: str) -> str:
    """Escaped; XML knows no control characters at all."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text), quote=False)


def _attributes(**values: float) -> str:
    return " ".join(
        f'{name.replace("_", "-")}="{_number(value)}"' for name, value in values.items()
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")

"""A report as one HTML page: pictures of inline SVG, tables, and nothing that is fetched from elsewhere. A report in, text out;
called by `Report.html()` alone."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterable
from html import escape

from arena.memory import bytes_of
from arena.reporting import NUMBERS, Life, Report

MOST = 40  # graphs, or lives, in a picture; the tables have all
WIDTH, LABEL, VALUE, ROW = 960, 300, 180, 28

STYLE = """
:root { color-scheme: light dark; --ink: #1d232b; --soft: #5b6573; --line: #d9dee5; --paper: #ffffff; --band: #f4f6f8;
  --outside: #2f6db5; --inside: #d1732b; --shared: #7a4fb0; --retired: #b3261e; --alive: #2b8a68; --dead: #6f7986; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #a3adba; --line: #39424e; --paper: #15191f;
  --band: #1d232b; --outside: #6aa5e8; --inside: #eda063; --shared: #b794e6; --retired: #f2857d; --alive: #5cc49c;
  --dead: #8592a3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 60px; max-width: 1040px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 34px 0 8px; }
p { margin: 4px 0; color: var(--soft); } b { color: var(--ink); }
.picture { overflow-x: auto; } svg { display: block; width: 100%; min-width: 760px; height: auto; }
svg text.on { fill: var(--paper); font-size: 11px; } svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); font-size: 12px; } svg line { stroke: var(--line); }
.legend span { display: inline-block; margin-right: 18px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.number + td:not(.number), th.number + th:not(.number) { padding-left: 12px; }
td:first-child { overflow-wrap: anywhere; min-width: 180px; }
"""

COLOURS = {
    "outside": "outside its pool",
    "inside": "inside its pool",
    "shared": "of these, held by others too",
    "retired": "of these, retired workspace",
}
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>arena report</title><style>STYLE</style></head>
<body>
"""


def render(report: Report) -> str:
    """The whole page."""
    inside = sum(each.inside for each in report.graphs)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.when))
    parts = [
        "<h1>What the CUDA graphs of this process hold</h1>",
        f"<p>{when}: <b>{report.total()}</b>, shared blocks counted once."
        + (f" torch has {bytes_of(report.reserved)} from the driver." if report.reserved else "")
        + "</p>",
    ]
    if inside:
        parts.append(
            f"<p><b>{bytes_of(inside)}</b> lie inside the graphs' own pools, which live as long as the graphs without being "
            "retained.</p>"
        )
    parts += ["<h2>Bytes</h2>", legend(COLOURS), bars(report)]
    parts += ["<h2>Lifetimes</h2>", legend({"alive": "alive", "dead": "gone"}), lifetimes(report.lives, report.when)]
    parts += ["<h2>Graphs</h2>", table(report.rows())]
    if report.slots:
        parts += ["<h2>Workspace</h2>", table(report.slot_rows())]
    return HEAD.replace("STYLE", STYLE) + "\n".join(parts) + "\n</body></html>\n"


def legend(colours: dict[str, str]) -> str:
    marks = "".join(f'<span><i style="background: var(--{name})"></i>{text}</span>' for name, text in colours.items())
    return f'<p class="legend">{marks}</p>'


def table(rows: list[tuple[str, ...]]) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        kinds = [' class="number"' if name in NUMBERS else "" for name in rows[0]]
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"

    if len(rows) == 1:
        return "<p>None.</p>"
    return f'<div class="table"><table>{cells("th", rows[0])}{"".join(cells("td", row) for row in rows[1:])}</table></div>'


def picture(height: int, parts: list[str], label: str) -> str:
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    return f'<div class="picture">{svg}</div>'


def rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height}" rx="2" fill="var(--{colour})">'
        f"<title>{escape(title)}</title></rect>"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def short(name: str, most: float = 36) -> str:
    """The ends of a name tell it from others. Cut by how wide its letters are: beyond the room for labels they are lost."""
    if sum(map(width_of, name)) <= most:
        return name
    head, tail = fitting(name, (most - 1) / 2), fitting(reversed(name), (most - 1) / 2)
    return f"{head}…{tail[::-1]}"


def fitting(letters: Iterable[str], room: float) -> str:
    taken = ""
    for each in letters:
        room -= width_of(each)
        if room < 0:
            break
        taken += each
    return taken


def width_of(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return 2
    return 1.6 if letter in "mwMW@%" else 1.2 if letter.isupper() else 1


def bars(report: Report) -> str:
    """Graphs against bytes, the largest first: outside and inside the pool; below them, thin, what is shared and retired."""
    graphs = report.graphs[:MOST]
    if not graphs:
        return "<p>None.</p>"
    most = max(each.outside + each.inside for each in graphs) or 1
    room = WIDTH - LABEL - VALUE
    parts = []
    for row, each in enumerate(graphs):
        y, x = row * ROW + 4, float(LABEL)
        parts.append(text(LABEL - 12, y + 13, short(each.name), "", "end"))
        for name, size in (("outside", each.outside), ("inside", each.inside)):
            if size:
                width = size / most * room
                parts.append(rect(x, y, width, 14, name, f"{each.name}: {bytes_of(size)} {COLOURS[name]}"))
                x += width
        for below, name, size in ((15, "shared", each.shared), (19, "retired", each.retired)):
            if size:
                told = f"{each.name}: {bytes_of(size)} {COLOURS[name]}"
                parts.append(rect(LABEL, y + below, size / most * room, 3, name, told))
        owners = each.owners + each.opaque
        told = f"{bytes_of(each.outside + each.inside)}, {owners} owner{'s' * (owners != 1)}"
        parts.append(text(x + 8, y + 12, told, "soft"))
    left = len(report.graphs) - len(graphs)
    note = f"<p>{left} smaller ones are in the table.</p>" if left else ""
    return picture(len(graphs) * ROW + 6, parts, "bytes that each graph holds") + note


def lifetimes(lives: list[Life], when: float) -> str:
    """Each capture's owners on a time axis: from its begin until they died, or now."""
    lives = [each for each in lives if each.born]
    left = len(lives) - MOST
    lives = lives[-MOST:]
    if not lives:
        return "<p>None.</p>"
    when = max(when, *(each.died or each.born for each in lives))  # a clock may have been set back
    first = min(each.born for each in lives)
    span = max(when - first, 1e-3)
    room = WIDTH - LABEL - 20
    height = len(lives) * ROW
    parts = []
    step = span / 4
    for tick in range(5):
        x = LABEL + tick / 4 * room
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" />')
        words = "now" if tick == 4 else f"{ago(span - tick * step)} ago"
        parts.append(text(x, height + 17, words, "soft", "end" if tick == 4 else "start" if not tick else "middle"))
    for row, each in enumerate(lives):
        y = row * ROW + 6
        start = LABEL + (each.born - first) / span * room
        end = max(start, LABEL + ((each.died or when) - first) / span * room)
        state = f"lived {ago(max(each.died - each.born, 0))}" if each.died else f"alive for {ago(when - each.born)}"
        owners = f"{each.owners} owner{'s' * (each.owners != 1)}"
        parts.append(text(LABEL - 12, y + 11, short(each.name), "", "end"))
        parts.append(rect(start, y, end - start, 13, "dead" if each.died else "alive", f"{each.name}: {owners}, {state}"))
        if end - start > 110:
            parts.append(text(start + 8, y + 10.5, owners, "on"))
        elif end + 110 < WIDTH:
            parts.append(text(end + 8, y + 11, owners, "soft"))
        else:
            parts.append(text(start - 8, y + 11, owners, "soft", "end"))
    note = f"<p>{left} that began earlier are not shown.</p>" if left > 0 else ""
    return picture(height + 24, parts, "lifetimes of owner lists") + note


def ago(seconds: float) -> str:
    """A length of time, short."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}" if seconds >= 10 * length else f"{seconds / length:.1f} {unit}"
    return f"{seconds * 1000:.0f} ms"

"""A page of HTML that can be kept: its styles, its links, and pictures with their numbers.

Each picture stands in it twice, for wide and for narrow screens, with its numbers as a table. What
others have named is text, never markup.
"""

from collections.abc import Sequence
from typing import Final

from stratagem.client.pictures.drawing.colours import stylesheet
from stratagem.client.pictures.drawing.svg import escaped
from stratagem.client.report.panel import Panel

WIDE: Final = 760
NARROW: Final = 340

_STYLE: Final = """
body{margin:0 auto;max-width:760px;padding:1.2rem 1rem 3rem;background:var(--sg-surface);
color:var(--sg-ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
h3{font-size:1rem;margin:1.4rem 0 .3rem;font-weight:600}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:1rem 0;font-size:.9rem}
a{color:var(--sg-s1)}p{margin:.3rem 0}.muted,figcaption{color:var(--sg-muted)}
.small{font-size:.85rem;margin:.15rem 0}
figure{margin:0 0 1.2rem}figcaption{font-size:.85rem}
.phase{font-weight:600}.COMPLETED{color:var(--sg-good)}.FAILED{color:var(--sg-bad)}
.CANCELLED,.RECOVERING{color:var(--sg-warn)}
.error{border-left:4px solid var(--sg-bad);padding:.2rem 0 .2rem .9rem;margin:1rem 0}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--sg-grid);
border-radius:6px;padding:.7rem .9rem;font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace}
table{border-collapse:collapse;font-size:.85rem;width:100%}
th,td{text-align:left;padding:.2rem .7rem .2rem 0;border-bottom:1px solid var(--sg-grid);
vertical-align:top;overflow-wrap:break-word}
td{font-variant-numeric:tabular-nums}th{font-weight:600}tbody th{font-weight:400}
.scroll{overflow-x:auto}summary{cursor:pointer;color:var(--sg-muted);font-size:.85rem}
.narrow{display:none}ul{padding-left:1.2rem;margin:.3rem 0}
@media (max-width:560px){.wide{display:none}.narrow{display:block}}
@media print{nav,details:not([open]){display:none}.wide{display:block}.narrow{display:none}
figure,tr,.error{break-inside:avoid}body{font-size:11pt}}
"""

Section = tuple[str, str, str]
"""Its name in links, its title, and its content."""


def document(title: str, header: str, sections: Sequence[Section], made_at: str) -> str:
    """Return a page. title: as text; header: HTML before the links; made_at: when, in words."""
    links = "".join(f'<a href="#{name}">{escaped(title)}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{escaped(title)}</h2>{content}</section>'
        for name, title, content in sections
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>{stylesheet()}{_STYLE}</style></head><body>"
        f'{header}<nav aria-label="Sections">{links}</nav><main>{body}</main>'
        f'<footer><p class="muted">made at {escaped(made_at)}</p></footer></body></html>\n'
    )


def figure(panel: Panel, *, has_heading: bool = True) -> str:
    """Return a picture for wide and for narrow screens, and its numbers."""
    wide, narrow = panel.draw(WIDE), panel.draw(NARROW)
    heading = f"<h3>{escaped(panel.title)}</h3>" if has_heading else ""
    note = f"<figcaption>{escaped(panel.note)}</figcaption>" if panel.note else ""
    numbers = (
        f'<details><summary>Numbers</summary><div class="scroll">{wide.table.to_html()}</div>'
        "</details>"
    )
    return (
        f'{heading}<figure><div class="wide">{wide.svg}</div>'
        f'<div class="narrow">{narrow.svg}</div>{note}</figure>{numbers}'
    )

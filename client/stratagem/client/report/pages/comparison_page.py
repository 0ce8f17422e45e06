"""Writes several runs beside each other as one page of HTML, as one run is."""

from stratagem.client.pictures.drawing.svg import escaped
from stratagem.client.report.comparison import Comparison
from stratagem.client.report.pages.html_document import Section, document, figure


def comparison_page(compared: Comparison, made_at: str) -> str:
    """Return the page of these runs. made_at: when, in words; all else follows from the runs."""
    sections: list[Section] = [
        ("runs", "Runs", f'<div class="scroll">{compared.runs_table.to_html()}</div>'),
        ("jobs", "Where their jobs differ", _differences(compared)),
    ]
    if panels := compared.panels:
        sections.append(("curves", "Curves", "".join(map(figure, panels))))
    names = " · ".join(compared.run_ids)
    header = f"<h1>{escaped(f'{len(compared.runs)} runs')}</h1><p>{escaped(names)}</p>"
    return document(names, header, sections, made_at)


def _differences(compared: Comparison) -> str:
    if not compared.differences:
        return "<p>Their jobs are equal.</p>"
    return f'<div class="scroll">{compared.differences_table.to_html()}</div>'

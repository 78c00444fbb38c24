"""The templates of the pages, and the filters that they use."""

import re
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup, escape

from flashproof.reports import charts, tables, wording
from flashproof.reports.evidence import Machine, size, worst_rho

GENERATOR = "flashproof"  # marks the files that a later site may remove


def render(template: str, **values: Any) -> str:
    """A page."""
    return _templates().get_template(template).render(**values)


def linked(text: str) -> Markup:
    """The text as HTML: web addresses become links, and everything else is escaped."""
    parts = re.split(r"(https?://[^\s<>\"']*[^\s<>\"'.,;:!?)\]])", text)
    return Markup("").join(
        Markup('<a href="{0}">{0}</a>').format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )


def plain(field: object) -> str:
    """A claimed value in words: "yes" or "no", a range of two integers as "1 to 128", a list, or "unknown" for None."""
    if isinstance(field, bool):
        return "yes" if field else "no"
    if isinstance(field, list) and len(field) == 2 and all(isinstance(item, int) for item in field):
        return f"{field[0]} to {field[1]}"
    if isinstance(field, list):
        return ", ".join(str(item) for item in field) or "none"
    return "unknown" if field is None else str(field)


def short_machine(machine: Machine) -> str:
    """The name of a device without its maker: "H200", "EPYC"."""
    words = re.sub(r"^(NVIDIA|AMD|Intel\(R\)|Intel)\s+", "", str(machine)).partition(",")[0]
    return words if len(words) < 14 else words.split()[0]


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flashproof.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": wording.number,
        "rho": wording.rho,
        "scientific": wording.scientific,
        "bytes": wording.bytes_,
        "repeat": wording.repeat_line,
        "where": wording.where,
        "stem": wording.stem,
        "unit": wording.bias_unit,
        "plural": wording.plural,
        "listed": wording.listed,
        "sentence": wording.sentence,
        "plural_of": lambda things, noun: wording.plural(len(things), noun),
        "short_name": wording.short_name,
        "short_machine": short_machine,
        "reason": wording.reason,
        "worst": worst_rho,
        "first_line": lambda text: text.strip().partition("\n")[0],
        "place": charts.places,
        "exceeds": lambda judged: size(judged.rho) > 1,
        "linked": linked,
        "plain": plain,
    }
    environment.globals |= {
        "generator": GENERATOR,
        "titles": wording.TITLES,
        "suites": wording.SUITES,
        "states": tables.STATES,
    }
    return environment

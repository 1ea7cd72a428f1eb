"""The templates of HTML pages. They escape all values: names and reasons are data."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ..config.sitefiles import data_folder
from ..text import printable

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def html_template(name: str) -> Template:
    """Return a template of the package."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(data_folder("templates")),
        autoescape=True,
        finalize=_without_control_characters,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _without_control_characters(value: object) -> object:
    return printable(value) if type(value) is str else value  # not Markup, of a template

"""The Jinja environment of the batch scripts.

A value is never a template. ``{{ }}`` quotes a value for bash, and refuses control characters; only
text marked as `Bash` (ours, the setup, checked directives) is written as it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from jinja2 import (
    ChoiceLoader,
    Environment,
    FileSystemLoader,
    PrefixLoader,
    StrictUndefined,
    Template,
    TemplateError,
    TemplateNotFound,
    TemplateSyntaxError,
)
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..config.sitefiles import data_folder, site_folders
from ..config.trust import check_owners, check_writers
from ..errors import InputError, Position, Problem
from ..text import control_character
from .bash import Bash

SUFFIX = ".sh.j2"


def load_template(name: str, site_folder: Path | None) -> Template:
    """Return the template of the batch scheduler ``name``: the site's own, else the package's.

    The site's may extend ``gpujobs/NAME.sh.j2`` and override its blocks.
    """
    searched = site_folder in site_folders()
    try:
        return _environment(site_folder, searched).get_template(f"{name}{SUFFIX}")
    except TemplateNotFound:
        folder = site_folder or "SITE_FOLDER"
        hint = f"write {folder}/templates/{name}{SUFFIX}"
        raise InputError(f"there is no template {name}{SUFFIX}", hint=hint) from None
    except TemplateSyntaxError as error:
        position = Position(error.filename or name, error.lineno, 1)
        raise InputError(Problem(str(error.message), position)) from None


def fill(template: Template, context: Mapping[str, object]) -> str:
    """Return the script. Raises InputError with the template's line."""
    try:
        text = template.render(context)
    except (TemplateError, ArithmeticError, TypeError, AttributeError, ValueError) as error:
        raise InputError(Problem(f"template: {error}", _position(error, template))) from None
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


class _CheckedLoader(FileSystemLoader):
    """Templates of a site, and files that they include.

    ``searched``: the site's folder is one of the search path.
    """

    def __init__(self, site_folder: Path, searched: bool) -> None:
        super().__init__(site_folder / "templates")
        self._site_folder, self._searched = site_folder, searched

    def get_source(
        self, environment: Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        """Return the source. InputError if other users could have written it."""
        source = super().get_source(environment, template)
        if self._searched:
            check_writers(Path(source[1]), self._site_folder)
        else:
            check_owners(Path(source[1]), self._site_folder)
        return source


@lru_cache(maxsize=8)
def _environment(site_folder: Path | None, searched: bool) -> ImmutableSandboxedEnvironment:
    """Return the environment. It keeps compiled templates until their files change.

    ``searched``: the site's folder is one of the search path.
    """
    ours = FileSystemLoader(data_folder("templates"))
    own = [_CheckedLoader(site_folder, searched)] if site_folder else []
    environment = ImmutableSandboxedEnvironment(
        loader=ChoiceLoader([*own, ours, PrefixLoader({"gpujobs": ours})]),
        undefined=StrictUndefined,
        finalize=_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals = {"bash": Bash}
    return environment


def _position(error: BaseException, template: Template) -> Position:
    """Return the innermost line of a template in the traceback of ``error``."""
    position, traceback = Position(str(template.filename)), error.__traceback__
    while traceback:
        name = traceback.tb_frame.f_code.co_filename
        if name.endswith(".j2"):
            position = Position(name, traceback.tb_lineno, 1)
        traceback = traceback.tb_next
    return position


def _quoted(value: object) -> object:
    """Quote a value for bash; Jinja calls this for every ``{{ }}``."""
    if isinstance(value, Bash | StrictUndefined):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        kind = type(value).__name__
        raise TypeError(f"a template may only write text and whole numbers, not {kind}")
    if found := control_character(value):
        raise ValueError(f"a value has a control character ({found!r})")
    return shlex.quote(value)

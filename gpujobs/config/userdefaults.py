"""The user's defaults for profiles: `$GPUJOBS_ACCOUNT`, and `defaults.yaml` beside their sites."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError, Position
from . import model
from .document import Document, read
from .profile import Environment
from .site import Site
from .trust import check_own

VARIABLE = "GPUJOBS_ACCOUNT"


@dataclass(frozen=True, kw_only=True)
class UserDefaults(model.Model):
    """The file of a user: keys of a profile that do not depend on the program."""

    account: str | None = model.optional(model.WORD, "account, project or bank")
    environment: Environment = model.optional(
        model.Section(Environment, text_key="name"), "as in a profile", default=Environment()
    )
    env: dict[str, str] = model.optional(
        model.Table(model.VARIABLE, model.TEXT), "environment variables", default={}
    )


def defaults_path() -> Path:
    """Return the path of the file, which need not exist."""
    from platformdirs import user_config_path

    return user_config_path("gpujobs") / "defaults.yaml"


def user_defaults(site: Site) -> Document:
    """Return the user's defaults for profiles on ``site``: the variable, laid over the file.

    Without the account if the site has none, and without the name of an environment that it does
    not have: the file is for all sites. Raises InputError if the file is not valid, or if another
    user could have written it.
    """
    document, path = Document({}), defaults_path()
    if os.path.lexists(path):
        check_own(path)
        if path.exists() and not path.is_file():  # a pipe would wait for its writer
            raise InputError(f"{path} is not a file")
        document = read(path)
        named = model.build(UserDefaults, document).environment.name
        if named and named not in site.environment_names:
            document = _without_name(document)
    if account := os.environ.get(VARIABLE):
        own = Document(account, Position(f"${VARIABLE}"))
        document = Document({"account": own}).over(document)
    return document if site.has_accounts else document.without("account")


def _without_name(document: Document) -> Document:
    environment = document.section("environment").without("name")
    return document.having({**document.items, "environment": environment})

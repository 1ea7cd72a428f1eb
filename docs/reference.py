"""Generated parts of the documentation: keys, defaults, help of commands, docstrings, modules.

Each function of `PARTS` returns Markdown, which replaces the comment ``<!-- generated NAME -->`` of
a page when the site is built.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import click

import gpujobs
from gpujobs import errors
from gpujobs.cli.main import main
from gpujobs.config.model import json_schema
from gpujobs.config.profile import Profile
from gpujobs.config.site import Site
from gpujobs.config.sitefiles import data_folder, load_site
from gpujobs.doctor.checks import evidence_path, not_verified, read_evidence
from gpujobs.schedulers import get_scheduler
from gpujobs.schedulers.base import Scheduler

Schema = Mapping[str, Any]

_PACKAGE = Path(gpujobs.__file__).parent
BATCH_SCHEDULERS = ("slurm", "pbs", "torque", "lsf", "sge", "local")
_PROFILE_PAGE = "reference-profile.md"


# -- keys ------------------------------------------------------------------------------------------
def profile_keys() -> str:
    """Return a table for each section of a profile."""
    schema: Schema = json_schema(Profile)
    return _tables(schema, schema["$defs"], elsewhere={})


def site_keys() -> str:
    """Return a table for each section of a site file."""
    schema: Schema = json_schema(Site)
    profile: Schema = json_schema(Profile)
    elsewhere = dict.fromkeys(profile["$defs"], _PROFILE_PAGE) | {"Profile": _PROFILE_PAGE}
    own = {name: part for name, part in schema["$defs"].items() if name not in elsewhere}
    return _tables(schema, own, elsewhere)


def _tables(schema: Schema, parts: Mapping[str, Schema], elsewhere: Mapping[str, str]) -> str:
    sections = [_table(schema, elsewhere)]
    for name, part in parts.items():
        sections.append(f"## {name}\n\n{part['description']}\n\n{_table(part, elsewhere)}")
    return "\n\n".join(sections)


def _table(part: Schema, elsewhere: Mapping[str, str]) -> str:
    rows = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    by_scheduler = _BY_SCHEDULER.get(part["title"], {})
    for name, key in part["properties"].items():
        default = _default(key.get("default"))
        if name in by_scheduler:
            default = f"[by batch scheduler](#{_anchor(by_scheduler[name])})"
        elif name in part.get("anyOf", [part])[0].get("required", ()):
            default = "required"
        cells = (f"`{name}`", _type(key, elsewhere), default, key["description"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _default(value: object) -> str:
    if value in (None, "", [], {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def _type(schema: Schema, elsewhere: Mapping[str, str]) -> str:
    """Return the type of a value in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        anchor = "" if name == "Profile" else f"#{name.lower()}"
        return f"[keys of {name}]({elsewhere.get(name, '')}{anchor})"
    if "anyOf" in schema:
        forms = [_type(form, elsewhere) for form in schema["anyOf"] if form != {"type": "null"}]
        return " or ".join(dict.fromkeys(forms))
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'], elsewhere)}"
    if schema.get("type") == "object":
        return _mapping_type(schema, elsewhere)
    return _plain_type(schema)


def _mapping_type(schema: Schema, elsewhere: Mapping[str, str]) -> str:
    for name in schema.get("properties", ()):
        return "`{append: [...]}`" if name == "append" else f"`{{{name}: NAME}}`"
    return f"mapping of names to {_type(schema['additionalProperties'], elsewhere)}"


def _plain_type(schema: Schema) -> str:
    kinds = schema.get("type", "any")
    if kinds == "integer" and "maximum" in schema:
        return f"number from {schema['minimum']} to {schema['maximum']}"
    words = {"integer": "number", "number": "number", "boolean": "`true`, `false`", "any": "any"}
    word = "text" if "string" in kinds else words[kinds]
    if schema.get("format") == "regex":
        word = "regular expression"
    examples = " or ".join(f"`{example}`" for example in schema.get("examples", ()))
    return f"{word} such as {examples}" if examples else word


# -- defaults that depend on the batch scheduler ---------------------------------------------------
def defaults_by_scheduler() -> str:
    """Return the built-in value of each key whose default depends on the batch scheduler."""
    return "\n\n".join(
        f"### Default of `{key}`\n\n{_rows(value)}" for key, value in _DEFAULTS.items()
    )


def _anchor(key: str) -> str:
    return f"default-of-{key.replace('.', '')}"


def _rows(value: Callable[[type[Scheduler]], str]) -> str:
    rows = [f"| `{name}` | {value(get_scheduler(name))} |" for name in BATCH_SCHEDULERS]
    return "\n".join(["| `scheduler` | Default |", "|---|---|", *rows])


def _lines(lines: tuple[str, ...]) -> str:
    return "<br>".join(f"`{line}`" for line in lines) or "none"


_DEFAULTS: dict[str, Callable[[type[Scheduler]], str]] = {
    "request": lambda scheduler: _lines(scheduler.request),
    "cpu_request": lambda scheduler: _lines(scheduler.cpu_request),
    "account.directive": lambda scheduler: (
        "none" if scheduler.on_this_machine else f"`{scheduler.account_directive}`"
    ),
    "visible_devices": lambda scheduler: (
        f"`{scheduler.visible_devices}`" if scheduler.visible_devices else "must be set"
    ),
    "mpi.command": lambda scheduler: f"`[{', '.join(scheduler.mpi_command)}]`",
    "node_launcher": lambda scheduler: f"`[{', '.join(scheduler.node_launcher)}]`",
    "max_array_size": lambda scheduler: (
        f"{'its own limit, else ' if _asks_for_limit(scheduler) else ''}{scheduler.largest_array}"
    ),
    "cluster": lambda scheduler: "none" if scheduler.multi_cluster else "not supported",
}
_BY_SCHEDULER = {
    "Site": {name: name for name in _DEFAULTS},
    "Account": {"directive": "account.directive"},
    "Mpi": {"command": "mpi.command"},
}
"""The tables of which keys refer to a default of each batch scheduler, by section and key."""


def _asks_for_limit(scheduler: type[Scheduler]) -> bool:
    return scheduler().limit_command() is not None


# -- commands and docstrings -----------------------------------------------------------------------
def command_help() -> str:
    """Return the output of --help of every command."""
    context = click.Context(main, info_name="gpujobs", terminal_width=90, **main.context_settings)
    return "\n\n".join(_helps(context))


def _helps(context: click.Context) -> Iterator[str]:
    command = context.command
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _helps(click.Context(inner, context, name))


def python_api() -> str:
    """Return directives of autodoc for every public name of `gpujobs`, and for its errors."""
    functions, classes = [], []
    for name in gpujobs.__all__:
        if inspect.isclass(value := getattr(gpujobs, name)):
            classes.append(_autodoc("autoclass", f"gpujobs.{name}", f"## `{name}`", _MEMBERS))
        elif callable(value):
            functions.append(_autodoc("autofunction", f"gpujobs.{name}", f"## `{name}()`"))
    documented = [_autodoc("automodule", errors.__name__, "## Errors", _ERROR_MEMBERS)]
    return "\n\n".join(functions + classes + documented)


_MEMBERS = (":members:", ":inherited-members: JobQueueCluster")
_ERROR_MEMBERS = (":members:", ":show-inheritance:")


def _autodoc(directive: str, name: str, heading: str, options: tuple[str, ...] = ()) -> str:
    lines = [f".. {directive}:: {name}", *(f"   {option}" for option in options)]
    return "\n".join([heading, "", "```{eval-rst}", *lines, "```"])


# -- included sites --------------------------------------------------------------------------------
_PATTERNS = ("environment_variables", "hostnames", "cluster_names")
"""Keys by which a site is selected on its own hosts."""


def included_sites() -> str:
    """Return a table of the site files of real machines in the package."""
    files = sorted(data_folder("site_configs").glob("*.yaml"))
    rows = [
        _site_row(file) for file in files if file.stem != "local" and "example-" not in file.stem
    ]
    header = "| Site | Machine | Batch scheduler | Selected by | Not verified | Source |"
    return "\n".join([header, "|---|---|---|---|---|---|", *rows])


def _site_row(file: Path) -> str:
    site, marked = load_site(str(file)).site, not_verified(file, read_evidence(evidence_path(file)))
    link = f"[{file.stem}](../site_configs/{file.name})"
    source = re.sub(
        r"(https?://)(github\.com/[^\s;,]+|[^\s;,/]+)([^\s;,]*)", r"[\2](\1\2\3)", site.source or ""
    )
    selected = ", ".join(f"`{name}`" for name in _PATTERNS if getattr(site, name)) or "`--site`"
    cells = (link, site.description, f"`{site.scheduler}`", selected, str(marked), source)
    return f"| {' | '.join(cells)} |"


def verified_sites(folder: Path | None = None) -> str:
    """Return a table of the site files in ``folder`` (default: of the package) with a record."""
    rows = []
    for path in sorted((folder or data_folder("site_configs")).glob("*.yaml")):
        if found := read_evidence(evidence_path(path)):
            gpus, rates = (
                ", ".join(found.gpus),
                "; ".join(f"{k}: {v}" for k, v in found.rates.items()),
            )
            cells = (path.stem, found.date, found.gpujobs, found.scheduler, gpus, rates)
            rows.append(f"| {' | '.join((*cells, ', '.join(found.failed) or 'nothing'))} |")
    header = "| Site | Verified on | By gpujobs | Batch scheduler | GPUs | Transport | Failed |"
    return "\n".join([header, "|---|---|---|---|---|---|---|", *rows]) if rows else "None yet."


# -- modules ---------------------------------------------------------------------------------------
def modules() -> str:
    """Return a table of the modules of each room, in the order of their imports."""
    rooms = sorted(path.parent for path in _PACKAGE.glob("*/__init__.py"))
    return "\n\n".join(
        f"### `{room.name}/`\n\n| Module | Content |\n|---|---|\n{_module_rows(room)}"
        for room in rooms
    )


def _module_rows(room: Path) -> str:
    trees = {
        path.stem: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(room.glob("*.py"))
        if not path.stem.startswith("__")
    }
    imports = {
        name: {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module in trees
        }
        for name, tree in trees.items()
    }
    lines = []
    for name in TopologicalSorter(imports).static_order():
        summary = (ast.get_docstring(trees[name]) or "").partition("\n\n")[0]
        lines.append(f"| `{name}.py` | {' '.join(summary.split()).replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "profile-keys": profile_keys,
    "site-keys": site_keys,
    "built-in-defaults": defaults_by_scheduler,
    "command-help": command_help,
    "python-api": python_api,
    "modules": modules,
    "included-sites": included_sites,
    "verified-sites": verified_sites,
}
"""The parts by the name in the comment."""

"""Templates of a site extend those of gpujobs, and override their blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.cli import STUB, Cli, text_of
from ..support.processes import until

SITE = {"description": "x", "scheduler": "local", "queues": {"local": {}}, "setup": f"export PYTHONPATH={STUB}"}  # fmt: skip
TEMPLATE = """{% extends "gpujobs/local.sh.j2" %}
{% block directives %}
{{ bash(super()) }}
# lines of the site, for {{ name }}
{% endblock %}
{% block environment %}
{{ bash(super()) }}
export OF_SITE="block of the site"
{% endblock %}
{% block epilogue %}
    echo "exit code $code" > "$HOME/epilogue"
{% endblock %}
"""
PROFILE = {
    "gpus": 0,
    "workers": {"count": 1},
    "run": ["python", "-c", "import os; print(os.environ['OF_SITE'])"],
}


@pytest.fixture
def cli(home: Path) -> Cli:
    made = Cli(home, {"GPUJOBS_SITE_PATH": str(home / "sites"), "GPUJOBS_SITE": "here"})
    (home / "sites" / "templates").mkdir(parents=True)
    (home / "sites" / "here.yaml").write_text(text_of(SITE))
    return made


def test_blocks_of_a_site_are_in_the_script_and_run(cli: Cli) -> None:
    (cli.home / "sites" / "templates" / "local.sh.j2").write_text(TEMPLATE)
    cluster = cli.submit(PROFILE, "--wait")
    assert cli("logs", cluster).stdout == "block of the site\n"
    until((cli.home / "epilogue").exists, 10)
    assert (cli.home / "epilogue").read_text() == "exit code 0\n"
    script = cli("render", str(cli.work / "p.yaml")).stdout
    assert script.index("#LOCAL --name=p-") < script.index("# lines of the site, for p-")


def test_an_error_names_the_line(cli: Cli) -> None:
    path = cli.home / "sites" / "templates" / "local.sh.j2"
    path.write_text(TEMPLATE.replace("{{ name }}", "{{ names }}"))
    done = cli("render", str(cli.write("p.yaml", PROFILE)))
    assert done.returncode == 2
    assert f"{path}:4:1: template: 'names' is undefined" in done.stderr


def test_a_template_that_others_can_write_is_not_used(cli: Cli) -> None:
    path = cli.home / "sites" / "templates" / "local.sh.j2"
    path.write_text(TEMPLATE)
    path.chmod(0o666)
    done = cli("render", str(cli.write("p.yaml", PROFILE)))
    assert done.returncode == 2
    assert f"{path} is not used: {path} is writable by all users" in done.stderr

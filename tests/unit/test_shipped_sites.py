"""The site files of real machines that are included in gpujobs."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.cli.main import main
from gpujobs.config.sitefiles import load_site, site_of_this_host

from ..support.cli import ROOT
from ..support.each import each

FILES = [
    file
    for file in sorted((ROOT / "site_configs").glob("*.yaml"))
    if file.stem != "local" and "example-" not in file.stem
]
WITHOUT_CONTACT = {
    "biocloud",
    "bruno",
    "dkfz",
    "lengau",
    "lilac",
    "miyabi",
    "neuron",
    "nus-atlas",
    "padum",
    "sanger",
    "sdumont",
    "seadragon",
    "stjude",
    "taiwania2",
}
"""Their sources name no address for questions."""


@each("file", FILES, ids=lambda file: file.stem)
def test_it_says_where_it_is_from(file: Path) -> None:
    site = load_site(str(file)).site
    assert re.search(r"https?://", site.source or ""), "the address of the source"
    assert re.search(r"\b20\d\d-\d\d\b", site.source or ""), "the date of the source"
    assert bool(site.contact) != (file.stem in WITHOUT_CONTACT)
    assert site.defaults.get("walltime"), "a plan without a walltime fails on many sites"


@each("file", FILES, ids=lambda file: file.stem)
def test_marks_are_comments_of_the_expected_form(file: Path) -> None:
    """A mark that is spelled in another way would not be counted."""
    for line in file.read_text().splitlines():
        found = re.search(r"(?i)not[ -]verified|unverified", line)
        assert not found or re.search(r"# not verified(:|$)", line), line
        assert "missing:" not in line or re.search(r"# missing: \S", line), line


@each("file", FILES, ids=lambda file: file.stem)
def test_no_source_permits_unencrypted_traffic(file: Path) -> None:
    """Listing ucxx says that a site permits it. A source that does is to be named in the line."""
    lines = [line for line in file.read_text().splitlines() if "ucxx" in line.partition("#")[0]]
    for line in lines:
        assert re.search(r"# not verified: .*\bprotocols\b", line), line


def test_there_are_110_of_all_families() -> None:
    schedulers = [load_site(str(file)).site.scheduler for file in FILES]
    assert len(schedulers) >= 110
    assert {"slurm", "pbs", "lsf", "sge"} == set(schedulers)


def test_no_two_match_the_same_hosts() -> None:
    patterns = [p for file in FILES for p in load_site(str(file)).site.hostnames]
    assert len(patterns) == len(set(patterns))
    for host in ("login1", "login01.cluster.example.org", "node1", "localhost"):
        assert not [p for p in patterns if re.fullmatch(p, host)], host


@each(
    ("host", "name"),
    [
        ("daint-ln002", "daint"),
        ("mahti-login11.mahti.csc.fi", "mahti"),
        ("login2.vista.tacc.utexas.edu", "vista"),
    ],
)
def test_a_login_node_selects_its_site(
    host: str, name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert site_of_this_host() == name


def test_the_list_shows_the_lines_that_are_not_verified(home: Path) -> None:
    lines = CliRunner().invoke(main, ["sites", "list"]).stdout.splitlines()
    marked = (ROOT / "site_configs" / "jean-zay.yaml").read_text().count("# not verified")
    assert [line for line in lines if re.match(rf"jean-zay +slurm +{marked} +/", line)]
    listed = json.loads(CliRunner().invoke(main, ["sites", "list", "--json"]).stdout)["sites"]
    found = {item["name"]: item["not_verified"] for item in listed}
    for file in FILES:
        assert found[file.stem] == file.read_text().count("# not verified")
    assert found["pitzer"] == 0 and found["jean-zay"] > 0

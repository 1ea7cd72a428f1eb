"""Site files that are found by name or host run bash text as the user: no other user may write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpujobs.config.sitefiles import NoSiteHereError, load_site, site_of_this_host
from gpujobs.errors import InputError

SITE = "description: x\nscheduler: local\nhostnames: ['.*']\nqueues: {local: {}}\n"
OTHER, OTHERS_GROUP = 65534, 31  # nobody; a group that is not private
as_root = pytest.mark.skipif(os.getuid() != 0, reason="chown needs root")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUJOBS_SITE_PATH", str(tmp_path / "sites"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "sites").mkdir(mode=0o755)
    path = tmp_path / "sites" / "here.yaml"
    path.write_text(SITE)
    path.chmod(0o644)
    return path


def refusal() -> str:
    """Return why the site is refused by its name, and check that no host name finds it."""
    with pytest.raises(InputError) as caught:
        load_site("here")
    with pytest.raises(NoSiteHereError):
        site_of_this_host()
    return str(caught.value)


def test_a_site_that_only_its_owner_can_write(site: Path) -> None:
    assert load_site("here").path == site
    assert site_of_this_host() == "here"


def test_a_file_that_all_can_write(site: Path) -> None:
    site.chmod(0o646)
    assert f"{site} is not used: {site} is writable by all users" in refusal()
    assert load_site(str(site)).path == site  # a path is the user's own choice


def test_a_folder_that_all_can_write(site: Path) -> None:
    site.parent.chmod(0o757)
    found = refusal()
    assert f"{site.parent} is writable by all users" in found
    assert f"chmod go-w {site.parent}" in found


def test_a_link_to_a_file_that_all_can_write(site: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.yaml"
    target.write_text(SITE)
    target.chmod(0o666)
    site.unlink()
    site.symlink_to(target)
    assert f"{target} is writable by all users" in refusal()


@as_root
def test_a_group_that_can_write(site: Path) -> None:
    os.chown(site, OTHER, OTHERS_GROUP)
    site.chmod(0o664)
    assert "is writable by group" in refusal()
    os.chown(site, 0, OTHERS_GROUP)  # the group of the administrators
    assert load_site("here")


@as_root
def test_a_file_that_another_user_has_added(site: Path) -> None:
    site.parent.chmod(0o1777)
    assert load_site("here")
    os.chown(site, OTHER, OTHER)
    assert "belongs to user nobody" in refusal()


def test_a_file_that_is_extended(site: Path, tmp_path: Path) -> None:
    (site.parent / "base.yaml").write_text(SITE)
    (site.parent / "base.yaml").chmod(0o666)
    site.write_text("extends: base\n")
    assert "base.yaml is writable by all users" in refusal()

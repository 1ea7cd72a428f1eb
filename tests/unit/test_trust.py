"""Site files that are found by name or host run bash text as the user: no other user may write or replace them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from gpujobs.config.sitefiles import NoSiteHereError, load_site, site_of_this_host
from gpujobs.errors import InputError
from gpujobs.planning.render import fill, load_template

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


def test_a_site_that_only_its_owner_can_write_is_used(site: Path) -> None:
    assert load_site("here").path == site
    assert site_of_this_host() == "here"


def test_a_file_that_all_can_write_is_not_used(site: Path) -> None:
    site.chmod(0o646)
    assert f"{site} is not used: {site} is writable by all users" in refusal()
    assert load_site(str(site)).path == site  # a path is the user's own choice


def test_a_file_in_a_folder_that_all_can_write_is_not_used(site: Path) -> None:
    site.parent.chmod(0o757)
    found = refusal()
    assert f"{site.parent} is writable by all users" in found
    assert f"chmod go-w {site.parent}" in found


def test_a_link_to_a_file_that_all_can_write_is_not_used(site: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.yaml"
    target.write_text(SITE)
    target.chmod(0o666)
    site.unlink()
    site.symlink_to(target)
    assert f"{target} is writable by all users" in refusal()


@as_root
def test_a_file_that_a_group_can_write_is_not_used(site: Path) -> None:
    os.chown(site, OTHER, OTHERS_GROUP)
    os.chown(site.parent, OTHER, OTHERS_GROUP)
    site.chmod(0o664)
    assert "is writable by group" in refusal()
    os.chown(site, 0, OTHERS_GROUP)  # the group of the administrators
    assert load_site("here")


@as_root
def test_a_folder_of_root_that_a_group_of_the_user_can_write_is_not_used(site: Path) -> None:
    os.chown(site.parent, 0, OTHERS_GROUP)
    site.parent.chmod(0o2775)
    assert load_site("here")
    groups = os.getgroups()
    os.setgroups([*groups, OTHERS_GROUP])  # now it is a project's
    try:
        assert f"{site.parent} is writable by group" in refusal()
    finally:
        os.setgroups(groups)


@as_root
def test_a_file_that_another_user_has_added_is_not_used(site: Path) -> None:
    site.parent.chmod(0o1777)
    assert load_site("here")
    os.chown(site, OTHER, OTHER)
    assert "belongs to user nobody" in refusal()


def test_a_file_that_extends_one_that_all_can_write_is_not_used(site: Path, tmp_path: Path) -> None:
    (site.parent / "base.yaml").write_text(SITE)
    (site.parent / "base.yaml").chmod(0o666)
    site.write_text("extends: base\n")
    assert "base.yaml is writable by all users" in refusal()


@pytest.mark.parametrize("name", ["../base.yaml", "{tmp_path}/base.yaml"])
def test_a_file_that_extends_a_path_that_all_can_write_is_not_used(
    site: Path, tmp_path: Path, name: str
) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(SITE)
    base.chmod(0o666)
    site.write_text(f"extends: {name.format(tmp_path=tmp_path)}\n")
    assert "base.yaml is writable by all users" in refusal()
    assert load_site(str(site))  # the user's own path, and so is all that it names
    base.chmod(0o644)
    assert load_site("here")


def test_a_file_below_a_folder_that_all_can_write_is_not_used(site: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert f"{site} is not used: {tmp_path} is writable by all users" in refusal()
    tmp_path.chmod(0o1777)  # others cannot replace an entry of the user's
    assert load_site("here")


@as_root
def test_a_folder_of_another_user_in_a_sticky_folder_is_not_used(
    site: Path, tmp_path: Path
) -> None:
    os.chown(site.parent, OTHER, OTHER)
    os.chown(site, OTHER, OTHER)
    assert load_site("here")  # the folder is an administrator's
    tmp_path.chmod(0o1777)
    assert f"{site.parent} belongs to user nobody" in refusal()


@as_root
def test_a_file_below_a_folder_of_another_user_is_not_used(site: Path, tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER, OTHER)
    assert f"{tmp_path} belongs to user nobody" in refusal()
    os.chown(site.parent, OTHER, OTHER)
    assert load_site("here")


@as_root
def test_the_link_of_another_user_is_not_followed(site: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "here.yaml").write_text(SITE)
    site.unlink()
    site.symlink_to(evil / "here.yaml")
    os.chown(site, OTHER, OTHER, follow_symlinks=False)
    site.parent.chmod(0o1777)
    assert f"{site} belongs to user nobody" in refusal()
    os.chown(site, 0, 0, follow_symlinks=False)
    assert load_site("here")
    os.chown(evil / "here.yaml", OTHER, OTHER)
    assert "here.yaml belongs to user nobody" in refusal()
    os.chown(evil, OTHER, OTHER)
    assert f"{evil} belongs to user nobody" in refusal()


@as_root
def test_a_link_of_another_user_in_the_middle_of_a_link_is_not_followed(
    site: Path, tmp_path: Path
) -> None:
    """`sites/here.yaml` → `../open/hop/../real/here.yaml`, where `hop` is the link of another user."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    (tmp_path / "real").mkdir()
    (tmp_path / "elsewhere").mkdir()
    site.rename(tmp_path / "real" / "here.yaml")
    site.symlink_to("../open/hop/../real/here.yaml")
    hop = tmp_path / "open" / "hop"
    hop.symlink_to("../elsewhere")
    assert load_site("here")
    os.chown(hop, OTHER, OTHER, follow_symlinks=False)
    assert f"{hop} belongs to user nobody" in refusal()


def test_a_folder_that_is_a_link_is_judged_by_its_target(site: Path, tmp_path: Path) -> None:
    site.parent.rename(tmp_path / "real")
    site.parent.symlink_to("real", target_is_directory=True)
    assert load_site("here")
    (tmp_path / "real").chmod(0o777)
    assert f"{tmp_path / 'real'} is writable by all users" in refusal()


def test_a_relative_folder_is_judged_by_those_above_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(site.parent)
    monkeypatch.setenv("GPUJOBS_SITE_PATH", "../sites")
    assert load_site("here")
    site.parent.parent.chmod(0o777)
    assert f"{site.parent.parent} is writable by all users" in refusal()


@as_root
def test_a_setgid_folder_of_an_administrator_is_used_unless_its_group_can_write(site: Path) -> None:
    for place in (site, site.parent):
        os.chown(place, OTHER, OTHERS_GROUP)
    site.parent.chmod(0o2755)
    assert load_site("here")
    site.parent.chmod(0o2775)
    assert f"{site.parent} is writable by group" in refusal()


def test_a_folder_that_an_access_control_list_opens_is_not_used(site: Path) -> None:
    try:
        os.setxattr(site.parent, "system.posix_acl_access", access_list(OTHER))
    except OSError:
        pytest.skip("the file system has no access control lists")
    assert "is writable by users or groups of its access control list" in refusal()
    site.parent.chmod(0o755)  # which is its mask
    assert load_site("here")


def access_list(user: int) -> bytes:
    """Return the list `u::rwx,u:USER:rwx,g::r-x,m::rwx,o::r-x` as the kernel stores it."""
    anyone = 0xFFFFFFFF
    entries = [(1, 7, anyone), (2, 7, user), (4, 5, anyone), (16, 7, anyone), (32, 5, anyone)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def test_a_link_that_leads_nowhere_is_an_error(site: Path) -> None:
    site.unlink()
    site.symlink_to("missing.yaml")
    assert "does not lead to a file" in refusal()


@pytest.fixture
def template(site: Path) -> Path:
    """A template of the site that includes another file."""
    folder = site.parent / "templates" / "parts"
    folder.mkdir(parents=True)
    (folder / "part.txt").write_text("# of the site\n")
    path = folder.parent / "local.sh.j2"
    path.write_text('{% include "parts/part.txt" %}\n')
    return path


def filled(template: Path) -> str:
    return fill(load_template("local", template.parents[1]), {})


def test_a_template_that_all_can_write_is_not_used(template: Path) -> None:
    assert filled(template) == "# of the site\n"
    part = template.parent / "parts" / "part.txt"
    part.write_text("# of others\n")
    part.chmod(0o666)
    with pytest.raises(InputError, match=f"{part} is not used: {part} is writable by all users"):
        filled(template)


@as_root
def test_the_folder_of_templates_of_another_user_is_not_used(template: Path) -> None:
    for place in (template.parent, template):
        os.chown(place, OTHER, OTHER)
    template.parents[1].chmod(0o1777)
    with pytest.raises(InputError, match=f"{template.parent} belongs to user nobody"):
        filled(template)


def test_templates_beside_a_path_of_the_user_are_used(template: Path, tmp_path: Path) -> None:
    folder = template.parents[1].rename(tmp_path / "own")
    folder.chmod(0o777)
    assert fill(load_template("local", folder), {}) == "# of the site\n"


@as_root
@pytest.mark.parametrize(
    "place", ["templates", "templates/local.sh.j2", "templates/parts/part.txt"]
)
def test_templates_that_another_user_has_added_beside_a_path_are_not_used(
    template: Path, tmp_path: Path, place: str
) -> None:
    folder = template.parents[1].rename(tmp_path / "own")
    folder.chmod(0o1777)
    os.chown(folder / place, OTHER, OTHER)
    with pytest.raises(InputError, match=f"{folder / place} belongs to user nobody"):
        fill(load_template("local", folder), {})
    os.chown(folder, OTHER, OTHER)  # the user trusts who owns it
    assert fill(load_template("local", folder), {}) == "# of the site\n"

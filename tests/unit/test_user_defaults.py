"""`$GPUJOBS_ACCOUNT` and `defaults.yaml`: below the profile, above the site."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpujobs.cli.plan_text import origins_text
from gpujobs.clusters.remote import Request
from gpujobs.config.document import Document
from gpujobs.config.spec import ClusterSpec, make_spec
from gpujobs.doctor.sitereport import check_offline
from gpujobs.errors import InputError
from gpujobs.planning.plan import make_plan

from ..support.cli import text_of

SITE: dict[str, object] = {
    "description": "x",
    "scheduler": "slurm",
    "queues": {"gpu": {"gpus_per_node": 4, "cpus_per_node": 8, "memory_per_node": "64GiB", "env": {"B": "queue"}}},
    "environments": {"rapids": {"python": "/r/bin/python"}, "old": {"python": "/o/bin/python"}},
    "defaults": {"walltime": "1h", "account": "of_site", "env": {"A": "site", "B": "site"}},
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("GPUJOBS_ACCOUNT", raising=False)
    (tmp_path / "config" / "gpujobs").mkdir(parents=True)
    return tmp_path


def write(home: Path, **keys: object) -> Path:
    path = home / "config" / "gpujobs" / "defaults.yaml"
    path.write_text(text_of(keys))
    path.chmod(0o600)
    return path


def spec(home: Path, site: object = SITE, **profile: object) -> ClusterSpec:
    (home / "s.yaml").write_text(text_of(site))
    document = Document({"gpus": 1, "name": "svd", **profile}, source="p.yaml")
    return make_spec(document, site=str(home / "s.yaml"))


def test_the_profile_comes_before_the_variable_before_the_file_before_the_site(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = [spec(home).profile.account]
    write(home, account="of_file")
    accounts.append(spec(home).profile.account)
    monkeypatch.setenv("GPUJOBS_ACCOUNT", "of_variable")
    accounts.append(spec(home).profile.account)
    accounts.append(spec(home, account="of_profile").profile.account)
    assert accounts == ["of_site", "of_file", "of_variable", "of_profile"]


def test_plan_shows_where_each_value_is_from(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(home, env={"A": "user"})
    monkeypatch.setenv("GPUJOBS_ACCOUNT", "p1")
    found = spec(home)
    text = origins_text(found, make_plan(found, python="python"))
    assert 'account: "p1"  # $GPUJOBS_ACCOUNT\n' in text
    assert f'A: "user"  # {path}:3\n' in text
    assert f'B: "site"  # {home}/s.yaml:' in text


def test_variables_of_the_user_come_before_those_of_a_queue(home: Path) -> None:
    write(home, env={"B": "user"})
    (jobs,) = make_plan(spec(home), python="python").all_jobs
    assert jobs.profile.env == {"A": "site", "B": "user"}


def test_an_environment_that_the_site_does_not_have_is_left_out(home: Path) -> None:
    write(home, environment="rapids")
    assert spec(home).profile.environment.name == "rapids"
    assert spec(home, environment="old").profile.environment.name == "old"
    assert spec(home, environment={"python": "/p"}).profile.environment.name is None
    assert spec(home, {**SITE, "environments": {}}).profile.environment.name is None
    write(home, environment={"python": "/mine"})
    assert spec(home, {**SITE, "environments": {}}).profile.environment.python == "/mine"
    write(home, environment={"python": "/mine", "setup": "source mine"})
    named = spec(home, environment="old").profile.environment
    assert (named.name, named.python, named.setup) == ("old", None, "")


def test_an_account_is_not_passed_to_a_site_without_accounts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUJOBS_ACCOUNT", "p1")
    site = {"description": "x", "scheduler": "local", "queues": {"local": {}}}
    assert spec(home, site).profile.account is None
    assert spec(home, {**SITE, "account": None, "defaults": {}}).profile.account is None


def test_other_keys_are_refused_at_their_line(home: Path) -> None:
    path = write(home, account="p1", run=["rm"])
    with pytest.raises(InputError) as caught:
        spec(home)
    assert f"{path}:3:" in str(caught.value) and "unknown key `run`" in str(caught.value)


def test_a_check_of_a_site_does_not_depend_on_the_user(home: Path) -> None:
    write(home, environment={"setup": "if then"}, account="no such")
    (home / "s.yaml").write_text(text_of(SITE))
    assert check_offline(str(home / "s.yaml")).correct


def test_a_file_that_another_user_could_have_written_is_refused(home: Path) -> None:
    path = write(home, account="evil")
    for mode, folder_mode in ((0o666, 0o700), (0o600, 0o777)):
        path.chmod(mode)
        path.parent.chmod(folder_mode)
        with pytest.raises(InputError, match=r"is not used: .* is writable by all users"):
            spec(home)
    path.parent.chmod(0o700)
    other = home / "other.yaml"
    other.write_text("account: evil\n")
    other.chmod(0o666)
    path.unlink()
    path.symlink_to(other)
    with pytest.raises(InputError, match=r"is not used: .* is writable by all users"):
        spec(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_the_owner_of_the_folder_is_not_trusted(home: Path) -> None:
    path = write(home, account="evil")
    for place in (path, path.parent):
        os.chown(place, 65534, 65534)
    with pytest.raises(InputError, match="belongs to user nobody"):
        spec(home)


def test_a_link_that_leads_nowhere_is_reported(home: Path) -> None:
    (home / "config" / "gpujobs" / "defaults.yaml").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"defaults\.yaml is not used: No such file"):
        spec(home)


def test_a_pipe_is_refused_and_not_waited_for(home: Path) -> None:
    os.mkfifo(home / "config" / "gpujobs" / "defaults.yaml", 0o600)
    with pytest.raises(InputError, match="is not a file"):
        spec(home)


def test_the_account_goes_to_a_login_node_the_file_does_not(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, account="of_file")
    assert Request(["status"]).env == {}
    monkeypatch.setenv("GPUJOBS_ACCOUNT", "p1")
    assert (Request(["status"]).env, Request(["status"]).files) == ({"GPUJOBS_ACCOUNT": "p1"}, {})

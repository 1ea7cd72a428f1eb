"""Environments by name: what a site offers, and what a profile adds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gpujobs.clusters.prepare import scripts_of
from gpujobs.config.document import Document
from gpujobs.config.sitefiles import load_site
from gpujobs.config.spec import ClusterSpec, make_spec
from gpujobs.deploy.keywords import spec_of
from gpujobs.doctor.sitereport import check_offline
from gpujobs.errors import InputError
from gpujobs.injob.gpus import supports
from gpujobs.planning.plan import Plan, make_plan

from ..support import each as support_each
from ..support.cli import text_of

ENVIRONMENTS: dict[str, object] = {
    "rapids": {
        "description": "RAPIDS",
        "setup": "module load rapids",
        "python": "/r/bin/python",
        "gpu": 13,
    },
    "old": {"python": "/o/bin/python", "gpu": "12.2"},
    "image": {"container": {"runtime": "apptainer", "image": "/images/r.sif"}},
}
QUEUE = {"gpus_per_node": 4, "cpus_per_node": 8, "memory_per_node": "64GiB"}
SITE: dict[str, object] = {
    "description": "x",
    "scheduler": "slurm",
    "queues": {
        "old": {**QUEUE, "driver_cuda": 12.4},
        "new": {**QUEUE, "driver_cuda": "13.0"},
        "any": QUEUE,
    },
    "environments": ENVIRONMENTS,
    "defaults": {"walltime": "1h"},
}


def each(
    names: tuple[str, ...], table: Mapping[str, object]
) -> Callable[[support_each.Test], support_each.Test]:
    """Return `each` of the rows of a table, by their titles."""
    rows = [row if isinstance(row, tuple) else (row,) for row in table.values()]
    return support_each.each(names, [pytest.param(*row) for row in rows], ids=list(table))


PROFILE: dict[str, object] = {"gpus": 1, "name": "svd"}


def spec(folder: Path, profile: object, site: object = SITE) -> ClusterSpec:
    path = folder / "s.yaml"
    path.write_text(text_of(site))
    return make_spec(Document({**PROFILE, **dict(profile)}, source="p.yaml"), site=str(path))  # type: ignore[call-overload]


def planned(folder: Path, profile: object, site: object = SITE) -> Plan:
    return make_plan(spec(folder, profile, site), python="/own/python")


def problem(folder: Path, profile: object, site: object = SITE) -> str:
    with pytest.raises(InputError) as caught:
        planned(folder, profile, site)
    return str(caught.value)


def with_site(**keys: object) -> dict[str, object]:
    return {**SITE, **keys}


def test_an_environment_that_is_neither_a_name_nor_keys_is_refused(tmp_path: Path) -> None:
    profile = {"environment": ["rapids"]}
    assert "`environment` must be a name, or a mapping of keys" in problem(tmp_path, profile)


def test_a_name_gives_setup_and_python_of_the_site(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"environment": "rapids", "queue": "any"})
    (jobs,) = plan.all_jobs
    assert jobs.python == "/r/bin/python"
    script = scripts_of(
        spec(tmp_path, {"environment": "rapids", "queue": "any"}), plan, "svd-0000"
    )[0].text
    assert (
        "# of the environment rapids of the site, and of the profile\nmodule load rapids\n"
        in script
    )
    assert "--cuda=13" in script


@each(
    ("environment", "python", "setup"),
    {
        "text": ("rapids", "/r/bin/python", "module load rapids\n"),
        "name": ({"name": "rapids"}, "/r/bin/python", "module load rapids\n"),
        "setup is added": ({"name": "rapids", "setup": "export A=1"}, "/r/bin/python", "module load rapids\nexport A=1\n"),
        "python is its own": ({"name": "rapids", "python": "/p"}, "/p", "module load rapids\n"),
        "no name": ({"python": "/p"}, "/p", ""),
        "an image": ("image", "python3", ""),
    },
)  # fmt: skip
def test_other_keys_add_to_a_name(
    environment: object, python: str, setup: str, tmp_path: Path
) -> None:
    (jobs,) = planned(tmp_path, {"environment": environment, "queue": "any"}).all_jobs
    assert (jobs.python, jobs.profile.environment.setup) == (python, setup)


def test_each_group_has_an_environment_of_its_own(tmp_path: Path) -> None:
    groups = {
        "a": {"gpus": 1},
        "b": {"gpus": 1, "environment": "old"},
        "c": {"gpus": 0, "environment": {"python": "/c"}},
    }
    profile = {"gpus": None, "environment": "rapids", "groups": groups, "queue": "any"}
    del profile["gpus"]
    path = tmp_path / "s.yaml"
    path.write_text(text_of(SITE))
    made = make_plan(make_spec(Document({**profile, "name": "x"}), site=str(path)), python="python")
    assert [jobs.python for jobs in made.groups] == ["/r/bin/python", "/o/bin/python", "/c"]


@each(
    ("own", "python"),
    {
        "nothing": ({}, "/r/bin/python"),
        "a setup": ({"environment": {"setup": "export A=1"}}, "/r/bin/python"),
        "another name": ({"environment": "old"}, "/o/bin/python"),
        "a python": ({"environment": {"python": "/p"}}, "/p"),
        "none": ({"environment": {"name": None}}, "/own/python"),
    },
)
def test_the_default_of_the_site_counts_unless_the_profile_chooses(
    own: object, python: str, tmp_path: Path
) -> None:
    site = with_site(defaults={"walltime": "1h", "environment": "rapids", "queue": "any"})
    (jobs,) = planned(tmp_path, own, site).all_jobs
    assert jobs.python == python
    chosen = dict(own).get("environment")  # type: ignore[call-overload]
    assert ("module load" in jobs.profile.environment.setup) is (
        chosen in (None, {"setup": "export A=1"})
    )


@each(
    ("profile", "message"),
    {
        "unknown": (
            {"environment": "rapid"},
            "site s has no environment rapid: it has image, old, rapids",
        ),
        "bash": ({"environment": "module load x"}, "bash text is `environment: {setup: …}`"),
        "path": ({"environment": "/home/me/venv"}, "a Python `environment: {python: …}`"),
        "driver": (
            {"environment": "rapids", "queue": "old"},
            "its driver supports CUDA 12.4; environment rapids needs 13",
        ),
    },
)
def test_a_wrong_name_is_an_error_with_its_cure(
    profile: object, message: str, tmp_path: Path
) -> None:
    assert message in problem(tmp_path, profile)


@each(
    ("environment", "queue"),
    {
        "too new for the first": ("rapids", "new"),
        "old enough": ("old", "old"),
        "states none": ("image", "old"),
    },
)
def test_auto_takes_a_queue_whose_driver_supports_the_environment(
    environment: str, queue: str, tmp_path: Path
) -> None:
    assert planned(tmp_path, {"environment": environment}).groups[0].queue_key == queue


def test_cpu_workers_need_no_driver(tmp_path: Path) -> None:
    profile = {"gpus": 0, "environment": "rapids", "queue": "old"}
    assert planned(tmp_path, profile).groups[0].queue_key == "old"


@each(
    ("environment", "message"),
    {
        "none": (None, "site s allows its own environments only"),
        "python": ({"name": "old", "python": "/p"}, "not a `python` of the profile"),
        "setup": ({"name": "old", "setup": "module load x"}, "not a `setup` of the profile"),
        "container": (
            {"name": "old", "container": {"image": "docker://evil/x"}},
            "not a `container` of the profile",
        ),
        "python alone": ({"python": "/p"}, "site s allows its own environments only"),
    },
)
def test_a_site_may_allow_its_own_environments_only(
    environment: object, message: str, tmp_path: Path
) -> None:
    site = with_site(environments_only=True)
    profile = {"environment": environment} if environment else {}
    assert message in problem(tmp_path, profile, site)
    assert planned(tmp_path, {"environment": "old"}, site).groups[0].python == "/o/bin/python"


def test_a_group_is_no_way_around_the_rule(tmp_path: Path) -> None:
    groups = {
        "a": {
            "gpus": 1,
            "environment": {"container": {"runtime": "apptainer", "image": "docker://x"}},
        }
    }
    path = tmp_path / "s.yaml"
    path.write_text(text_of(with_site(environments_only=True)))
    made = make_spec(
        Document({"name": "x", "environment": "old", "groups": groups}), site=str(path)
    )
    with pytest.raises(InputError, match="not a `container` of the profile"):
        make_plan(made, python="python")


def test_queues_may_have_other_environments(tmp_path: Path) -> None:
    own = {"rapids": {"python": "/arm/bin/python"}, "arm": {"python": "/a"}}
    queues = {"x86": QUEUE, "gh200": {**QUEUE, "environments": own}}
    site = with_site(queues=queues)
    assert planned(tmp_path, {"environment": "rapids"}, site).groups[0].python == "/r/bin/python"
    (jobs,) = planned(tmp_path, {"environment": "rapids", "queue": "gh200"}, site).groups
    assert (jobs.python, jobs.cuda) == ("/arm/bin/python", "")
    assert planned(tmp_path, {"environment": "arm"}, site).groups[0].queue_key == "gh200"
    assert "it has no environment arm" in problem(
        tmp_path, {"environment": "arm", "queue": "x86"}, site
    )


def test_the_job_of_the_head_needs_the_environment_too(tmp_path: Path) -> None:
    queues = {
        "gpu": {**QUEUE, "environments": {"arm": {"python": "/a"}}},
        "cpu": {"cpus_per_node": 8},
    }
    profile = {"environment": "arm", "head": {"queue": "cpu"}}
    assert "queue cpu: it has no environment arm" in problem(
        tmp_path, profile, with_site(queues=queues)
    )


def test_set_adds_to_the_environment_of_the_profile(tmp_path: Path) -> None:
    from gpujobs.config.spec import load_spec, settings_document

    (tmp_path / "s.yaml").write_text(text_of(SITE))
    for own, words, wanted in (
        ("rapids", "environment.python=/p", ("rapids", "/p")),
        ({"python": "/p"}, "environment=rapids", ("rapids", "/p")),
        ("rapids", "environment=old", ("old", None)),
    ):
        (tmp_path / "p.yaml").write_text(text_of({**PROFILE, "environment": own}))
        made = load_spec(
            tmp_path / "p.yaml", site=str(tmp_path / "s.yaml"), settings=settings_document((words,))
        )
        environment = made.profile.environment
        assert (environment.name, environment.python) == wanted


@each(
    ("keywords",),
    {
        "environment": {"environment": "rapids"},
        "software": {"software": "rapids"},
        "mapping": {"environment": {"name": "rapids"}},
        "with a prologue": {"software": "rapids", "job_script_prologue": ["export A=1"]},
    },
)
def test_keywords_name_an_environment(keywords: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text_of(SITE))
    made = spec_of({**keywords, "queue": "any"}, str(path), 1)
    (jobs,) = make_plan(made, python="python", replaces="owner").groups
    assert jobs.python == "/r/bin/python"
    assert ("export A=1" in jobs.profile.environment.setup) is ("job_script_prologue" in keywords)


def test_software_in_a_profile_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        spec(tmp_path, {"software": "rapids"})
    assert "use `environment`" in str(caught.value)


def test_sites_check_tries_each_environment(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    wrong = {"bash": {"setup": "if then"}, "none": {"container": {"image": "docker://x"}}}
    path.write_text(text_of(with_site(environments={**ENVIRONMENTS, **wrong})))
    texts = [str(finding) for finding in check_offline(str(path)).findings]
    assert len(texts) == 2, texts
    assert any("`environment.container.runtime` is needed" in text for text in texts)
    assert any("bash" in text for text in texts)
    path.write_text(text_of(with_site(environments_only=True)))
    report = check_offline(str(path))
    assert [str(finding) for finding in report.findings] == []
    tried = {result.trial.environment for result in report.results}
    assert tried == {(), *(("environments", name) for name in ENVIRONMENTS)}
    own = {**QUEUE, "environments": {"arm": {"container": {"image": "docker://x"}}}}
    path.write_text(text_of(with_site(queues={"gpu": QUEUE, "gh200": own})))
    (finding,) = check_offline(str(path)).findings
    assert finding.problem.position and [trial.place for trial in finding.trials] == [
        ("queues", "gh200", "environments", "arm")
    ]


def test_a_site_is_stored_with_its_environments(tmp_path: Path) -> None:
    from gpujobs.config.spec import read_spec, write_spec

    made = spec(tmp_path, {"environment": "rapids", "queue": "any"})
    write_spec(made, tmp_path / "spec.json")
    assert (
        make_plan(read_spec(tmp_path / "spec.json"), python="python").groups[0].python
        == "/r/bin/python"
    )
    assert json.loads((tmp_path / "spec.json").read_text())["document"]["environment"] == {
        "name": "rapids"
    }


def test_a_file_extends_single_environments(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text_of(SITE))
    own = {"extends": "./s.yaml", "environments": {"mine": {"python": "/m"}}}
    (tmp_path / "own.yaml").write_text(text_of(own))
    assert [*load_site(str(tmp_path / "own.yaml")).site.environments] == [*ENVIRONMENTS, "mine"]


def test_each_process_that_starts_workers_looks_at_the_driver(tmp_path: Path) -> None:
    for layout, more, number in (
        ("workers", {}, 1),
        ("allocation", {}, 2),
        ("mpi", {}, 2),
        ("mpi", {"run_on": "ranks", "run": ["p.py"]}, 2),
    ):
        profile = {"environment": "rapids", "queue": "any", "gpus": 8, "layout": layout, **more}
        made = spec(tmp_path, profile)
        script = scripts_of(made, make_plan(made, python="python"), "svd-0000")[0].text
        assert script.count("--cuda=13") == number, layout


@each(
    ("driver", "needed", "enough"),
    {
        "same": ("13.0", "13", True),
        "newer major": ("13.0", "12.9", True),
        "older minor, none asked": ("12.2", "12", True),
        "older minor": ("12.2", "12.9", False),
        "unknown minor": ("12", "12.9", False),
        "older major": ("12.9", "13", False),
        "two digits": ("12.10", "12.9", True),
    },
)
def test_versions_are_compared_as_numbers(driver: str, needed: str, enough: bool) -> None:
    assert supports(driver, needed) is enough

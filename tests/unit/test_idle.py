"""The end of a cluster without work."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.cli.plan_text import plan_text
from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.config.spec import load_spec
from gpujobs.injob.demand import IdleWatch, parse_rules, rules_text
from gpujobs.planning.render import render

from ..support.each import each
from .support import SLURM, error_of, made_plan

CAPPED = f"{SLURM}max_idle_timeout: 20m\n"


def observe(
    rules: dict[str, int], seen: str, step: float = 5.0
) -> tuple[str, tuple[float, str] | None]:
    """Return reason and next end after observations: t, c, w are tasks, clients, workers."""
    watch = IdleWatch(rules)
    for n, letters in enumerate(seen.split()):
        watch.observe(
            n * step, tasks="t" in letters, clients="c" in letters, workers="w" in letters
        )
    assert not (watch.reason and watch.warning)
    return watch.reason, watch.next_end


@each(
    ("rules", "seen", "ends"),
    [
        ({"unused": 20}, "- - - - -", "without tasks and clients for 20 s"),
        ({"unused": 20}, "- - - - c", ""),
        ({"unused": 20}, "c c c c c c c", ""),
        ({"unused": 20}, "t t t t t t t", ""),
        ({"unused": 20}, "- - - t - - -", ""),
        ({"idle": 20}, "c c c c c", "without tasks for 20 s"),
        ({"idle": 20}, "t c t c t c", ""),
        ({"client": 20}, "t t t t t", "without clients for 20 s"),
        ({"idle": 100, "client": 20}, "t t t t t", "without clients for 20 s"),
        ({"idle": 20, "client": 100}, "c t c c c c c", "without tasks for 20 s"),
        ({"idle_workers": 20}, "wc wc wc wc wc", "without tasks for 20 s"),
        ({"idle_workers": 20}, "wt w w w t w w w", ""),
        ({"idle_workers": 20}, "c c c c c c c", ""),
        ({"idle_workers": 20}, "w w w - w w w", ""),
    ],
)
def test_a_cluster_ends_by_its_rules_only(rules: dict[str, int], seen: str, ends: str) -> None:
    reason, _ = observe(rules, seen)
    assert reason.endswith(ends) and bool(reason) == bool(ends)


def test_a_warning_comes_once_the_end_is_near() -> None:
    watch, warnings = IdleWatch({"idle": 30}), []
    for n in range(7):
        watch.observe(5.0 * n, tasks=False, clients=True)
        warnings.append(watch.warning)
    near = "the cluster ends in {} s, if it stays without tasks"
    assert warnings == [""] * 4 + [near.format(10), near.format(5), ""]
    watch.observe(35.0, tasks=True, clients=True)
    assert watch.warning == ""


def test_the_next_rule_says_the_seconds_until_the_end() -> None:
    assert observe({"unused": 20}, "c c")[1] is None
    assert observe({"unused": 20}, "c - - -")[1] == (5, "unused")
    assert observe({"idle": 60, "client": 30}, "- - -")[1] == (20, "client")
    assert observe({"idle": 60, "client": 30}, "c - -")[1] == (20, "client")
    assert observe({"idle": 60, "client": 30}, "- c c")[1] == (50, "idle")


def test_a_process_that_was_stopped_was_not_idle() -> None:
    assert observe({"unused": 1800}, "- -", step=7200.0) == ("", (1790.0, "unused"))


def test_rules_are_read_as_they_were_written() -> None:
    assert parse_rules(rules_text({"idle": 600, "client": 30})) == {"idle": 600, "client": 30}
    assert parse_rules("") == {}


@each(
    ("keys", "option", "note"),
    [
        ("", "unused=1800", "ends after 30 minutes without tasks and clients; `idle_timeout: 0` turns this off"),
        ("idle_timeout: 1h", "idle=3600", "ends after 60 minutes without tasks"),
        ("idle_timeout: 2h", "idle=7200", "ends after 120 minutes without tasks"),
        ("idle_timeout: 121m", "idle=7260", "ends after 2h1m without tasks"),
        ("client_timeout: 90s", "client=90", "ends after 1m30s without clients"),
        ("idle_timeout: 0\nclient_timeout: 1m", "client=60", "ends after 1 minute without clients"),
        ("idle_timeout: 0", "", ""),
        ("walltime: 20m", "", ""),  # which ends it earlier
        ("client_timeout: 0", "", ""),
        ("run: sleep 9", "", ""),
        ("run: sleep 9\nidle_timeout: 10m", "idle=600", "ends after 10 minutes without tasks"),
    ],
)  # fmt: skip
def test_timeouts_of_a_profile_are_in_the_script_and_in_a_note(
    home: Path, keys: str, option: str, note: str
) -> None:
    plan = made_plan(home, f"gpus: 1\nnetwork: {{protocol: tcp}}\n{keys}\n")
    assert rules_text(plan.lifetime.end_after) == option
    notes = [text for text in plan.notes if "the cluster ends" in text]
    assert notes == ([f"the cluster {note}"] if note else [])
    (script,) = render(plan, "svd-0000")
    assert f"--end-after={option}" in script.text or not option
    assert ("--end-after" in script.text) is bool(option)


@each(
    ("most", "keys", "rules"),
    [
        ("20m", "", {"idle": 1200}),
        ("2h", "walltime: 8h", {"unused": 1800, "idle": 7200}),
        ("2h", "walltime: 1h", {"unused": 1800}),
        ("20m", "walltime: 10m", {}),
        ("20m", "client_timeout: 20m", {"idle": 1200, "client": 1200}),
        ("20m", "idle_timeout: 5m", {"idle": 300}),
        ("20m", "idle_timeout: 5m\nclient_timeout: 1m", {"idle": 300, "client": 60}),
        ("20m", "run: sleep 9\nclient_timeout: 1h", {"client": 3600}),
        ("20m", "run: sleep 9", {}),
    ],
)
def test_the_site_limits_the_time_without_tasks(
    home: Path, most: str, keys: str, rules: dict[str, int]
) -> None:
    """An open notebook is a client, which must not keep GPUs without tasks until the walltime."""
    (home / "s.yaml").write_text(f"{SLURM}max_idle_timeout: {most}\n")
    plan = made_plan(home, f"gpus: 1\n{keys}\n")
    assert plan.lifetime.end_after == rules
    by_site = [note for note in plan.notes if note.endswith("(`max_idle_timeout` of the site)")]
    assert len(by_site) == ("idle" in rules and "idle_timeout" not in keys)


@pytest.mark.parametrize(("most", "rules"), [("20m", {"idle_workers": 1200}), ("2h", {}), ("", {})])
def test_the_site_limits_a_cluster_of_python(home: Path, most: str, rules: dict[str, int]) -> None:
    (home / "s.yaml").write_text(SLURM + (most and f"max_idle_timeout: {most}\n"))
    (home / "p.yaml").write_text("gpus: 1\n")
    plan = make_cluster_plan(
        load_spec(home / "p.yaml", site=str(home / "s.yaml")), replaces="owner"
    )
    assert plan.lifetime.end_after == rules
    assert [note for note in plan.notes if "ends after" in note] == [
        "the cluster ends after 20 minutes without tasks (`max_idle_timeout` of the site)"
    ] * len(rules)


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ("", "it is without tasks and clients for too long, its walltime is over or"),
        ("idle_timeout: 0", "its walltime is over or"),
        ("idle_timeout: 1h\nclient_timeout: 1m", "it is without tasks for too long, it is without clients for too long,"),
    ],
)  # fmt: skip
def test_the_plan_says_what_ends_a_cluster_without_a_command(
    home: Path, keys: str, ends: str
) -> None:
    text = plan_text(made_plan(home, f"gpus: 1\n{keys}\n"), "svd-0000")
    assert f"no command: the cluster runs until {ends}" in text
    assert "`gpujobs cancel` is called\n" in text


def test_a_timeout_above_the_limit_of_the_site_is_refused(home: Path) -> None:
    (home / "s.yaml").write_text(CAPPED)
    plan = made_plan(home, "gpus: 1\n")
    assert not any("turns this off" in note for note in plan.notes)
    for text in ("0", "1h"):
        message = error_of(home, f"gpus: 1\nidle_timeout: {text}\n")
        assert (
            "svd.yaml:2:15: `idle_timeout`: the site allows at most 20m (`max_idle_timeout`)"
            in message
        )
        assert "s.yaml:7" in message
    assert made_plan(home, "gpus: 1\nrun: sleep 9\nidle_timeout: 1h\n").lifetime.end_after == {
        "idle": 3600
    }


def test_the_default_of_the_site_counts_without_a_command(home: Path) -> None:
    """It is for clusters without `run`, which would be stopped by it."""
    site = home / "s.yaml"
    site.write_text(SLURM.replace("{walltime: 1h}", "{walltime: 1h, idle_timeout: 2h}"))
    assert made_plan(home, "gpus: 1\n").lifetime.end_after == {"idle": 7200}
    assert made_plan(home, "gpus: 1\nidle_timeout: 0\n").lifetime.end_after == {}
    assert made_plan(home, "gpus: 1\nrun: sleep 9\n").lifetime.end_after == {}
    profile = home / "svd.yaml"
    profile.write_text("gpus: 1\n")
    assert load_spec(profile, site=str(site)).profile.idle_timeout == 7200


@pytest.mark.parametrize("text", ["30", "-1m", "no", "[]"])
def test_a_bad_timeout_is_refused(home: Path, text: str) -> None:
    assert "svd.yaml:1" in error_of(home, f"idle_timeout: {text}\n")

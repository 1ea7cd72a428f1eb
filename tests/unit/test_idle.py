"""The end of a cluster without work."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.config.spec import load_spec
from gpujobs.injob.idle import IdleWatch, parse_rules, rules_text
from gpujobs.planning.render import render

from .support import SLURM, error_of, made_plan

CAPPED = f"{SLURM}max_idle_timeout: 20m\n"


def observe(rules: dict[str, int], seen: str, step: float = 5.0) -> tuple[str, float | None]:
    """Return reason and seconds left after observations: t and c are tasks and clients."""
    watch = IdleWatch(rules)
    for n, letters in enumerate(seen.split()):
        watch.observe(n * step, tasks="t" in letters, clients="c" in letters)
    return watch.reason, watch.left


@pytest.mark.parametrize(
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
    ],
)
def test_when_a_cluster_ends(rules: dict[str, int], seen: str, ends: str) -> None:
    reason, _ = observe(rules, seen)
    assert reason.endswith(ends) and bool(reason) == bool(ends)


def test_seconds_until_the_end() -> None:
    assert observe({"unused": 20}, "c c")[1] is None
    assert observe({"unused": 20}, "c - - -")[1] == 5
    assert observe({"idle": 60, "client": 30}, "- - -")[1] == 20


def test_a_process_that_was_stopped_was_not_idle() -> None:
    assert observe({"unused": 1800}, "- -", step=7200.0) == ("", 1790.0)


def test_rules_as_an_option() -> None:
    assert parse_rules(rules_text({"idle": 600, "client": 30})) == {"idle": 600, "client": 30}
    assert parse_rules("") == {}


@pytest.mark.parametrize(
    ("keys", "option", "note"),
    [
        ("", "unused=1800", "ends after 30 minutes without tasks and clients; `idle_timeout: 0` turns this off"),
        ("idle_timeout: 1h", "idle=3600", "ends after 60 minutes without tasks"),
        ("client_timeout: 90s", "client=90", "ends after 1m30s without clients"),
        ("idle_timeout: 0\nclient_timeout: 1m", "client=60", "ends after 1 minute without clients"),
        ("idle_timeout: 0", "", ""),
        ("walltime: 20m", "", ""),  # which ends it earlier
        ("client_timeout: 0", "", ""),
        ("run: sleep 9", "", ""),
        ("run: sleep 9\nidle_timeout: 10m", "idle=600", "ends after 10 minutes without tasks"),
    ],
)  # fmt: skip
def test_timeouts_of_a_profile(home: Path, keys: str, option: str, note: str) -> None:
    plan = made_plan(home, f"gpus: 1\nnetwork: {{protocol: tcp}}\n{keys}\n")
    assert rules_text(plan.lifetime.end_after) == option
    notes = [text for text in plan.notes if "the cluster ends" in text]
    assert notes == ([f"the cluster {note}"] if note else [])
    (script,) = render(plan, "svd-0000")
    assert f"--end-after={option}" in script.text or not option
    assert ("--end-after" in script.text) is bool(option)


def test_limit_of_the_site(home: Path) -> None:
    (home / "s.yaml").write_text(CAPPED)
    plan = made_plan(home, "gpus: 1\n")
    assert plan.lifetime.end_after == {"unused": 1200}
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


def test_default_of_the_site(home: Path) -> None:
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
def test_bad_timeout(home: Path, text: str) -> None:
    assert "svd.yaml:1" in error_of(home, f"idle_timeout: {text}\n")

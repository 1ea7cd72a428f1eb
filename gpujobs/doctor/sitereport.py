"""The report of `gpujobs sites check`: the trials of a site, and all findings at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..clusters.submit import bash_error, bash_problems
from ..config.document import Document, Loc
from ..config.sitefiles import NoSuchSiteError, SiteFile, load_site
from ..errors import InputError, Position, Problem
from ..planning.sitecheck import NO_SETTINGS, Finding, Trial, Tried, findings, try_site
from ..text import plural
from .checks import Check, any_failed, checks_text, failed, passed

# -- syntax of bash text ---------------------------------------------------------------------------
_TEXTS: tuple[Loc, ...] = (
    ("setup",),
    ("mpi", "setup"),
    ("defaults", "environment", "setup"),
)
"""The keys of a site file that have bash text."""


def syntax_problems(site_file: SiteFile, results: Sequence[Tried]) -> Iterator[Problem]:
    """Return the syntax errors of the site's bash text; if it has none, those of its scripts."""
    texts = [*_TEXTS, *(("queues", key, *loc) for key in site_file.site.queues for loc in _TEXTS)]
    problems = list(bash_problems(site_file.document, texts))
    return iter(problems or _script_problems(results))


def _script_problems(results: Sequence[Tried]) -> Iterator[Problem]:
    seen: set[str] = set()
    for result in results:
        for script in result.scripts:
            # Directives are comments for bash, so most scripts of a site are the same program.
            program = re.sub(r"^#.*$", "", script.text, flags=re.M)
            if program not in seen and (message := bash_error(program)):
                yield Problem(f"{result.trial}: bash -n refuses the script: {message}")
            seen.add(program)


# -- the report ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SiteReport:
    """The results of the checks of one site file."""

    path: Path
    site_file: SiteFile | None
    """None if the file cannot be loaded; ``findings`` have the reasons."""
    results: Sequence[Tried] = ()
    findings: Sequence[Finding] = ()
    checks: Sequence[Check] = ()
    """Of the batch scheduler and of a job."""

    @property
    def correct(self) -> bool:
        """Whether nothing was found."""
        return not self.findings and not any_failed(self.checks)


def check_offline(site: str, settings: Document = NO_SETTINGS) -> SiteReport:
    """Return the report of all checks that need no batch scheduler.

    ``settings``: keys of the profiles that are tried. Raises NoSuchSiteError.
    """
    try:
        site_file = load_site(site)
    except NoSuchSiteError:
        raise
    except InputError as error:
        return SiteReport(_path(error, site), None, findings=[Finding(p) for p in error.problems])
    results = try_site(site_file, settings)
    syntax = [Finding(problem) for problem in syntax_problems(site_file, results)]
    return SiteReport(site_file.path, site_file, results, [*findings(results), *syntax])


def report_text(report: SiteReport) -> str:
    """Return the trials of each queue in a line, then the findings."""
    checks = [*_queue_checks(report), *report.checks]
    lines = [checks_text(checks)] if checks else []
    return "\n".join([*lines, *(str(finding) for finding in report.findings)])


def report_json(report: SiteReport) -> dict[str, object]:
    """Return the report as JSON."""
    site_file = report.site_file
    return {
        "version": 1,
        "site": report.path.stem,
        "path": str(report.path),
        "scheduler": site_file and site_file.site.scheduler,
        "correct": report.correct,
        "trials": [
            {
                "queue": result.trial.queue or None,
                "shape": result.trial.shape,
                "scripts": len(result.scripts),
                "correct": not result.problems,
            }
            for result in report.results
        ],
        "findings": [_finding_json(finding) for finding in report.findings],
        "checks": [asdict(check) for check in report.checks],
    }


def summary(report: SiteReport) -> str:
    """Return the number of findings, or that there are none, in one line."""
    number = len(report.findings) + sum(check.state == "failed" for check in report.checks)
    if number:
        return f"{report.path}: {plural(number, 'finding')}"
    scripts = sum(len(result.scripts) for result in report.results)
    return f"{report.path}: no findings; {plural(scripts, 'script')} planned and rendered"


def _path(error: InputError, site: str) -> Path:
    sources = (p.position.source for p in error.problems if p.position)
    return Path(next(sources, site))


def _queue_checks(report: SiteReport) -> Iterator[Check]:
    """Yield the checks of each queue, whose results name the shapes of its trials."""
    for queue in dict.fromkeys(result.trial.queue for result in report.results):
        results = [result for result in report.results if result.trial.queue == queue]
        wrong = [result for result in results if result.problems]
        name = f"queue {queue}" if queue else "profile"
        if wrong:
            yield failed(name, _shapes(wrong))
        if len(wrong) < len(results):
            yield passed(name, _shapes(result for result in results if not result.problems))


def _shapes(results: Iterable[Tried]) -> str:
    return ", ".join(result.trial.shape for result in results)


def _finding_json(finding: Finding) -> dict[str, object]:
    problem = finding.problem
    return {
        "message": problem.message,
        "hint": problem.hint,
        **_position_json(problem.position),
        "related": _position_json(problem.related) if problem.related else None,
        "trials": _trials_json(finding.trials),
    }


def _position_json(position: Position | None) -> dict[str, object]:
    if position is None:
        return {"file": None, "line": None, "column": None}
    return {
        "file": position.source,
        "line": position.line or None,
        "column": position.column or None,
    }


def _trials_json(trials: Iterable[Trial]) -> list[dict[str, object]]:
    return [{"queue": trial.queue or None, "shape": trial.shape} for trial in trials]


def problems_of(report: SiteReport) -> list[Problem]:
    """Return the problems of all findings."""
    return [finding.problem for finding in report.findings]

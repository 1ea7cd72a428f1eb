"""The environments of a site by name: whether a profile and a queue may have the one it names."""

from __future__ import annotations

from ..config.sitequeue import Queue
from ..config.sitesoftware import NamedEnvironment
from ..config.spec import ClusterSpec
from ..injob.gpus import supports
from ..text import did_you_mean
from .bash import Diagnostics
from .shape import QueueMismatch

KEY = "environment"
"""Of a profile."""
_OWN = ("setup", "python", "container")


def named_environment(spec: ClusterSpec) -> NamedEnvironment | None:
    """Return the environment of the site, or of its queue, that the profile names."""
    return spec.site.site.environments.get(spec.profile.environment.name or "")


def check_environment(diagnostics: Diagnostics) -> None:
    """Report an environment that the site has in no queue, or that it does not allow.

    ``diagnostics`` are those of the whole site. Raises InputError if there is none of that name.
    """
    spec = diagnostics.spec
    name, site = spec.profile.environment.name, spec.site.site
    known = site.environment_names
    if name and name not in known:
        message = f"site {spec.site.name} has no environment {name}: {_listed(known)}"
        diagnostics.profile_error(message, KEY, "name", hint=did_you_mean(name, sorted(known)))
        diagnostics.raise_problems()
    if site.environments_only:
        _check_only(diagnostics, known)


def _listed(known: set[str]) -> str:
    return f"it has {', '.join(sorted(known))}" if known else "it names none"


def _check_only(diagnostics: Diagnostics, known: set[str]) -> None:
    spec = diagnostics.spec
    environment = spec.profile.environment
    related = spec.site_position("environments_only")
    rule = f"site {spec.site.name} allows its own environments only"
    if not environment.name:
        hint = f"environment: {' or '.join(sorted(known)) or 'NAME'}"
        diagnostics.profile_error(rule, KEY, hint=hint, related=related)
    for key in _OWN:
        if getattr(environment, key):
            message = f"{rule}, not a `{key}` of the profile"
            diagnostics.profile_error(message, KEY, key, related=related)


def check_in_queue(spec: ClusterSpec, queue: Queue, gpus: int) -> None:
    """Check the environment of jobs with ``gpus`` GPUs in a queue; ``spec`` is that of the queue.

    Raises QueueMismatch.
    """
    name = spec.profile.environment.name
    if not name:
        return
    environment = named_environment(spec)
    if environment is None:
        message = f"it has no environment {name}: {_listed(set(spec.site.site.environments))}"
        raise QueueMismatch("environment.name", message)
    if gpus and is_too_old(queue, environment):
        message = (
            f"its driver supports CUDA {queue.driver_cuda}; "
            f"environment {name} needs {environment.gpu}"
        )
        raise QueueMismatch("environment.name", message, limit="driver_cuda")


def is_too_old(queue: Queue, environment: NamedEnvironment) -> bool:
    """Return whether the driver of the queue's nodes, if it is known, is too old."""
    needed, driver = environment.gpu, queue.driver_cuda
    return bool(needed and driver) and not supports(str(driver), str(needed))

"""Directives of the site whose values a profile chooses: its `options`, and a reservation."""

from __future__ import annotations

import difflib

from ..config import placeholders
from ..config.queue import Option
from ..schedulers import Scheduler
from ..text import matches
from .diagnostics import Diagnostics
from .directivecheck import Directive
from .shape import Place, Values

NEUTRAL = "x"


def option_directives(
    diagnostics: Diagnostics, scheduler: Scheduler, values: Values, queue: str
) -> list[Directive]:
    """Return the directives of `options` in the queue with the key ``queue``.

    An option without a value has none. ``values`` are those of the placeholders. Reports values
    that are missing or not allowed.
    """
    spec = diagnostics.spec
    site, wanted = spec.site.site, spec.profile.options
    for name in wanted:
        if name not in site.options:
            _report_unknown(diagnostics, name, queue)
    found = []
    for name, option in site.options.items():
        value = _value(diagnostics, scheduler, values, queue, name)
        if value is not None:
            place = spec.queue_place(queue, "options", name, "directive")
            text = _expand(diagnostics, option.directive, {**values, name: value}, name, place)
            position = spec.site_position(*place)
            if name in wanted:
                position = spec.position("options", name)
            found.append(Directive(text, position))
    return found


def _value(
    diagnostics: Diagnostics, scheduler: Scheduler, values: Values, queue: str, name: str
) -> str | None:
    """Return the value of the option ``name``: of the profile, the default, or both together."""
    spec = diagnostics.spec
    option, wanted = spec.site.site.options[name], spec.profile.options.get(name)
    place = spec.queue_place(queue, "options", name)
    if wanted is not None and not option.extends_default(wanted):
        _check(diagnostics, scheduler, name, wanted, place)
        return wanted
    if option.default is None:
        if option.required:
            _report_missing(diagnostics, name, place)
        return None
    at = spec.queue_place(queue, "options", name, "default")
    default = _expand(diagnostics, option.default, values, name, at)
    if wanted is None:
        return default
    _check(diagnostics, scheduler, name, default + wanted, place)
    return default + wanted


def reservation(
    diagnostics: Diagnostics, scheduler: Scheduler, *, has_queue: bool
) -> list[Directive]:
    """Return the directive of the profile's reservation.

    ``has_queue``: the other directives have the queue, and with it a reservation that is a queue.
    """
    spec = diagnostics.spec
    wanted, text = spec.profile.reservation, scheduler.reservation_directive
    if not wanted or (scheduler.reservation_is_queue and has_queue):
        return []
    if not text:
        message = f"{scheduler.name} has no reservations that a job can name"
        diagnostics.profile_error(message, "reservation")
        return []
    line = placeholders.expand(text, {"reservation": wanted})
    return [Directive(line, spec.position("reservation"), by_user=True)]


def _report_missing(diagnostics: Diagnostics, name: str, place: Place) -> None:
    spec = diagnostics.spec
    hint = spec.site.site.options[name].hint or f"options: {{{name}: …}}"
    message = f"option `{name}` is needed: the site requires it"
    related = spec.site_position(*place)
    diagnostics.profile_error(message, "options", name, hint=hint, related=related)


def _check(
    diagnostics: Diagnostics, scheduler: Scheduler, name: str, value: str, at: Place
) -> None:
    """Report a value that does not match, or that would set other options of the directive."""
    option = diagnostics.spec.site.site.options[name]
    place, related = ("options", name), diagnostics.spec.site_position(*at)
    if not matches(option.pattern, value):
        message = f"{name} {value!r} does not match the site's pattern {option.pattern}"
        hint = option.hint or ""
        diagnostics.profile_error(message, *place, hint=hint, related=related)
    elif _sets(scheduler, option, name, value) != _sets(scheduler, option, name, NEUTRAL):
        message = f"{name} {value!r} would set another option of the batch scheduler"
        diagnostics.profile_error(message, *place, related=related)


def _sets(scheduler: Scheduler, option: Option, name: str, value: str) -> set[str] | None:
    """Return the options that the directive sets with ``value``; None if it cannot be parsed."""
    text = option.directive.replace(f"{{{name}}}", value)
    try:
        return scheduler.options(text)
    except ValueError:
        return None


def _expand(diagnostics: Diagnostics, text: str, values: Values, name: str, place: Place) -> str:
    try:
        return placeholders.expand(text, values)
    except LookupError as error:
        missing = error.args[0]
        if missing == "account":
            message = f"`account` is needed: option {name} of the site names it"
            diagnostics.profile_error(message, "account")
            return text
        message = f"{{{missing}}} is not known in this queue"
    except ValueError as error:
        message = str(error)
    diagnostics.site_error(message, *place)
    return text


def _report_unknown(diagnostics: Diagnostics, name: str, queue: str) -> None:
    """Report an option that no queue has; note one that only other queues have."""
    site = diagnostics.spec.site.site
    if any(name in other.options for other in site.queues.values()):
        diagnostics.note(f"option `{name}` is ignored: queue {queue} does not have it")
        return
    known = sorted(site.options)
    near = difflib.get_close_matches(name, known, n=1)
    listed = f"it has {', '.join(known)}" if known else "it has none"
    message = f"site {diagnostics.spec.site.name} has no option `{name}`: {listed}"
    hint = f"did you mean {near[0]}?" if near else ""
    diagnostics.profile_error(message, "options", name, hint=hint)

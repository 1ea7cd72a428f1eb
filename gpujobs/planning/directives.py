"""The directives of a job: account, options, requests of site and user, and their checks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..config import placeholders
from ..config.site import Account, Option, Site
from ..config.sitekinds import File, Variable
from ..errors import Position, Problem
from ..schedulers import Scheduler
from ..text import did_you_mean, matches
from .bash import Diagnostics
from .shape import JobShape, Place, Software, Values, resource_values


# -- the account of a job --------------------------------------------------------------------------
def find_account(
    diagnostics: Diagnostics, scheduler: Scheduler, queue_key: str
) -> tuple[str, str] | None:
    """Return the directive and the account; None if there is none. Reports problems."""
    account = _account_of_site(diagnostics, scheduler, queue_key)
    wanted = diagnostics.spec.profile.account
    if account is None:
        if wanted:
            site_name = diagnostics.spec.site.name
            diagnostics.note(f"account {wanted} is ignored: site {site_name} has none")
        return None
    _check_account(diagnostics, account, queue_key)
    if not wanted:
        return None
    return account.directive or scheduler.account_directive, wanted


def _account_of_site(
    diagnostics: Diagnostics, scheduler: Scheduler, queue_key: str
) -> Account | None:
    site = diagnostics.spec.site.site
    if account := site.queues[queue_key].account or site.account:
        return account
    if "account" in site.given or scheduler.on_this_machine:
        return None
    return Account()


def _check_account(diagnostics: Diagnostics, account: Account, queue_key: str) -> None:
    spec, wanted = diagnostics.spec, diagnostics.spec.profile.account
    place = spec.queue_place(queue_key, "account")
    if wanted and account.pattern and not matches(account.pattern, wanted):
        message = f"account {wanted!r} does not match the site's pattern {account.pattern}"
        hint = account.hint or ""
    elif not wanted and account.required:
        who = f"site {spec.site.name}"
        if spec.site.site.queues[queue_key].account:
            who = f"queue {queue_key} of {who}"
        message = f"{who} requires an `account`"
        hint = account.hint or "account: NAME"
    else:
        return
    diagnostics.profile_error(message, "account", hint=hint, related=spec.site_position(*place))


# -- checks directives: each by itself, and all of one job against each other ----------------------
@dataclass(frozen=True)
class Directive:
    """One directive of a job, without its prefix."""

    text: str
    position: Position | None = None
    """In the site file or the profile; None for a line of gpujobs."""
    by_user: bool = False
    """It is a line of the profile."""

    @property
    def writer(self) -> str:
        """Who wrote it, for messages."""
        if self.by_user:
            return "another line of the profile"
        return "the site" if self.position else "gpujobs"


class DirectiveChecker:
    """Checks the directives of one job, in the order of the script.

    A batch scheduler does not report an option that occurs twice: it takes the last one, which may
    replace the request for GPUs.
    """

    def __init__(self, diagnostics: Diagnostics, scheduler: Scheduler) -> None:
        self.diagnostics, self.scheduler = diagnostics, scheduler
        own = Directive("")
        self._writers: dict[str, Directive] = dict.fromkeys(scheduler.managed, own)
        """The first directive that sets an option."""

    def add(self, directive: Directive) -> None:
        """Report why ``directive`` is not allowed, and remember its options for later ones."""
        try:
            options = self.scheduler.options(directive.text)
        except ValueError as error:
            self._report(directive, f" is no directive: {error}")
            return
        if refused := self.scheduler.refusal(directive.text):
            self._report(directive, f" is refused: {self.scheduler.refused[refused]}")
        elif clash := self._clash(directive):
            first = self._writers[clash]
            self._report(directive, f": {clash} is written by {first.writer}", first.position)
        for option in options:
            self._writers.setdefault(option, directive)

    def _clash(self, directive: Directive) -> str:
        find = self.scheduler.clash if directive.by_user else self.scheduler.repeated
        return find(directive.text, self._writers)

    def _report(self, directive: Directive, message: str, related: Position | None = None) -> None:
        text = f"`{directive.text}`{message}"
        self.diagnostics.add(Problem(text, directive.position, related=related))


def check_memory_units(text: str, scheduler: Scheduler) -> None:
    """Raise ValueError unless the unit of each memory placeholder in ``text`` is also written.

    ``mem={memory_per_node:GB}`` would request 13 bytes instead of 13 GB.
    """
    for token, unit, written in placeholders.memory_suffixes(text):
        if not written and unit in scheduler.memory_unit:
            continue
        if written != unit:
            name = scheduler.name
            shown = f"{token}{written}" if written else token
            raise ValueError(
                f"`{shown}` is a number of {unit}B, and {name} would take it in another unit: "
                f"write {token}{unit}"
            )


# -- the launcher of jobs whose script runs on another node ----------------------------------------
def workers_launcher(
    diagnostics: Diagnostics, shape: JobShape, software: Software, queue: str
) -> tuple[str, ...]:
    """Return the words of the site's `workers_launcher` for jobs in a queue; () if there is none.

    ``diagnostics`` are those of jobs in ``queue``. In `layout: mpi`, the launcher of MPI starts the
    processes on the nodes.
    """
    spec = diagnostics.spec
    site = spec.site.site
    if not site.workers_launcher or spec.profile.layout != "workers":
        return ()
    container = software.container
    if container and container.runtime.launcher:
        message = (
            f"{container.runtime.name} starts containers through {container.runtime.launcher}, "
            f"but processes of this site start through {site.workers_launcher[0]}"
        )
        diagnostics.profile_error(message, "environment", "container")
    values = {name: shape.values()[name] for name in placeholders.WORKERS_LAUNCH}
    try:
        return tuple(placeholders.expand(word, values) for word in site.workers_launcher)
    except LookupError as error:
        place = spec.queue_place(queue, "workers_launcher")
        diagnostics.site_error(f"{{{error.args[0]}}} is not known in queue {queue}", *place)
        return ()


# -- directives of the site whose values a profile chooses: its `options`, and a reservation -------
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
    listed = f"it has {', '.join(known)}" if known else "it has none"
    message = f"site {diagnostics.spec.site.name} has no option `{name}`: {listed}"
    diagnostics.profile_error(message, "options", name, hint=did_you_mean(name, known))


# -- the directives of a job -----------------------------------------------------------------------
def _request_keys(*, gpus: bool, nodes: int) -> tuple[str, ...]:
    if not gpus:
        return ("cpu_request",)
    if nodes > 1:
        return ("multi_node_request", "request")
    return ("request",)


def _built_in_request(scheduler: Scheduler, *, gpus: bool) -> tuple[str, ...]:
    return scheduler.request if gpus else scheduler.cpu_request


def own_request(
    site: Site, queue_key: str, *, gpus: bool, nodes: int
) -> tuple[Place, tuple[str, ...]] | None:
    """Return the request that the site file has for jobs of ``nodes`` in a queue, and its place.

    None: the built-in one is used. A queue's request overrides all of the site's.
    """
    names = _request_keys(gpus=gpus, nodes=nodes)
    for place, section in ((("queues", queue_key), site.queues[queue_key]), ((), site)):
        for name in names:
            if lines := getattr(section, name):
                return (*place, name), lines
    return None


def request_texts(
    site: Site, scheduler: Scheduler, queue_key: str, *, gpus: bool, nodes: int
) -> tuple[str, ...]:
    """Return the request and the extra directives of a queue, with their placeholders."""
    request = _built_in_request(scheduler, gpus=gpus)
    if own := own_request(site, queue_key, gpus=gpus, nodes=nodes):
        request = own[1]
    extra = site.queues[queue_key].directives
    return (*request, *(site.directives if extra is None else extra))


class DirectiveWriter:
    """Writes the directives of jobs of ``shape`` in the site's queue ``queue_key``."""

    def __init__(
        self,
        diagnostics: Diagnostics,
        scheduler: Scheduler,
        queue_key: str,
        shape: JobShape,
        walltime: int | None,
    ) -> None:
        self.diagnostics, self.scheduler = diagnostics, scheduler
        self.queue_key, self.shape, self.walltime = queue_key, shape, walltime
        self.spec = diagnostics.spec
        self.site = self.spec.site.site
        self.queue = self.site.queues[queue_key]

    def lines(self) -> tuple[str, ...]:
        """Return the directives without their prefix. Reports those that are not allowed."""
        account = self._find_account()
        values = self._values(account)
        directives = self._request(values)
        arguments = self._arguments(values)
        if account and "account" not in placeholders.names(" ".join(self._argument_texts()[1])):
            directives.append(self._account(*account))
        directives += self._extra(values)
        directives += option_directives(self.diagnostics, self.scheduler, values, self.queue_key)
        gpus, nodes = bool(self.shape.gpus), self.shape.nodes
        texts = request_texts(self.site, self.scheduler, self.queue_key, gpus=gpus, nodes=nodes)
        has_queue = "queue" in placeholders.names(" ".join(texts))
        directives += reservation(self.diagnostics, self.scheduler, has_queue=has_queue)
        own = self._own()
        checker = DirectiveChecker(self.diagnostics, self.scheduler)
        for directive in (*directives, *arguments, *own):
            checker.add(directive)
        lines = self.scheduler.joined([directive.text for directive in directives])
        return (*lines, *(directive.text for directive in own))

    def submit_arguments(self) -> tuple[str, ...]:
        """Return the words after the command that submits the jobs; `lines` has checked them."""
        arguments = self._arguments(self._values(self._find_account()))
        return tuple(word for argument in arguments for word in argument.text.split())

    def account(self) -> str:
        """Return the account of the jobs, "" if they have none."""
        account = self._find_account()
        return account[1] if account else ""

    def _argument_texts(self) -> tuple[Place, tuple[str, ...]]:
        if self.queue.submit_arguments:
            return ("queues", self.queue_key, "submit_arguments"), self.queue.submit_arguments
        return ("submit_arguments",), self.site.submit_arguments

    def _arguments(self, values: Values) -> list[Directive]:
        """Return the arguments; one that names the account is left out if there is none."""
        place, texts = self._argument_texts()
        if values["account"] is None:
            texts = tuple(text for text in texts if "{account}" not in text)
        return self._expand(texts, values, place)

    def _find_account(self) -> tuple[str, str] | None:
        return find_account(self.diagnostics, self.scheduler, self.queue_key)

    def _values(self, account: tuple[str, str] | None) -> Values:
        return {
            **self.shape.values(),
            **resource_values(self.site, self.queue, self.shape),
            "queue": self._queue_name(),
            "gpu_type": self._gpu_type(),
            "gpu_memory": self.queue.gpu_memory,
            "walltime": self.walltime and self.scheduler.walltime(self.walltime),
            "account": account[1] if account else None,
        }

    def _queue_name(self) -> str:
        wanted = self.spec.profile.reservation
        if wanted and self.scheduler.reservation_is_queue:
            return wanted
        return self.site.queue_name(self.queue_key)

    def _gpu_type(self) -> str | None:
        wanted = self.spec.profile.gpu_type if self.shape.gpus else None
        return self.queue.type_name(wanted)

    def visible_devices(self) -> str:
        """Return the source of a job's GPUs: scheduler, exclusive, variable:NAME or file:NAME."""
        source = (
            self.queue.visible_devices
            or self.site.visible_devices
            or self.scheduler.visible_devices
        )
        if source is None:
            return self._default_visible_devices()
        if source == "exclusive" and not self.queue.exclusive:
            message = (
                "`visible_devices: exclusive` takes all GPUs of a node, "
                f"so queue {self.queue_key} must be `exclusive: true`"
            )
            self.diagnostics.site_error(message, "visible_devices")
        if isinstance(source, Variable):
            return f"variable:{source.variable}"
        if isinstance(source, File):
            return f"file:{source.file}"
        return source

    def _default_visible_devices(self) -> str:
        if self.queue.exclusive:
            return "exclusive"
        name = self.scheduler.name
        message = f"`visible_devices` is needed: {name} itself does not list a job's GPUs"
        hint = (
            "visible_devices: exclusive, {variable: NAME}, {file: NAME}, "
            "or scheduler if a prolog sets CUDA_VISIBLE_DEVICES"
        )
        self.diagnostics.site_error(message, "queues", self.queue_key, hint=hint)
        return ""

    def _request(self, values: Values) -> list[Directive]:
        gpus = bool(self.shape.gpus)
        own = own_request(self.site, self.queue_key, gpus=gpus, nodes=self.shape.nodes)
        if own is None:
            built_in = _built_in_request(self.scheduler, gpus=gpus)
            lines = (_expand_if_known(text, values) for text in built_in)
            return list(map(Directive, filter(None, lines)))
        place, texts = own
        if gpus:
            self._check_asks_for_gpus(texts, place)
        return self._expand(texts, values, place)

    def _check_asks_for_gpus(self, request: tuple[str, ...], place: Place) -> None:
        names = placeholders.names(" ".join(request))
        if self.queue.exclusive or any(name.startswith("gpus_") for name in names):
            return
        message = (
            "no line asks for GPUs, "
            f"so queue {self.queue_key} must be `exclusive: true` (whole nodes)"
        )
        self.diagnostics.site_error(message, *place)

    def _account(self, text: str, name: str) -> Directive:
        account = self.queue.account or self.site.account
        position = None
        if account is not None and "directive" in account.given:
            position = self.spec.site_position(*self.spec.queue_place(self.queue_key, "account"))
        return Directive(placeholders.expand(text, {"account": name}), position)

    def _extra(self, values: Values) -> list[Directive]:
        own = self.queue.directives
        place = self.spec.queue_place(self.queue_key, "directives")
        return self._expand(self.site.directives if own is None else own, values, place)

    def _expand(self, texts: tuple[str, ...], values: Values, place: Place) -> list[Directive]:
        """Return the site's lines with their placeholders replaced."""
        directives = []
        for n, line in enumerate(texts):
            text = self._without_unknown_type(line, values)
            if not text:
                continue
            try:
                check_memory_units(text, self.scheduler)
                text = placeholders.expand(text, values)
            except LookupError as error:
                self._report_unknown(str(error.args[0]), (*place, n))
            except ValueError as error:
                self.diagnostics.site_error(str(error), *place, n)
            directives.append(Directive(text, self.spec.site_position(*place, n)))
        return directives

    def _without_unknown_type(self, line: str, values: Values) -> str:
        """Return the line without the GPU type, if the queue has several and none is asked for."""
        if values["gpu_type"] is None and self.queue.gpu_types:
            return placeholders.without(line, "gpu_type")
        return line

    def _report_unknown(self, name: str, place: Place) -> None:
        if name == "account":
            message = "`account` is needed: the site's directives name it"
            self.diagnostics.profile_error(message, "account")
            return
        key = re.sub("per_(job|cpu|gpu)", "per_node", name)
        if key == "memory_per_node" and self.queue.memory_per_node:
            key = "cpus_per_node, by which CPU workers share its memory"
        if name not in placeholders.RESOURCES:
            key = f"resources: {{{key.removesuffix('_per_node')}: …}}"
        message = f"{{{name}}} is not known: queue {self.queue_key} does not state {key}"
        if name == "gpu_type" and self.queue.gpu_types:
            message = (
                f"{{gpu_type}} cannot be left out here, and jobs in queue {self.queue_key} may "
                "have any type: write it as :NAME={gpu_type}, as gpu:{gpu_type}: or as a line of "
                "its own, or state the queue's gpu_type"
            )
        self.diagnostics.site_error(message, *place)

    def _own(self) -> list[Directive]:
        """Return the directives of the profile."""
        return [
            Directive(line, self.spec.position("directives", n), by_user=True)
            for n, line in enumerate(self.spec.profile.directives)
        ]


def _expand_if_known(text: str, values: Values) -> str:
    """Expand a built-in line without the parts whose numbers are not known, or return ``""``.

    A part is, for example, ``:mem={memory_per_node:MB}mb`` in ``select={nodes}:mem=…``.
    """
    if values["gpu_type"] is None:
        text = text.replace("{gpu_type}:", "")
    for name in placeholders.names(text):
        if values.get(name) is None:
            text = re.sub(rf":\w+=\{{{name}(:\w+)?\}}\w*", "", text)
    try:
        return placeholders.expand(text, values)
    except LookupError:
        return ""

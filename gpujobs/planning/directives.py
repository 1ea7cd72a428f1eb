"""The directives of a job: account, options, requests of site and user, and their checks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from ..config import placeholders
from ..config.profile import DIRECTIVE_KEYS
from ..config.site import Site
from ..config.sitequeue import Account, Option
from ..errors import Position, Problem
from ..schedulers import Scheduler
from ..schedulers.words import NotHere
from ..text import did_you_mean, matches
from .bash import Diagnostics
from .containers import Container
from .shape import JobShape, Place, Values, resource_values


@dataclass(frozen=True)
class Directive:
    """One directive of a job, without its prefix."""

    text: str
    find_position: Callable[[], Position] | None = None
    """Finds it in the site file or the profile; None for a line of gpujobs."""
    by_user: bool = False
    """It is a line of the profile."""

    @property
    def writer(self) -> str:
        """Who wrote it, for messages."""
        if self.by_user:
            return "another line of the profile"
        return "the site" if self.find_position else "gpujobs"

    @property
    def position(self) -> Position | None:
        """Its position in the site file or the profile."""
        return self.find_position and self.find_position()


# -- the lines of a site that request resources ----------------------------------------------------
def _own_request(site: Site, *, gpus: bool, nodes: int) -> tuple[str, tuple[str, ...]] | None:
    """Return the key and the lines of the request of ``site``; None: the built-in one is used."""
    names = ("multi_node_request", "request") if nodes > 1 else ("request",)
    for name in names if gpus else ("cpu_request",):
        if lines := getattr(site, name):
            return name, lines
    return None


def request_texts(
    site: Site, scheduler: Scheduler, *, gpus: bool, nodes: int = 1
) -> tuple[str, ...]:
    """Return the request and the extra directives, with their placeholders.

    ``site`` has the values for jobs in a queue (see `Site.in_queue`).
    """
    if own := _own_request(site, gpus=gpus, nodes=nodes):
        return (*own[1], *site.directives)
    return (*(scheduler.request if gpus else scheduler.cpu_request), *site.directives)


# -- the directives of a job -----------------------------------------------------------------------
NEUTRAL = "x"
"""A value of an option that sets no other option."""


class DirectiveWriter:
    """Writes the directives of jobs of ``shape`` in one queue.

    ``diagnostics`` are those of the queue. ``queues``: the names of all queues in which they wait.
    """

    def __init__(
        self,
        diagnostics: Diagnostics,
        scheduler: Scheduler,
        shape: JobShape,
        walltime: int | None,
        queues: Sequence[str] = (),
    ) -> None:
        self.diagnostics, self.scheduler = diagnostics, scheduler
        self.shape, self.walltime = shape, walltime
        self.spec = diagnostics.spec
        self.profile, self.site = self.spec.profile, self.spec.site.site
        self.key = self.spec.queue_key
        self.queue = self.site.queues[self.key]
        self._queues = queues or [self.site.queue_name(self.key)]

    def lines(self) -> tuple[str, ...]:
        """Return the directives without their prefix. Reports those that are not allowed."""
        writers = dict.fromkeys(self.scheduler.managed, Directive(""))
        for directive in (*self._of_site, *self._arguments, *self._of_profile):
            self._check(directive, writers)
        return self.unchecked_lines()

    def _check(self, directive: Directive, writers: dict[str, Directive]) -> None:
        """Report why ``directive`` is not allowed, and add it to the ``writers`` of its options.

        A batch scheduler does not report an option that occurs twice: it takes the last one, which
        may replace the request for GPUs. ``writers``: the first directive that sets each option.
        """
        scheduler = self.scheduler
        try:
            options = scheduler.options(directive.text)
        except ValueError as error:
            self._report(directive, f" is no directive: {error}")
            return
        find = scheduler.clash if directive.by_user else scheduler.repeated
        if refused := scheduler.refusal(directive.text):
            reason, hint = scheduler.refused[refused], self._hint(directive)
            self._report(directive, f" is refused: {reason}", hint=hint)
        elif clash := find(directive.text, writers):
            first, hint = writers[clash], self._hint(directive)
            message = f": {clash} is written by {first.writer}"
            self._report(directive, message, first.position, hint)
        for option in options:
            writers.setdefault(option, directive)

    def _hint(self, directive: Directive) -> str:
        """Return the keys to write instead of a directive; "" if no key means it."""
        try:
            meaning = self.scheduler.meaning(directive.text)
        except NotHere as error:
            return error.hint
        except ValueError:
            return ""
        if meaning.rest:
            return str(meaning)
        keys = str(meaning) or "leave it out: jobs have it anyway"
        if not directive.by_user and meaning.settings:
            return f"`request` has the resources of a job; a default is `defaults: {{{keys}}}`"
        return keys

    def _report(
        self,
        directive: Directive,
        message: str,
        related: Position | None = None,
        hint: str = "",
    ) -> None:
        text = f"`{directive.text}`{message}"
        self.diagnostics.add(Problem(text, directive.position, hint=hint, related=related))

    def unchecked_lines(self) -> tuple[str, ...]:
        """Return the directives without their prefix."""
        directives = (*self._of_site, *self._of_profile)
        return tuple(self.scheduler.joined([directive.text for directive in directives]))

    def submit_arguments(self) -> tuple[str, ...]:
        """Return the words after the command that submits the jobs; `lines` has checked them."""
        return tuple(word for argument in self._arguments for word in shlex.split(argument.text))

    @cached_property
    def _of_site(self) -> list[Directive]:
        """All directives but those of the profile."""
        directives = self._request()
        named = "account" in placeholders.names(" ".join(self.site.submit_arguments))
        if self._account and not named:
            directives.append(self._account_directive(*self._account))
        directives += self._filled("directives", self.site.directives)
        return [*directives, *self._options(), *self._of_keys()]

    @cached_property
    def _of_profile(self) -> list[Directive]:
        return [
            Directive(line, partial(self.spec.position, "directives", n), by_user=True)
            for n, line in enumerate(self.profile.directives)
        ]

    @property
    def account(self) -> str:
        """The account of the jobs, "" if they have none."""
        if self._account is None:
            return ""
        return self._account[1]

    def visible_devices(self) -> str:
        """Return the source of a job's GPUs: scheduler, exclusive, variable:NAME or file:NAME."""
        source = self.site.visible_devices or self.scheduler.visible_devices
        if source is None:
            return self._default_visible_devices()
        if source == "exclusive" and not self.queue.exclusive:
            message = (
                "`visible_devices: exclusive` takes all GPUs of a node, "
                f"so queue {self.key} must be `exclusive: true`"
            )
            self.diagnostics.site_error(message, "visible_devices")
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
        self.diagnostics.site_error(message, "queues", self.key, hint=hint)
        return ""

    def launcher(self, container: Container | None) -> tuple[str, ...]:
        """Return the words of the site's `workers_launcher`; () if there is none.

        In `layout: mpi`, and on several nodes, another launcher starts the processes.
        """
        words = self.site.workers_launcher
        if not words or self.shape.nodes > 1 or self.profile.layout == "mpi":
            return ()
        if container and container.runtime.launcher:
            other = container.runtime.launcher
            why = f"but {container.runtime.name} starts containers through {other}"
            self._refuse_container(words[0], why)
        return tuple(self._expanded(word, self._values, "workers_launcher") for word in words)

    def run_launcher(self, container: Container | None) -> tuple[str, ...]:
        """Return the words of the site's `run_launcher`; () if there is none.

        It has a meaning where the supervisor, which starts `run`, is not on a compute node.
        """
        words, profile = self.site.run_launcher, self.profile
        alone = self.shape.nodes == 1 and profile.layout != "mpi"
        if not words or alone or not profile.run or profile.run_on == "ranks":
            return ()
        if container:
            self._refuse_container(words[0], "which is not in a container")
        return tuple(self._expanded(word, self._values, "run_launcher") for word in words)

    def _refuse_container(self, launcher: str, why: str) -> None:
        """Report that processes which a launcher of the site starts cannot be in a container."""
        message = f"processes of this site start through {launcher}, {why}"
        self.diagnostics.profile_error(message, "environment", "container")

    # -- the account -------------------------------------------------------------------------------
    @cached_property
    def _account(self) -> tuple[str, str] | None:
        """The directive and the account of the jobs; None if there is none. Reports problems."""
        account, wanted = self._account_of_site(), self.profile.account
        if account is None:
            if wanted:
                self.diagnostics.note(
                    f"account {wanted} is ignored: site {self.spec.site.name} has none"
                )
            return None
        self._check_account(account)
        if not wanted:
            return None
        return account.directive or self.scheduler.account_directive, wanted

    def _account_of_site(self) -> Account | None:
        site = self.site
        if site.account or "account" in site.given or self.scheduler.on_this_machine:
            return site.account
        return Account()

    def _check_account(self, account: Account) -> None:
        wanted = self.profile.account
        if wanted and account.pattern and not matches(account.pattern, wanted):
            message = f"account {wanted!r} does not match the site's pattern {account.pattern}"
            hint = account.hint or ""
        elif not wanted and account.required:
            who = f"site {self.spec.site.name}"
            if self.queue.account:
                who = f"queue {self.key} of {who}"
            message = f"{who} requires an `account`"
            hint = account.hint or "account: NAME"
        else:
            return
        related = self.spec.site_position("account")
        self.diagnostics.profile_error(message, "account", hint=hint, related=related)

    def _account_directive(self, text: str, name: str) -> Directive:
        position = None
        if self.site.account and "directive" in self.site.account.given:
            position = partial(self.spec.site_position, "account")
        return Directive(placeholders.expand(text, {"account": name}), position)

    # -- lines of the site -------------------------------------------------------------------------
    @cached_property
    def _values(self) -> Values:
        """The values of the placeholders."""
        queue = self.scheduler.queue_list(self._queues)
        if self.profile.reservation and self.scheduler.reservation_is_queue:
            queue = self.profile.reservation
        return {
            **self.shape.values(),
            **resource_values(self.site, self.queue, self.shape),
            "queue": queue,
            "gpu_type": self.queue.type_name(self.profile.gpu_type if self.shape.gpus else None),
            "gpu_memory": self.queue.gpu_memory,
            "walltime": self.walltime and self.scheduler.walltime(self.walltime),
            "account": self.account or None,
        }

    @cached_property
    def _values_of_lines(self) -> Values:
        """The values of the placeholders in the lines of the site, with those of its options."""
        options = self.site.options.items()
        chosen = {name: self._option_value(name, option) for name, option in options}
        elsewhere = {name for queue in self.site.queues.values() for name in queue.options}
        return {**self._values, **dict.fromkeys(elsewhere), **chosen}

    def _request(self) -> list[Directive]:
        gpus = bool(self.shape.gpus)
        own = _own_request(self.site, gpus=gpus, nodes=self.shape.nodes)
        if own is None:
            built_in = self.scheduler.request if gpus else self.scheduler.cpu_request
            lines = (_expand_if_known(text, self._values) for text in built_in)
            return list(map(Directive, filter(None, lines)))
        key, texts = own
        if gpus:
            self._check_asks_for_gpus(texts, key)
        return self._filled(key, texts)

    def _check_asks_for_gpus(self, request: tuple[str, ...], key: str) -> None:
        names = placeholders.names(" ".join(request))
        if self.queue.exclusive or any(name.startswith("gpus_") for name in names):
            return
        message = (
            f"no line asks for GPUs, so queue {self.key} must be `exclusive: true` (whole nodes)"
        )
        self.diagnostics.site_error(message, key)

    @cached_property
    def _arguments(self) -> list[Directive]:
        """The arguments of the command that submits, without the account's if there is none."""
        texts = self.site.submit_arguments
        if not self.account:
            texts = tuple(text for text in texts if "{account}" not in text)
        return self._filled("submit_arguments", texts)

    def _filled(self, key: str, texts: tuple[str, ...]) -> list[Directive]:
        """Return the lines ``texts`` of the site's ``key`` with their placeholders replaced."""
        directives = []
        for n, line in enumerate(texts):
            text = line
            if self._values["gpu_type"] is None and self.queue.gpu_types:
                # the queue has several, and none is asked for
                text = placeholders.without(line, "gpu_type")
            if not text:
                continue
            name, unit = self.scheduler.name, self.scheduler.memory_unit
            if error := placeholders.unit_error(text, name, unit):
                self.diagnostics.site_error(error, key, n)
            else:
                text = self._expanded(text, self._values_of_lines, key, n)
            directives.append(Directive(text, partial(self.spec.site_position, key, n)))
        return directives

    def _expanded(self, text: str, values: Values, *place: str | int) -> str:
        """Return ``text`` with its placeholders replaced, or as it is after an error."""
        try:
            return placeholders.expand(text, values)
        except LookupError as error:
            self._report_unknown(str(error.args[0]), place)
        except ValueError as error:
            self.diagnostics.site_error(str(error), *place)
        return text

    def _report_unknown(self, name: str, place: Place) -> None:
        if name == "account":
            names = f"option {place[1]} of the site names"
            if place[0] != "options":
                names = "the site's directives name"
            self.diagnostics.profile_error(f"`account` is needed: {names} it", "account")
            return
        key = re.sub("per_(job|cpu|gpu)", "per_node", name)
        if key == "memory_per_node" and self.queue.memory_per_node:
            key = "cpus_per_node, by which CPU workers share its memory"
        if name not in placeholders.RESOURCES:
            key = f"resources: {{{key.removesuffix('_per_node')}: …}}"
        message = f"{{{name}}} is not known: queue {self.key} does not state {key}"
        if any(name in queue.options for queue in self.site.queues.values()):
            message = f"{{{name}}} is not known: queue {self.key} does not have this option"
        if name == "gpu_type" and self.queue.gpu_types:
            message = (
                f"{{gpu_type}} cannot be left out here, and jobs in queue {self.key} may "
                "have any type: write it as :NAME={gpu_type}, as gpu:{gpu_type}: or as a line of "
                "its own, or state the queue's gpu_type"
            )
        self.diagnostics.site_error(message, *place)

    # -- directives of the site whose values a profile chooses: its `options` ----------------------
    def _options(self) -> list[Directive]:
        """Return the directives of `options`; an option without a value has none.

        Reports values that are missing or not allowed.
        """
        wanted, found = self.profile.options, []
        for name in wanted:
            if name not in self.site.options:
                self._report_unknown_option(name)
        for name, option in self.site.options.items():
            value = self._option_value(name, option)
            if value is None or not option.directive:
                continue
            place = ("options", name, "directive")
            text = self._expanded(option.directive, {**self._values, name: value}, *place)
            position = partial(self.spec.site_position, *place)
            if name in wanted:
                position = partial(self.spec.position, "options", name)
            found.append(Directive(text, position))
        return found

    def _option_value(self, name: str, option: Option) -> str | None:
        """Return the value of an option: of the profile, the default, or both together."""
        wanted = self.profile.options.get(name)
        value = wanted
        replaces = wanted is not None and not option.extends_default(wanted)
        if option.default is not None and not replaces:
            default = self._expanded(option.default, self._values, "options", name, "default")
            value = default + (wanted or "")
        if wanted is not None and value is not None:
            self._check_option(name, option, value)
        elif value is None and option.required:
            self._option_error(
                name,
                f"option `{name}` is needed: the site requires it",
                option.hint or f"options: {{{name}: …}}",
            )
        return value

    def _check_option(self, name: str, option: Option, value: str) -> None:
        """Report a value that does not match, or that would set other options of the directive."""
        if not option.matches(value):
            message = f"{name} {value!r} does not match the site's pattern {option.pattern}"
            self._option_error(name, message, option.hint or "")
        elif self._sets(name, option, value) != self._sets(name, option, NEUTRAL):
            message = f"{name} {value!r} would set another option of the batch scheduler"
            self._option_error(name, message)

    def _option_error(self, name: str, message: str, hint: str = "") -> None:
        related = self.spec.site_position("options", name)
        self.diagnostics.profile_error(message, "options", name, hint=hint, related=related)

    def _sets(self, name: str, option: Option, value: str) -> set[str] | None:
        """Return the options that its lines set with ``value``; None if one is not valid."""
        token = f"{{{name}}}"
        texts = [option.directive or ""]
        if not option.directive:
            gpus, nodes = bool(self.shape.gpus), self.shape.nodes
            texts = [*request_texts(self.site, self.scheduler, gpus=gpus, nodes=nodes)]
            texts += self.site.submit_arguments
        found: set[str] = set()
        try:
            for text in texts:
                if token in text:
                    found |= self.scheduler.options(text.replace(token, value))
        except ValueError:
            return None
        return found

    def _report_unknown_option(self, name: str) -> None:
        """Report an option that no queue has; note one that only other queues have."""
        if any(name in other.options for other in self.site.queues.values()):
            message = f"option `{name}` is ignored: queue {self.key} does not have it"
            self.diagnostics.note(message)
            return
        known = sorted(self.site.options)
        listed = f"it has {', '.join(known)}" if known else "it has none"
        message = f"site {self.spec.site.name} has no option `{name}`: {listed}"
        hint = did_you_mean(name, known)
        self.diagnostics.profile_error(message, "options", name, hint=hint)

    # -- directives of the profile's keys ----------------------------------------------------------
    def _of_keys(self) -> Iterator[Directive]:
        """Yield the directives of the keys with one of their own; refuse keys without."""
        for key in DIRECTIVE_KEYS:
            value, scheduler = getattr(self.profile, key), self.scheduler
            if value is None or (key == "reservation" and self._reservation_is_queue()):
                continue
            if text := getattr(scheduler, f"{key}_directive", ""):
                line = placeholders.expand(text, {key: value})
                yield Directive(line, partial(self.spec.position, key), by_user=True)
            else:
                message = f"{scheduler.name} has no directive for `{key}`"
                self.diagnostics.profile_error(message, key)

    def _reservation_is_queue(self) -> bool:
        """Return whether the directive of the queue names the reservation."""
        gpus, nodes = bool(self.shape.gpus), self.shape.nodes
        texts = request_texts(self.site, self.scheduler, gpus=gpus, nodes=nodes)
        has_queue = "queue" in placeholders.names(" ".join(texts))
        return self.scheduler.reservation_is_queue and has_queue


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

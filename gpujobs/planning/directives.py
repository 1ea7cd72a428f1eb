"""The directives of a job: request, account and extra directives of the site, then the user's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..config import placeholders
from ..config.site import File, Site, Variable
from ..errors import Position, Problem
from ..schedulers import Scheduler
from .account import find_account
from .diagnostics import Diagnostics
from .shape import JobShape, Place, Values


def own_request(site: Site, queue_key: str, gpus: bool) -> tuple[str, ...] | None:
    """Return the request that the site file has for a queue; None: the built-in one is used."""
    queue = site.queues[queue_key]
    if gpus:
        return queue.request or site.request
    return queue.cpu_request or site.cpu_request


def request_texts(site: Site, scheduler: Scheduler, queue_key: str, gpus: bool) -> tuple[str, ...]:
    """Return the request and the extra directives of a queue, with their placeholders."""
    request = own_request(site, queue_key, gpus)
    if request is None:
        request = scheduler.request if gpus else scheduler.cpu_request
    extra = site.queues[queue_key].directives
    return (*request, *(site.directives if extra is None else extra))


class DirectiveWriter:
    """Writes the directives of jobs of ``shape`` in the site's queue ``queue_key``."""

    def __init__(
        self, diagnostics: Diagnostics, scheduler: Scheduler, queue_key: str, shape: JobShape
    ) -> None:
        self.diagnostics, self.scheduler = diagnostics, scheduler
        self.queue_key, self.shape = queue_key, shape
        self.spec = diagnostics.spec
        self.site = self.spec.site.site
        self.queue = self.site.queues[queue_key]

    def lines(self) -> tuple[str, ...]:
        """Return the directives without their prefix. Reports those that are not allowed."""
        account = find_account(self.diagnostics, self.scheduler, self.queue_key)
        values: Values = {
            **self.shape.values(),
            "queue": self.site.queue_name(self.queue_key),
            "gpu_type": self.queue.gpu_type,
            "account": account[1] if account else None,
        }
        lines = self._request(values)
        if account:
            lines.append(placeholders.expand(account[0], {"account": account[1]}))
        lines = self.scheduler.joined([*lines, *self._extra(values)])
        return (*lines, *self._own(lines))

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

    def _request(self, values: Values) -> list[str]:
        gpus = bool(self.shape.gpus)
        name, built_in = "cpu_request", self.scheduler.cpu_request
        if gpus:
            name, built_in = "request", self.scheduler.request
        own = own_request(self.site, self.queue_key, gpus)
        if own is None:
            return [line for text in built_in if (line := _expand_if_known(text, values))]
        place: Place = (name,)
        if getattr(self.queue, name):
            place = ("queues", self.queue_key, name)
        if gpus:
            self._check_asks_for_gpus(own, place)
        return self._expand(own, values, place)

    def _check_asks_for_gpus(self, request: tuple[str, ...], place: Place) -> None:
        names = placeholders.names(" ".join(request))
        if self.queue.exclusive or any(name.startswith("gpus_") for name in names):
            return
        message = (
            "no line asks for GPUs, "
            f"so queue {self.queue_key} must be `exclusive: true` (whole nodes)"
        )
        self.diagnostics.site_error(message, *place)

    def _extra(self, values: Values) -> list[str]:
        if self.queue.directives is None:
            return self._expand(self.site.directives, values, ("directives",))
        place = ("queues", self.queue_key, "directives")
        return self._expand(self.queue.directives, values, place)

    def _expand(self, texts: tuple[str, ...], values: Values, place: Place) -> list[str]:
        """Return the site's lines with their placeholders replaced."""
        lines = []
        for n, text in enumerate(texts):
            line = text
            try:
                line = placeholders.expand(text, values)
            except LookupError as error:
                self._report_unknown(str(error.args[0]), (*place, n))
            except ValueError as error:
                self.diagnostics.site_error(str(error), *place, n)
            position = self.spec.site_position(*place, n)
            self._check(line, self.scheduler.managed, position=position, writer="gpujobs")
            lines.append(line)
        return lines

    def _report_unknown(self, name: str, place: Place) -> None:
        if name == "account":
            message = "`account` is needed: the site's directives name it"
            self.diagnostics.profile_error(message, "account")
            return
        key = re.sub("per_(job|cpu|gpu)", "per_node", name)
        message = f"{{{name}}} is not known: queue {self.queue_key} does not state {key}"
        self.diagnostics.site_error(message, *place)

    def _own(self, lines: list[str]) -> tuple[str, ...]:
        """Return the directives of the profile, which must not repeat options of ``lines``."""
        taken = set(self.scheduler.managed)
        for line in lines:
            try:
                taken |= self.scheduler.options(line)
            except ValueError:
                continue  # reported when it was expanded
        own = self.spec.profile.directives
        for n, line in enumerate(own):
            position = self.spec.position("directives", n)
            self._check(line, taken, position=position, writer="gpujobs or the site")
        return own

    def _check(self, line: str, taken: Iterable[str], *, position: Position, writer: str) -> None:
        if message := self._objection(line, taken, writer):
            self.diagnostics.add(Problem(message, position))

    def _objection(self, line: str, taken: Iterable[str], writer: str) -> str:
        """Return why the directive is not allowed, or ``""``.

        The options ``taken`` are set by ``writer``.
        """
        try:
            refused = self.scheduler.options(line) & self.scheduler.refused.keys()
            clash = self.scheduler.clash(line, taken)
        except ValueError as error:
            return f"`{line}` is no directive: {error}"
        if refused:
            return f"`{line}` is refused: {self.scheduler.refused[min(refused)]}"
        if clash:
            return f"`{line}`: {clash} is written by {writer}"
        return ""


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

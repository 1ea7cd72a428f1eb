"""The directive lines of one job that ask for resources: from the site's request, its account and its directives."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..config import placeholders
from ..config.site import Account, File, Variable
from ..errors import Position
from ..schedulers import Scheduler
from .diagnostics import Diagnostics
from .shape import JobShape

Place = tuple[str | int, ...]
Values = Mapping[str, int | float | str | None]


def own_request(diagnostics: Diagnostics, key: str, gpus: bool) -> tuple[str, ...] | None:
    """Return the request that the site writes for its queue ``key``, or None where the built-in one serves."""
    site = diagnostics.spec.site.site
    queue = site.queues[key]
    return (queue.request or site.request) if gpus else (queue.cpu_request or site.cpu_request)


class DirectiveWriter:
    """Writes the lines of jobs of ``shape`` in the site's queue ``key``."""

    def __init__(
        self, diagnostics: Diagnostics, scheduler: Scheduler, key: str, shape: JobShape
    ) -> None:
        self.diagnostics, self.scheduler, self.key, self.shape = diagnostics, scheduler, key, shape
        self.spec = diagnostics.spec
        self.site = diagnostics.spec.site.site
        self.queue = self.site.queues[key]

    def lines(self) -> tuple[str, ...]:
        """Return the lines, without their prefix: resources, account, the site's further ones, the user's own."""
        account = self._account()
        values: Values = {
            **self.shape.values(),
            "queue": self.site.queue_name(self.key),
            "gpu_type": self.queue.gpu_type,
            "account": account[1] if account else None,
        }
        lines = self._request(values)
        if account:
            lines.append(placeholders.expand(account[0].directive, {"account": account[1]}))
        lines = self.scheduler.joined([*lines, *self._further(values)])
        return (*lines, *self._own(lines))

    def visible_devices(self) -> str:
        """Return who says which GPUs are a job's: scheduler, exclusive, variable:NAME or file:NAME."""
        said = (
            self.queue.visible_devices
            or self.site.visible_devices
            or self.scheduler.visible_devices
        )
        if said is None and self.queue.exclusive:
            return "exclusive"
        if said is None:
            message = f"who says which GPUs are a job's? {self.scheduler.name} itself does not"
            hint = "visible_devices: exclusive, {variable: NAME}, {file: NAME}, or scheduler where a prolog sets it"
            self.diagnostics.site(message, "queues", self.key, hint=hint)
            return ""
        if said == "exclusive" and not self.queue.exclusive:
            message = f"`visible_devices: exclusive` takes all GPUs of a node, so queue {self.key} must be `exclusive: true`"
            self.diagnostics.site(message, "visible_devices")
        if isinstance(said, Variable):
            return f"variable:{said.variable}"
        return f"file:{said.file}" if isinstance(said, File) else said

    def _request(self, values: Values) -> list[str]:
        own = own_request(self.diagnostics, self.key, bool(self.shape.gpus))
        if own is None:
            built_in = self.scheduler.request if self.shape.gpus else self.scheduler.cpu_request
            return [line for text in built_in if (line := _expand_if_known(text, values))]
        name = "request" if self.shape.gpus else "cpu_request"
        place: Place = ("queues", self.key, name) if getattr(self.queue, name) else (name,)
        asks = any(found.startswith("gpus_") for found in placeholders.names(" ".join(own)))
        if self.shape.gpus and not asks and not self.queue.exclusive:
            message = f"no line asks for GPUs, so queue {self.key} must be `exclusive: true` (whole nodes)"
            self.diagnostics.site(message, *place)
        return self._expand(own, values, place)

    def _further(self, values: Values) -> list[str]:
        if self.queue.directives is not None:
            return self._expand(self.queue.directives, values, ("queues", self.key, "directives"))
        return self._expand(self.site.directives, values, ("directives",))

    def _expand(self, texts: tuple[str, ...], values: Values, place: Place) -> list[str]:
        lines = []
        for n, text in enumerate(texts):
            line = text
            try:
                line = placeholders.expand(text, values)
            except LookupError as error:
                self._unknown(str(error.args[0]), (*place, n))
            except ValueError as error:
                self.diagnostics.site(str(error), *place, n)
            self._check(line, self.scheduler.managed, self.spec.site_position(*place, n), "gpujobs")
            lines.append(line)
        return lines

    def _unknown(self, name: str, place: Place) -> None:
        if name == "account":
            self.diagnostics.profile(
                "`account` is needed: the site's directives name it", "account"
            )
            return
        wanted = re.sub("per_(job|cpu|gpu)", "per_node", name)
        self.diagnostics.site(
            f"{{{name}}} is not known: queue {self.key} does not say {wanted}", *place
        )

    def _own(self, lines: list[str]) -> tuple[str, ...]:
        taken = set(self.scheduler.managed)
        for line in lines:
            try:
                taken |= self.scheduler.options(line)
            except ValueError:
                continue  # reported where it was expanded
        own = self.spec.profile.directives
        for n, line in enumerate(own):
            self._check(line, taken, self.spec.position("directives", n), "gpujobs or the site")
        return own

    def _check(
        self, line: str, taken: frozenset[str] | set[str], position: Position, by: str
    ) -> None:
        try:
            refused = self.scheduler.options(line) & self.scheduler.refused.keys()
            if refused:
                self.diagnostics.at(
                    f"`{line}` is refused: {self.scheduler.refused[min(refused)]}", position
                )
            elif option := self.scheduler.clash(line, taken):
                self.diagnostics.at(f"`{line}`: {option} is written by {by}", position)
        except ValueError as error:
            self.diagnostics.at(f"`{line}` is no directive: {error}", position)

    def _account(self) -> tuple[Account, str] | None:
        """Return how the account is named, and the account; None where there is none."""
        asked = self.spec.profile.account
        account = self.queue.account or self.site.account
        if account is None and (
            "account" in self.site.given or self.scheduler.on_this_machine
        ):
            if asked:
                self.diagnostics.note(
                    f"account {asked} is ignored: site {self.spec.site.name} has none"
                )
            return None
        account = account or Account(directive=self.scheduler.account_directive)
        place: Place = ("queues", self.key, "account") if self.queue.account else ("account",)
        related = self.spec.site_position(*place)
        if not asked:
            if account.required:
                message = f"site {self.spec.site.name} requires an `account`"
                self.diagnostics.profile(
                    message, "account", related=related, hint=account.hint or "account: NAME"
                )
            return None
        if account.pattern and not re.fullmatch(account.pattern, asked):
            message = f"account {asked!r} does not match the site's pattern {account.pattern}"
            self.diagnostics.profile(message, "account", related=related, hint=account.hint or "")
        return account, asked


def _expand_if_known(text: str, values: Values) -> str:
    """Expand a built-in line; what the site does not say is not asked for: a part of the line, or the line."""
    if values["gpu_type"] is None:
        text = text.replace("{gpu_type}:", "")
    for name in placeholders.names(text):
        if (
            values.get(name) is None
        ):  # as in select={nodes}:ncpus={cpus_per_node}:mem={memory_per_node:MB}mb
            text = re.sub(rf":\w+=\{{{name}(:\w+)?\}}\w*", "", text)
    try:
        return placeholders.expand(text, values)
    except LookupError:
        return ""

"""The directives of a job: request, account and extra directives of the site, then the user's."""

from __future__ import annotations

import re

from ..config import placeholders
from ..config.site import Site
from ..config.sitekinds import File, Variable
from ..schedulers import Scheduler
from .account import find_account
from .diagnostics import Diagnostics
from .directivecheck import Directive, DirectiveChecker, check_memory_units
from .options import option_directives, reservation
from .resources import resource_values
from .shape import JobShape, Place, Values


def own_request(
    site: Site, queue_key: str, *, gpus: bool, nodes: int
) -> tuple[Place, tuple[str, ...]] | None:
    """Return the request that the site file has for jobs of ``nodes`` in a queue, and its place.

    None: the built-in one is used. A queue's request overrides all of the site's.
    """
    names = ["request"] if gpus else ["cpu_request"]
    if gpus and nodes > 1:
        names.insert(0, "multi_node_request")
    for place, section in ((("queues", queue_key), site.queues[queue_key]), ((), site)):
        for name in names:
            if lines := getattr(section, name):
                return (*place, name), lines
    return None


def request_texts(
    site: Site, scheduler: Scheduler, queue_key: str, *, gpus: bool, nodes: int
) -> tuple[str, ...]:
    """Return the request and the extra directives of a queue, with their placeholders."""
    request = scheduler.request if gpus else scheduler.cpu_request
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
            built_in = self.scheduler.request if gpus else self.scheduler.cpu_request
            lines = [_expand_if_known(text, values) for text in built_in]
            return [Directive(line) for line in lines if line]
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
            text = line
            if values["gpu_type"] is None and self.queue.gpu_types:
                text = line = placeholders.without(text, "gpu_type")
            if not text:
                continue
            try:
                check_memory_units(text, self.scheduler)
                line = placeholders.expand(text, values)
            except LookupError as error:
                self._report_unknown(str(error.args[0]), (*place, n))
            except ValueError as error:
                self.diagnostics.site_error(str(error), *place, n)
            directives.append(Directive(line, self.spec.site_position(*place, n)))
        return directives

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

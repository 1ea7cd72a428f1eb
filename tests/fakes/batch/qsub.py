"""qsub of OpenPBS: the options of a script and of a command line, and what they ask for; `torque` has its own."""

from __future__ import annotations

import getopt
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, ClassVar

import engine

NUMERIC = {"ncpus", "ngpus", "mpiprocs", "ompthreads"}
CHUNK = NUMERIC | {"mem", "vmem", "host", "gpu_type", "system"}
PLACES = {"free", "pack", "scatter", "vscatter", "excl", "exclhost", "shared"}
USAGE = "usage: qsub [-a date_time] [-A account_string] [-c interval]\n"


class Refused(Exception):
    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.words, self.code = words, code


class Qsub:
    """One qsub: the options of its script and its command line, and what they ask for."""

    letters = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:W:v:VXz"
    of_array = "J"
    after_array = "afterany"
    bad_option = USAGE
    bad_name = f"qsub: illegal -N value\n{USAGE}"
    bad_clock = "Illegal attribute or resource value Resource_List.walltime"
    too_long = ("Job violates queue and/or server resource limits", 188)
    no_script = "qsub: script file:: No such file or directory"
    dos = "qsub: script contains cr, lf"
    allowed: ClassVar[dict[str, str]] = {"k": r"[oed]*|n", "j": r"oe|eo|n"}
    """Values of options."""

    def __init__(self, folder: Path, config: dict[str, Any], server: str) -> None:
        self.folder, self.config, self.server = folder, config, server
        self.options: dict[str, str] = {}
        self.resources: dict[str, str] = {}

    def run(self, arguments: list[str]) -> int:
        given, rest = self._getopt(arguments)
        if rest and not Path(rest[0]).is_file():
            raise Refused(self.no_script.format(rest[0]), 1)
        script = Path(rest[0]).read_bytes().decode() if rest else sys.stdin.read()
        self._directives(script, given)
        self.check_values()
        if "\r\n" in script:
            raise Refused(self.dos, 1)
        needs, walltime = self.needs(), self._walltime()
        queue = self._queue(walltime)
        if os.geteuid() == 0 and not self.config.get("acl_roots"):
            raise self.no("Bad UID for job execution", 175, "MSG=root user root not allowed")
        indexes = self._indexes()
        extra = {
            "options": self.options, "resources": self.resources, "home": os.environ.get("HOME", "/"),
            "path": os.environ.get("PATH", ""), "arguments": shlex.join(arguments), "queue": queue,
        }  # fmt: skip
        name = self.options.get("N", Path(rest[0]).name if rest else "STDIN")
        answer = engine.ask(
            self.folder, "submit", "submit", name=name, queue=queue, script=script, cwd=str(Path.cwd()),
            needs=needs, walltime=walltime, indexes=indexes, hold="h" in self.options, extra=extra, after=self._after(),
        )  # fmt: skip
        if answer["fault"] == "refuse":
            raise self.no("Unauthorized Request ", 159)
        if answer["fault"] == "garble":
            print("\x00\x01%&# 77 \ufffd")
        elif "z" not in self.options:
            print(f"{answer['id']}{'[]' if indexes else ''}.{self.server}")
        return 0

    def no(self, words: str, code: int, more: str = "") -> Refused:
        """Return a refusal of the server; ``more`` is what only Torque says."""
        return Refused(f"qsub: {words}", code)

    # -- options ---------------------------------------------------------------------------------------------
    def _getopt(self, arguments: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
        try:
            return getopt.getopt(arguments, self.letters)
        except getopt.GetoptError as error:
            words = f"qsub: invalid option -- '{error.opt}'\n{self.bad_option}"
            raise Refused(words, 2) from None

    def _directives(self, script: str, given: list[tuple[str, str]]) -> None:
        for line in script.splitlines():
            text = line.strip()
            if text.startswith("#PBS"):
                self._directive(text[4:])
            elif text and not text.startswith("#") and text != ":":
                break
        for name, value in given:
            self._take(name, value)

    def _directive(self, text: str) -> None:
        wrong = f"qsub: directive error: {text.strip()} "
        try:
            found, rest = getopt.getopt(shlex.split(text), self.letters)
        except getopt.GetoptError as error:
            raise self.no_such_directive(error.opt[0], wrong) from None
        if rest:
            raise Refused(wrong, 1)
        for name, value in found:
            self._take(name, value)
        if "J" in self.options and self.options.get("r") == "n":
            raise Refused(f"qsub: cannot submit non-rerunable Array Job\n{wrong}", 255)

    def no_such_directive(self, letter: str, wrong: str) -> Refused:
        return Refused(f"qsub: invalid option -- '{letter}'\n{wrong}", 1)

    def _take(self, name: str, value: str) -> None:
        if name != "-l":
            self.options[name[1:]] = value
            return
        for item in re.split(r",(?=[\w.]+(?:=|,|$))", value):
            key, _, text = item.partition("=")
            self.resources[key] = text

    def check_values(self) -> None:
        name = self.options.get("N", "")
        if re.search(r"[\s/]", name):
            raise Refused(self.bad_name, 2)
        if len(name) > 230:
            raise Refused("qsub: Job name is too long ", 2)
        for letter, pattern in self.allowed.items():
            if not re.fullmatch(pattern, self.options.get(letter, "n")):
                raise Refused(f"qsub: illegal -{letter} value\n{USAGE}", 2)

    # -- what they ask for -----------------------------------------------------------------------------------
    def _after(self) -> list[int]:
        """Return the ids of ``-W depend=afterany:1.s:2[].s``."""
        text = self.options.get("W", "")
        found = []
        for part in text.removeprefix("depend=").split(",") if text else ():
            kind, *ids = part.split(":")
            for id_ in ids:
                wanted = self.after_array if "[]" in id_ else "afterany"
                if kind != wanted or not re.match(r"\d+(\[\])?(\.|$)", id_):
                    raise self.no("illegal -W value", 1)
                found.append(int(re.split(r"[\[.]", id_)[0]))
        return found

    def _indexes(self) -> list[int] | None:
        text = self.options.get(self.of_array)
        if text is None:
            return None
        found = re.fullmatch(r"(\d+)-(\d+)(?:[:%]\d+)?", text)
        if not found or not self.is_array(int(found[1]), int(found[2])):
            raise Refused(f"qsub: illegal -J value\n{USAGE}", 2)
        indexes = list(range(int(found[1]), int(found[2]) + 1))
        limit = self.config.get("max_array_size", 10000)
        if len(indexes) > limit:
            raise self.large_array(limit)
        return indexes

    def is_array(self, first: int, last: int) -> bool:
        return first < last

    def large_array(self, limit: int) -> Refused:
        return Refused("qsub: Array job exceeds server or queue size limit", 3)

    def _queue(self, walltime: int | None) -> str:
        queues = self.config["queues"]
        name = self.options.get("q", next(iter(queues)))
        if name not in queues:
            raise self.no("Unknown queue", 170, "MSG=requested queue not found")
        if not queues[name].get("enabled", True):
            raise self.no("Queue is not enabled", 173)
        if walltime and walltime > queues[name].get("max_walltime", walltime):
            words, code = self.too_long
            raise self.no(words, code, "MSG=cannot satisfy queue max walltime requirement")
        return str(name)

    def _walltime(self) -> int | None:
        text = self.resources.get("walltime")
        if text is None:
            return None
        if not re.fullmatch(r"\d+(:\d+){0,2}", text):
            raise self.no(self.bad_clock, 166)
        seconds = 0
        for part in text.split(":"):
            seconds = seconds * 60 + int(part)
        return seconds

    def needs(self) -> dict[str, Any]:
        """Return the resources on each node, in the engine's words."""
        own = CHUNK | set(self.config.get("resources", ()))
        top = self.resources
        for name in top:
            if name not in own | {"walltime", "select", "place", "nodes"}:
                raise self.no(f"Unknown resource Resource_List.{name}", 187)
        place = top.get("place", "free")
        if not set(place.split(":")) <= PLACES:
            raise self.no("Illegal attribute or resource value Resource_List.place", 166)
        count, chunk = self._chunk()
        where = "select" if "select" in top else "Resource_List"
        for name, value in chunk.items():
            if name not in own:
                raise self.no(f"Unknown resource: {name}", 187)
            if name in NUMERIC and not value.isdigit():
                raise self.no("Illegal attribute or resource value", 166)
            if name in ("mem", "vmem") and not re.fullmatch(r"\d+([kmgt]?[bw])?", value, re.I):
                raise self.no(f"Illegal attribute or resource value {where}.{name}", 166)
        top.setdefault("select", ":".join([count, *(f"{k}={v}" for k, v in chunk.items())]))
        return {
            "nodes": int(count), "slots": int(chunk.get("ncpus", 1)), "gpus": int(chunk.get("ngpus", 0)),
            "exclusive": "excl" in place, "mpiprocs": int(chunk.get("mpiprocs", 1)),
            "threads": int(chunk.get("ompthreads", chunk.get("ncpus", 1))),
        }  # fmt: skip

    def _chunk(self) -> tuple[str, dict[str, str]]:
        """Return how many parts the job has, and the resources of each."""
        top = self.resources
        if "select" in top and "nodes" in top:
            raise Refused("qsub: Cannot be used with select or place: nodes", 6)
        mixed = {name: top[name] for name in top if name in CHUNK}
        if "select" in top and mixed:
            words = 'qsub: "-lresource=" cannot be used with "select" or "place", resource is: '
            raise Refused(words + next(iter(mixed)), 5)
        if "nodes" in top:
            count, *parts = top["nodes"].split(":")
            return count, {"ncpus": dict(part.partition("=")[::2] for part in parts).get("ppn", "1")}  # fmt: skip
        if "select" in top:
            count, *parts = top["select"].split(":")
            return count, dict(part.split("=", 1) for part in parts)
        return "1", mixed

"""Hints for keys that do not exist: words of other programs first, then similar keys.

The most similar key would often be a wrong one: `partitions` resembles `options`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ..text import alike, nearest
from .document import missing_space
from .synonyms import DETAILS, INSIDE, LINE, WORDS

_FIRST = {"Workers": "count", "Container": "image", "Network": "protocol", "Environment": "setup"}
"""The key of these sections that a plain value is probably meant for."""

_OF_A_SITE = ("Site", "Queue")
_MOST_LISTED = 12
"""Keys of a section that are listed for a word that is like none of them."""
_SAME_LEVEL, _ELSEWHERE = 0.8, 0.87
"""How similar a word must be to a key: to be a misspelling of it, not another word."""


def unknown_key(
    word: str,
    model: str,
    place: str,
    known: Iterable[str],
    keys: Sequence[str],
    *,
    python: bool = False,
) -> str:
    """Return a hint for the key ``word``, which the section ``model`` at ``place`` does not have.

    ``place`` ends with a dot, ``known`` are the keys of the section, ``keys`` the dotted ones of
    the whole file. ``python``: the file is made of keywords.
    """
    if hint := missing_space(word):
        return hint
    word, known = word.replace("-", "_"), sorted(known)
    target = INSIDE.get(model, {}).get(word)
    if model not in _OF_A_SITE:
        target = target or WORDS.get(word)
    group = ".".join(place.split(".")[:2]) + "." if place.startswith("groups.") else ""
    if target is None and model == "Queue" and word in keys:
        return f"`{word}` is for the whole site: write it outside of `queues`"
    if target is None and group and word in keys:
        return f"`{word}` is for the whole cluster: write it outside of `groups`"
    if target is None:
        fitting = (key for key in keys if key.startswith("groups.") is bool(group))
        there = (f"{group}{key.removeprefix('groups.')}" for key in fitting)
        here = [f"{place}{key}" for key in known]
        return misspelled(word, here, list(there)) or _keys_like(word, known, model)
    if " " in target:
        return target
    if target == LINE and model not in _OF_A_SITE:
        option = word.replace("_", "-")
        return f"write it as a line for the batch scheduler, as in directives: [--{option}=NAME]"
    if group and f"groups.{target}" in keys:
        target = f"{group}{target}"
    details = f": {DETAILS[target]}" if target in DETAILS and not place else ""
    return f"use {keyword_text(target) if python else f'`{target}`'}{details}"


def _keys_like(word: str, known: Sequence[str], model: str) -> str:
    """Return all keys of a small section; of a large one those like ``word``, and where all are."""
    if len(known) <= _MOST_LISTED:
        return f"keys: {', '.join(known)}"
    kind = "site" if model in _OF_A_SITE else "profile"
    found = alike(word, known)
    similar = f"similar keys: {', '.join(found)}; " if found else ""
    return f"{similar}`gpujobs schema {kind}` lists all"


def unknown_keyword(
    word: str, known: Sequence[str], refused: Mapping[str, str], keys: Sequence[str]
) -> str:
    """Return a hint for an unknown keyword in Python; see `unknown_key`.

    ``refused`` are keywords without a meaning there, and their replacements.
    """
    target = WORDS.get(word, "")
    if " " in target:
        return target
    if (first := target.partition(".")[0]) in refused:
        return refused[first]
    if target == LINE:
        return f"use directives=['--{word.replace('_', '-')}=NAME']"
    if target:
        return f"use {keyword_text(target)}"
    if exact := next((key for key in keys if key.rpartition(".")[2] == word), ""):
        return f"use {keyword_text(exact)}"
    near = nearest(word, [*known, *refused], _SAME_LEVEL)
    if near in refused:
        return refused[near]
    if near:
        return f"did you mean `{near}`?"
    parts = {key.rpartition(".")[2]: key for key in keys}
    if near := nearest(word, parts, _ELSEWHERE):
        return f"did you mean {keyword_text(parts[near])}?"
    return "`gpujobs schema profile` lists the keys, which are keywords here"


def no_mapping(model: str, key: str, value: object, *, python: bool) -> str:
    """Return a hint for a plain value of a key that has the keys of ``model``, or ""."""
    first = _FIRST.get(model)
    if not first or not isinstance(value, str | int | float):
        return ""
    if python:
        return f"n_workers={value!r}" if model == "Workers" else f"{key}={{{first!r}: {value!r}}}"
    text = f"{key}: {{{first}: {value}}}"
    return f"{text} for CPU workers; `gpus` has a worker each" if model == "Workers" else text


_GPUS_IN_PYTHON = (
    (
        "gpus: auto takes the free ones, else",
        "n_workers='auto' takes the free ones, gpus_per_job=0",
    ),
    ("gpus: 0", "gpus_per_job=0"),
    (r"gpus: (\d+(?: or \d+)?)", r"n_workers for \1 GPUs"),
)
"""The number of GPUs, which Python classes do not have, in hints."""


def in_python(hint: str, keys: Iterable[str]) -> str:
    """Return a hint such as ``queue: main`` as keywords; ``keys`` are those of profiles."""
    for words, python in _GPUS_IN_PYTHON:
        hint = re.sub(rf"(?<![\w.]){words}(?!\w)", python, hint)
    names = "|".join(sorted(map(re.escape, keys), key=len, reverse=True))
    pattern = rf"(?<![\w.{{])`?({names}): (\{{[^{{}}]*\}}|\[[^\[\]]*\]|\d+:[\d:]+|[\w.+-]+)`?"
    return re.sub(pattern, lambda found: keyword_text(found[1], _python_value(found[2])), hint)


def _python_value(text: str) -> str:
    if text == "…" or re.fullmatch(r"\d+(\.\d+)?", text):
        return text
    if text[0] in "[{":
        inner = [part.partition(": ") for part in text[1:-1].split(", ")]
        items = [
            f"{name!r}: {_python_value(value)}" if value else _python_value(name)
            for name, _, value in inner
        ]
        return f"{text[0]}{', '.join(items)}{text[-1]}"
    return {"true": "True", "false": "False"}.get(text, repr(text))


def keyword_text(key: str, value: str = "…") -> str:
    """Return a dotted key of a profile as a keyword: ``workers={'threads': …}``."""
    first, *rest = key.split(".")
    for name in reversed(rest):
        value = f"{{{name!r}: {value}}}"
    return f"{first}={value}"


def misspelled(word: str, here: Sequence[str], keys: Sequence[str]) -> str:
    """Return "did you mean …?" for the key of which ``word`` is a misspelling, or "".

    A key of that name elsewhere comes first, then the keys ``here``, then all.
    """
    word = word.replace("-", "_")
    for names, similarity in ((keys, 1.0), (here, _SAME_LEVEL), (keys, _ELSEWHERE)):
        by_last_part = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
        if near := nearest(word, by_last_part, similarity):
            return f"did you mean `{by_last_part[near]}`?"
    return ""

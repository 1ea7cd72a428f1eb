"""Sections of a site file: accounts, options, network, MPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..text import matches
from . import sitekinds as kinds
from .model import (
    FLAG,
    NUMBER,
    PATTERN,
    SCRIPT,
    TEXT,
    WORD,
    Model,
    Scalar,
    choice,
    optional,
    required,
)


@dataclass(frozen=True, kw_only=True)
class Account(Model):
    """How the account (project, budget, bank) is named."""

    directive: str | None = optional(
        Scalar(kinds.account_directive, {"type": "string"}),
        "the directive, with {account}; if left out, the batch scheduler's usual one",
    )
    required: bool = optional(FLAG, "refuse profiles without an account", default=False)
    pattern: str | None = optional(PATTERN, "that the whole account must match")
    hint: str | None = optional(TEXT, "shown if the account does not match")


@dataclass(frozen=True, kw_only=True)
class Charge(Model):
    """The charge for a GPU that is granted for an hour."""

    per_gpu_hour: float = required(NUMBER, "amount, in units")
    unit: str = required(WORD, "SU, EUR")


@dataclass(frozen=True, kw_only=True)
class Mpi(Model):
    """How one command is started on every node of a job."""

    command: tuple[str, ...] | None = optional(
        kinds.LAUNCHER, "launcher; {ranks} {nodes} {ranks_per_node} are replaced"
    )
    setup: str = optional(
        SCRIPT, "bash text before the launcher, e.g. module load openmpi", default=""
    )


@dataclass(frozen=True, kw_only=True)
class SiteNetwork(Model):
    """How dask's processes may communicate."""

    interface: str | None = optional(
        WORD, "as `ip link` names it on the compute nodes, e.g. ib0 or hsn0"
    )
    protocols: tuple[kinds.Protocol, ...] = optional(
        kinds.PROTOCOLS,
        "allowed ones, best first; listing ucxx consents to unencrypted traffic inside the job",
        default=("tcp",),
    )
    encryption: Literal["required", "optional"] = optional(
        choice("required", "optional"),
        "required: refuse profiles with unencrypted traffic between nodes",
        default="optional",
    )
    ports: str | None = optional(
        kinds.PORTS,
        "range of ports at which dask's processes accept connections from other nodes, as "
        "8000-8100; default: any",
    )

    def check(self) -> None:
        """Refuse a protocol that has no encryption where it is required."""
        if self.encryption == "required" and "ucxx" in self.protocols:
            raise ValueError("has `encryption: required`, but ucxx has no encryption")


_PART_OF_A_LINE = r"[A-Za-z0-9_./-]+"


@dataclass(frozen=True, kw_only=True)
class Option(Model):
    """A directive of the site with a value that a profile may choose."""

    directive: str | None = optional(
        kinds.OPTION_DIRECTIVE,
        "with {NAME}, the name of the option; if left out, `request` or another line has {NAME}",
    )
    default: str | None = optional(
        kinds.OPTION_DEFAULT,
        "value for profiles without one; if left out, they have no directive",
    )
    pattern: str = optional(
        PATTERN, "regular expression of a valid value", default=r"[A-Za-z0-9_.:+=,/-]+"
    )
    required: bool = optional(FLAG, "refuse profiles without a value", default=False)
    hint: str | None = optional(TEXT, "shown if a value does not match, or is missing")
    separator: Literal["+", ",", ":"] | None = optional(
        choice("+", ",", ":"), "a value that starts with it is added to the default"
    )

    def check(self) -> None:
        """Refuse a default of an option that must be chosen, and additions to no default."""
        if self.required and self.default is not None:
            raise ValueError("cannot have `default` with `required: true`")
        if self.separator and self.default is None:
            raise ValueError("needs `default` with `separator`: values are added to it")

        if not self.directive and self.default is None and not self.required:
            message = "needs `default` or `required: true` without `directive`"
            raise ValueError(f"{message}: the line with it cannot be left out")

    def matches(self, value: str) -> bool:
        """Return whether a profile may choose ``value``.

        In a line of the site, without a pattern, it is one word: "," and ":" begin other resources.
        """
        if not self.directive and "pattern" not in self.given:
            return matches(_PART_OF_A_LINE, value)
        return matches(self.pattern, value)

    def extends_default(self, value: str) -> bool:
        """Return whether the profile's ``value`` is added to the default."""
        return self.separator is not None and value.startswith(self.separator)

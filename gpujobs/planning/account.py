"""The account of a job: the site says how it is named, the profile which one it is."""

from __future__ import annotations

from ..config.queue import Account
from ..schedulers import Scheduler
from ..text import matches
from .diagnostics import Diagnostics


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
    _check(diagnostics, account, queue_key)
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


def _check(diagnostics: Diagnostics, account: Account, queue_key: str) -> None:
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

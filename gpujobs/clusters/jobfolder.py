"""Job folders: all files of a cluster, which anyone may submit, also without gpujobs.

``FOLDER`` has the scripts, a README and the plan; ``FOLDER/ID`` is the cluster's folder, with its
record. The scripts find it from where they are submitted, so that it may be copied before.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..config.spec import ClusterSpec
from ..errors import InputError, Problem
from ..injob.certificate import make_certificate
from ..injob.folder import DamagedError, Folder, JsonObject, read_file
from ..injob.names import CERTIFICATE, KEY
from ..planning.plan import Plan
from ..planning.render import portable
from ..schedulers import get_scheduler
from ..text import plural
from ..version import __version__
from .folder import disk_errors, private_folder, write_new
from .ledger import ClusterRecord, Ledger, Submission
from .monitor import client_of
from .submit import intent_of, make_folder, new_record, scripts_of, send_text, undoing

_PLAN = "plan.json"
_README = """\
# {id}

{jobs} on the site {site}, rendered by gpujobs {version}. To submit them, in this folder:

{submit}

Copy or move the folder before that; then leave it until they have ended. Submit it once.
The output will be in {id}/logs/run.log. To cancel: {cancel}
With gpujobs: gpujobs submit FOLDER, gpujobs status FOLDER, gpujobs cancel FOLDER.
"""


# -- render a profile into a folder ----------------------------------------------------------------
def write(
    spec: ClusterSpec, plan: Plan, folder: Path, plan_json: Mapping[str, object], cluster_id: str
) -> None:
    """Write the job folder of a new cluster, mode 0700. It has no key; the first job makes that.

    Raises InputError if the profile needs gpujobs at its submission, or the folder is not empty.
    """
    _check(spec, plan, folder)
    scripts = scripts_of(spec, portable(plan), cluster_id)
    names = [f"{plan.name}-{one.jobs.group or 'workers'}-{one.first}.sh" for one in scripts]
    if len(names) == 1:
        names = [f"{plan.name}.sh"]
    planned = tuple(intent_of(script, name) for script, name in zip(scripts, names, strict=True))
    record = new_record(replace(plan, root=str(folder.absolute())), cluster_id)
    record = replace(record, planned=planned)
    make_folder(spec, record, encrypted=False)
    with disk_errors(folder):
        folder.chmod(0o700)
        for script, name in zip(scripts, names, strict=True):
            write_new(folder / name, script.text)
            (folder / name).chmod(0o700)
        write_new(folder / _PLAN, json.dumps(plan_json, indent=1) + "\n")
        write_new(folder / "README.md", _readme(record))
    Ledger.create(record)


def _check(spec: ClusterSpec, plan: Plan, folder: Path) -> None:
    hint = "gpujobs submit PROFILE"
    if not plan.scheduler.submit_folder:
        message = f"jobs of {plan.scheduler.name} cannot find their job folder"
        raise InputError(message, hint=hint)
    for key, needed in (("after", spec.profile.after), ("requeue", plan.lifetime.attempts > 1)):
        if needed:
            message = f"`{key}` needs the ids of other jobs, which a job folder does not have"
            raise InputError(Problem(message, spec.position(key), hint=hint))
    private_folder(folder)
    with disk_errors(folder):
        if any(folder.iterdir()):
            raise InputError(f"{folder} is not empty", hint="-o names a new folder")


def _readme(record: ClusterRecord) -> str:
    scheduler = get_scheduler(record.scheduler)(record.multi_cluster)

    def command(words: Sequence[str]) -> str:
        return shlex.join([record.commands.get(words[0], words[0]), *words[1:]])

    submit = [
        f"    {command([*scheduler.submit_command(), *one.arguments])}"
        f" {scheduler.reads_script}{shlex.quote(one.script)}"
        for one in record.planned
    ]
    return _README.format(
        id=record.id,
        jobs=plural(sum(planned.count for planned in record.planned), "job"),
        site=record.site,
        version=__version__,
        submit="\n".join(submit),
        cancel=command(scheduler.cancel_command(["JOB"])),
    )


# -- submit it -------------------------------------------------------------------------------------
def submit(folder: Path, ledger: Ledger) -> ClusterRecord:
    """Submit the scripts of a job folder as they are now. After a refusal it can be tried again.

    Raises NoSuchClusterError, InputError, RefusedError or UnavailableError.
    """
    record = ledger.get(f"{folder}/")
    if record.submissions or record.intent or (record.path / "ended").exists():
        hint = "gpujobs render PROFILE -o FOLDER makes another one"
        raise InputError(f"{folder} was submitted already", hint=hint)
    texts = [_text(record, planned) for planned in record.planned]
    client = client_of(record)
    others = client.find(record.id)  # those of a copy of the folder
    _make_key(record)
    with undoing(record, client, ledger, partial(_undo, record, ledger)):
        for planned, text in zip(record.planned, texts, strict=True):
            record = send_text(record, planned, text, client, ledger, others=others)
    return record


def read_plan(record: ClusterRecord) -> JsonObject:
    """Return the output of `gpujobs plan --json` in a job folder; {} if it was removed."""
    return Folder(record.argument).read(_PLAN)


def _text(record: ClusterRecord, planned: Submission) -> str:
    path = record.path.parent / planned.script
    if path.name != planned.script:
        raise InputError(f"the script {planned.script} is not a file of the job folder")
    try:
        return read_file(path)
    except FileNotFoundError:
        raise InputError(f"there is no {path}") from None
    except DamagedError as error:
        raise InputError(str(error)) from None


def _make_key(record: ClusterRecord) -> None:
    if record.encrypted and not (record.path / CERTIFICATE).exists():
        with disk_errors(record.path):
            make_certificate(record.path)


def _undo(record: ClusterRecord, ledger: Ledger) -> None:
    """Make the folder as it was before, unless a job may have been accepted."""
    for name in (KEY, CERTIFICATE):
        (record.path / name).unlink(missing_ok=True)
    if not (record.path / "ended").exists():
        ledger.update(record.id, intent=None)

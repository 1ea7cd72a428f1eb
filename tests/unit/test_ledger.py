"""The ledger and the cluster's folder: private, atomic, and never in the way of other clusters."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import ssl
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from gpujobs.clusters import clusterfolder as folder
from gpujobs.clusters.clusterfolder import private_folder, write_atomically
from gpujobs.clusters.folderstate import FolderReader, FolderState, read_state
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.errors import GpujobsError, InputError, NoSuchClusterError
from gpujobs.injob.certificate import make_certificate
from gpujobs.injob.folder import EndKind
from gpujobs.injob.jobevents import ExitRecord
from gpujobs.injob.names import CERTIFICATE, KEY, RECORD
from gpujobs.schedulers import JobId

from ..support.each import each
from ..support.events import write_events
from ..support.jobevents import write_job


def record(cluster: str = "svd-0001", **changes: object) -> ClusterRecord:
    values = {
        "id": cluster, "site": "here", "scheduler": "slurm", "folder": f"/nosuch/{cluster}", "created": 1.0,
        "groups": (GroupRecord("", workers=4, workers_per_job=2, gpus_per_job=2),), "run": ("a", "b c"), "encrypted": True,
    }  # fmt: skip
    return ClusterRecord(**(values | changes))  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state")
    first = record(
        submissions=(Submission("7", 0, 2, array=True), Submission("8", 2, 1)), notes=("x",)
    )
    ledger.add(first)
    assert ledger.get("svd-0001") == first
    assert first.jobs == {0: JobId("7", 0), 1: JobId("7", 1), 2: JobId("8")}
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / "svd-0001.json").stat().st_mode & 0o777 == 0o600


def test_a_record_is_parsed_again_whenever_its_text_has_changed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(record())
    first = ledger.get("svd-0001")
    assert ledger.get("svd-0001") is first
    path = tmp_path / "svd-0001.json"
    before = path.stat()
    path.write_text(path.read_text().replace('"here"', '"away"'))  # of equal size, and in place
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ledger.get("svd-0001").site == "away"
    path.write_text("{")
    with pytest.raises(GpujobsError, match="is not a valid record"):
        ledger.get("svd-0001")


def test_a_ledger_keeps_few_of_the_records_that_were_asked_for(tmp_path: Path) -> None:
    """Also the same ones, as long as they are asked for again and again."""
    ledger = Ledger(tmp_path / "state")
    names = [f"svd-{number:04x}" for number in range(30)]
    for name in names:
        ledger.add(record(name))
    first = ledger.get(names[0])
    kept = []
    for name in names[1:]:
        kept.append(weakref.ref(ledger.get(name)))
        assert ledger.get(names[0]) is first
    gc.collect()
    assert 0 < sum(found() is not None for found in kept) < 10


@each(
    ("changes", "elastic"),
    [
        ({}, True),
        ({"layout": "allocation", "ranks": 1}, True),
        ({"layout": "allocation", "ranks": 0}, False),
        ({"layout": "allocation", "ranks": 1, "scheduler": "local"}, False),
        ({"layout": "mpi", "ranks": 4}, False),
    ],
)
def test_jobs_come_and_go_in_layout_workers_and_in_allocations_with_nodes_of_their_own(
    changes: dict[str, object], elastic: bool
) -> None:
    assert record(**changes).elastic is elastic  # type: ignore[arg-type]


def test_the_beginning_of_one_cluster_is_enough_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "state")
    for name, finished in (
        ("a-1", True),
        ("a-2", False),
        ("ab", False),
        ("b-1", True),
        ("b-2", True),
    ):
        ledger.add(record(name, finished=finished))
    assert [ledger.resolve(text) for text in ("a-", "a-1", "ab", "b-1", "c", "", "./a-")] == [
        "a-2", "a-1", "ab", "b-1", "c", "", "./a-",
    ]  # fmt: skip
    for text, names in (("a", "a-2, ab"), ("b", "b-1, b-2")):
        with pytest.raises(
            NoSuchClusterError, match=rf"begins with '{text}'\n.*name one: {names}$"
        ):
            ledger.resolve(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-" / "c-1").mkdir(parents=True)
    assert ledger.resolve("a-") == "a-2"  # a directory is no job folder
    (tmp_path / "a-" / "c-1" / RECORD).touch()
    with pytest.raises(NoSuchClusterError, match=r"a job folder here.*\n.*\./a- or a-2"):
        ledger.resolve("a-")


def test_a_directory_that_has_the_name_of_a_program_is_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "state")
    ledger.add(record("svd-0001"))
    monkeypatch.chdir(tmp_path)
    for name in ("svd", "svd-0001"):
        (tmp_path / name / "x").mkdir(parents=True)
    assert ledger.get("svd-0001").id == "svd-0001"
    with pytest.raises(NoSuchClusterError, match=r"no cluster 'svd'\n.*did you mean svd-0001"):
        ledger.get("svd")


def test_arrays_may_start_at_one() -> None:
    assert Submission("7", 10, 3, array=True, first_index=1).jobs == {
        10: JobId("7", 1),
        11: JobId("7", 2),
        12: JobId("7", 3),
    }


def test_a_cluster_is_added_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(record())
    with pytest.raises(FileExistsError):
        ledger.add(record())


@pytest.mark.parametrize("name", ["svd-0002", "../svd-0001", ".hidden", "a/b"])
def test_an_unknown_name_is_no_cluster(tmp_path: Path, name: str) -> None:
    Ledger(tmp_path).add(record())
    with pytest.raises(NoSuchClusterError) as caught:
        Ledger(tmp_path).get(name)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("job", ["105", "105_3", "105.server", "105[3].server"])
def test_the_hint_names_the_cluster_of_a_job(tmp_path: Path, job: str) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(record())
    ledger.end_submission("svd-0001", Submission("105.server", 1, 1))
    with pytest.raises(NoSuchClusterError, match=f"hint: job {re.escape(job)} belongs to svd-0001"):
        ledger.get(job)
    with pytest.raises(NoSuchClusterError, match="status --all"):
        ledger.get("1052")


def test_changes_of_many_at_once_are_all_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(record())
    threads = [
        threading.Thread(target=ledger.end_submission, args=("svd-0001", Submission(f"7{n}", n, 1)))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ledger.get("svd-0001").jobs) == list(range(20))


@pytest.mark.parametrize(
    "content",
    [b'{"id": "half', b'{"version": 99}', b"", b"[1]", b"null", b'{"version": 1}', b'"x"', b"\xff\xfe\0", b'{"version": 1, "submissions": 3}'],
)  # fmt: skip
def test_a_broken_record_does_not_hide_the_others(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(record())
    (tmp_path / "half-0000.json").write_bytes(content)
    assert [found.id for found in ledger.all()] == ["svd-0001"]
    (message,) = caplog.messages
    assert "half-0000.json is not a valid record of a cluster" in message
    with pytest.raises(GpujobsError, match=r"jobs called half-0000 are in the queue"):
        ledger.get("half-0000")


def test_a_crash_before_the_replacement_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(record())
    monkeypatch.setattr(
        Path,
        "replace",
        lambda self, target: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(GpujobsError, match="No space left"):
        ledger.update("svd-0001", finished=True)
    monkeypatch.undo()
    assert ledger.get("svd-0001") == record()
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".json", ".lock")]


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    private_folder(mine / "deep")
    assert mine.stat().st_mode & 0o777 == (mine / "deep").stat().st_mode & 0o777 == 0o700
    (mine / "link").symlink_to(tmp_path)
    with pytest.raises(InputError, match="is a symbolic link"):
        private_folder(mine / "link")
    (mine / "deep").chmod(0o770)
    with pytest.raises(InputError, match="is writable by other users"):
        private_folder(mine / "deep")
    if os.geteuid() == 0:
        (mine / "deep").chmod(0o700)
        os.chown(mine / "deep", 12345, 12345)
        with pytest.raises(InputError, match="belongs to another user"):
            private_folder(mine / "deep")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used"):
        private_folder(tmp_path / "file" / "below")


def test_a_state_folder_that_cannot_be_used_is_chosen_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for state, said in (
        (tmp_path / "file" / "below", "cannot be used"),
        (tmp_path / "file", "cannot write in"),
    ):
        with pytest.raises(GpujobsError, match=rf"{said}.*\n  hint: XDG_STATE_HOME"):
            Ledger(state).add(record())
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(InputError, match=r"chmod 700 .*, or use another folder: XDG_STATE_HOME"):
        Ledger(tmp_path / "open").add(record())


def test_a_new_folder_of_a_cluster_is_private_and_complete(tmp_path: Path) -> None:
    made = tmp_path / "root" / "svd-0001"
    folder.make(made, encrypted=True)
    assert {path.name for path in made.iterdir()} == {
        "jobs",
        "logs",
        "scripts",
        ".made-by-gpujobs",
        "injob.pyz",
        "reserve",
        "tls-cert.pem",
        "tls-key.pem",
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in [made, *made.iterdir()])
    with pytest.raises(InputError, match="exists already"):
        folder.make(made, encrypted=True)
    assert read_state(made) == FolderState()


def test_the_first_end_counts(tmp_path: Path) -> None:
    folder.end(tmp_path, EndKind.CANCELLED, 143, "first")
    folder.end(tmp_path, EndKind.DONE, 0, "second")
    ended = read_state(tmp_path).ended
    assert ended is not None and (ended.kind, ended.reason) == (EndKind.CANCELLED, "first")


def test_the_files_of_a_folder_give_its_state(tmp_path: Path) -> None:
    made = tmp_path / "root" / "svd-0001"
    folder.make(made, encrypted=False)
    write_job(made, 3, "left", code=0)
    (made / "jobs" / "4.jsonl").write_text('{"event": "left", "code": 0\n{"event": "left"')
    write_job(made, 5, "failed", reason="because\n")
    write_job(made, 6, "started", node="n2")
    (made / "jobs" / "6.claim").write_text("7[1]\n")
    write_events(
        made,
        {"event": "opened", "address": "tls://h:1", "dashboard": 8787},
        {"event": "connected", "worker": "a", "row": {"address": "x"}},
        {"event": "connected", "worker": "b"},
        {"event": "disconnected", "worker": "b"},
    )
    (made / "ended").write_text(json.dumps({"exit_code": 1, "reason": "run: ended: \x1b[31mred"}))
    state = read_state(made)
    assert state.ended is not None and state.ended.reason == "run: ended: [31mred"
    assert state.jobs[3].left == ExitRecord(0, "n1") and state.jobs[5].reason == "because"
    assert {number for number, job in state.jobs.items() if job.reason} == {5}
    assert {number for number, job in state.jobs.items() if job.facts.node is not None} == {6}
    assert state.jobs[6].node == "n2" and state.claims == {6: JobId("7", 1)}
    dask = state.dask
    assert (dask.address, dask.dashboard, list(dask.connected)) == ("tls://h:1", 8787, ["a"])
    assert dask.seen == {"a", "b"} and state.encrypted is True


def test_a_reader_sees_every_change(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    reader, path = FolderReader(tmp_path), tmp_path / "jobs" / "0.jsonl"
    assert reader.read() == FolderState()
    write_job(tmp_path, 0, "left", code=1)
    assert reader.read().jobs[0].left == ExitRecord(1, "n1")
    write_job(tmp_path, 0, "left", code=2)
    assert reader.read().jobs[0].left == ExitRecord(2, "n1")
    path.unlink()
    assert FolderReader(tmp_path).read() == FolderState()


def test_the_tail_of_a_log_is_read_without_control_characters(tmp_path: Path) -> None:
    log = tmp_path / "p-0001" / "logs" / "run.log"
    log.parent.mkdir(parents=True)
    assert folder.tail(tmp_path / "p-0001", "run.log") == []
    log.write_bytes(b"junk\n" * 50_000 + b"\x1b[2Jlast \xff\n")
    assert folder.tail(tmp_path / "p-0001", "run.log", 2) == ["junk", "[2Jlast \ufffd"]
    tmp_path.chmod(0o777)
    assert folder.tail(tmp_path / "p-0001", "run.log") == []


@pytest.mark.parametrize("package", ["cryptography", ""])
def test_a_certificate_proves_its_cluster_to_a_strict_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """The Python of a job may have no cryptography: then openssl makes it."""
    if not package:
        monkeypatch.setitem(sys.modules, "cryptography", None)
    make_certificate(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {CERTIFICATE, KEY}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    # distributed's contexts, as strict as those of Python 3.13
    certificate, key = str(tmp_path / CERTIFICATE), str(tmp_path / KEY)
    client = ssl.create_default_context(cafile=certificate)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_flags = False, ssl.VerifyFlags.VERIFY_X509_STRICT
    server.load_cert_chain(certificate, key)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (ours, other, ours, other):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    found = ours.getpeercert()
    assert found is not None
    begin, end_ = (ssl.cert_time_to_seconds(str(found[name])) for name in ("notBefore", "notAfter"))
    assert begin < time.time() - 3500 and end_ > time.time() + 365 * 86400
    with pytest.raises(FileExistsError):
        make_certificate(tmp_path)


def test_without_a_program_for_certificates_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LookupError, match="has no package cryptography, and openssl does not work"):
        make_certificate(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x", "one")
    write_atomically(tmp_path / "x", "two")
    assert (tmp_path / "x").read_text() == "two"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"site": 3}', b'{"site": {"document": 1}}', b"\xff"]
)
def test_a_specification_that_cannot_be_read_is_an_error_with_its_path(
    tmp_path: Path, content: bytes
) -> None:
    from gpujobs.config.spec import read_spec

    path = tmp_path / "spec.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"spec\.json"):
        read_spec(path)


def test_a_new_submission_reopens_a_finished_cluster(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(record(finished=True))
    assert not ledger.begin_submission("svd-0001", Submission("", 0, 1)).finished

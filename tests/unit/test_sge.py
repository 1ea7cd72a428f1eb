"""Grid Engine's formats and parsers, on what the real one printed (tests/data/transcripts/sge)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.errors import InputError, UnavailableError
from gpujobs.schedulers import NOT_LISTED, CommandResult, JobId, JobState, JobStatus, Reply
from gpujobs.schedulers.sge import GridEngine

from ..support.each import each
from .support import plan

SGE = GridEngine()
TRANSCRIPTS = Path(__file__).parents[1] / "data" / "transcripts" / "sge"


def said(name: str, exit_code: int = 0, stderr: str = "") -> CommandResult:
    return CommandResult(("qstat",), exit_code, (TRANSCRIPTS / name).read_text(), stderr)


@pytest.mark.parametrize(
    ("stdout", "number"),
    [("2\n", "2"), ("42.1-8:1\n", "42"), ("7.1-8:2\n", "7"),
     ('warning: "-w" option has already been set, overriding previous setting\n22\n', "22"), ("", None), ("garbage\n", None),
     ('Your job 4 ("x") has been submitted\n', None)],
)  # fmt: skip
def test_the_id_is_read_from_the_answer_of_qsub(stdout: str, number: str | None) -> None:
    assert SGE.parse_submit(stdout) == number


def test_qstat_tells_the_states_of_arrays_and_jobs() -> None:
    ids = (
        [JobId(str(n)) for n in range(43, 50)]
        + [JobId("48", n) for n in range(1, 10)]
        + [JobId("99")]
    )
    found = SGE.parse_status(said("qstat-mixed.xml"), ids)
    assert {str(job): status.state.value for job, status in found.items()} == {
        "43": "RUNNING", "44": "PENDING", "45": "PENDING", "46": "PENDING", "47": "FAILED", "49": "SUSPENDED",
        "48": "UNKNOWN",  # it is listed, but as an array
        "48[1]": "RUNNING", "48[2]": "RUNNING", **{f"48[{n}]": "PENDING" for n in range(3, 9)},
    }  # fmt: skip
    assert (found[JobId("48", 2)].node, found[JobId("43")].node) == ("node2", "node1")
    assert found[JobId("45")].reason == "held, or waiting for another job"
    assert [str(job) for job, status in found.items() if status.stuck] == [
        "47"
    ]  # Eqw stays until it is cancelled


@each(
    ("letters", "state"),
    [
        *[(word, "PENDING") for word in ("qw", "hqw", "hRwq", "Rq", "Rqw")],
        *[(word, "RUNNING") for word in ("r", "t", "hr", "Rr", "Rt", "dr", "dt", "dRr", "dRt")],
        *[(word, "SUSPENDED") for word in ("s", "S", "T", "ts", "tS", "tT", "Rs", "Rts", "RS", "RtT", "ds", "dS", "dT")],
        *[(word, "FAILED") for word in ("Eqw", "Ehqw", "EhRqw", "dEqw")],
        ("", "UNKNOWN"), ("z", "UNKNOWN"),
    ],
)  # fmt: skip
def test_letters_of_grid_engine_are_a_state(letters: str, state: str) -> None:
    text = (
        f"<job_info><job_list><JB_job_number>5</JB_job_number><state>{letters}</state><tasks>2-3:1</tasks></job_list>"
        "</job_info>"
    )
    found = SGE.parse_status(CommandResult(("qstat",), 0, text), [JobId("5", 3)])
    assert found[JobId("5", 3)].state.value == state
    assert found[JobId("5", 3)].native == letters


def test_details_tell_why_jobs_wait_and_how_they_failed() -> None:
    pending, failed = JobState.PENDING, JobState.FAILED
    listed = {JobId("7", n): JobStatus(pending, "qw", "waiting") for n in range(2, 6)}
    listed |= {
        JobId("5", 1): JobStatus(failed, "Eqw", stuck=True),
        JobId("6"): JobStatus(failed, "Eqw", stuck=True),
    }
    listed |= {
        JobId("4"): JobStatus(pending, "hqw", "held"),
        JobId("2", 1): JobStatus(JobState.RUNNING, "r"),
    }
    assert SGE.detail_command(listed) == [
        "qstat",
        "-j",
        "5,6,7",
    ]  # one question, and only about what is not clear
    found = {
        str(job): status.reason
        for job, status in SGE.parse_detail(said("qstat-j.txt"), listed).items()
    }
    assert found == {
        **{f"7[{n}]": '(-l slots=1) cannot run in queue "node1" because it offers only hc:slots=0.000000' for n in range(2, 6)},
        "5[1]": 'can\'t open output file "/nosuch/f": No such file or directory',
        "6": "can't chdir to /nosuch: No such file or directory",
    }  # fmt: skip
    assert SGE.detail_command({JobId("2", 1): listed[JobId("2", 1)]}) is None
    turned_off = "===\njob_number: 7\nscheduling info:   (Collecting of scheduler job information is turned off)\n"
    assert SGE.parse_detail(CommandResult(("qstat",), 0, turned_off), listed) == {}


def test_the_accounting_tells_how_jobs_ended() -> None:
    ids = [JobId(str(n)) for n in range(50, 61)] + [JobId("57", n) for n in range(1, 10)]
    found = SGE.parse_accounting(said("qacct.txt"), ids)
    assert {str(job): (status.state.value, status.exit_code) for job, status in found.items()} == {
        "50": ("COMPLETED", 0), "51": ("FAILED", 3), "52": ("FAILED", 139), "53": ("TIMEOUT", 137), "54": ("COMPLETED", 0),
        "55": ("FAILED", 12), "56": ("FAILED", 127), "58": ("FAILED", 137), "60": ("FAILED", 137),
        **{f"57[{n}]": ("FAILED", 7) if n == 3 else ("COMPLETED", 0) for n in range(1, 9)},
    }  # fmt: skip
    assert found[JobId("53")].reason == "qmaster enforced h_rt, h_cpu, or h_vmem limit"
    assert found[JobId("52")].reason == "ended by a signal (Segmentation fault)"
    assert found[JobId("51")].node == "node2"
    unknown = CommandResult(("qacct",), 1, "", "error: job id 59 not found\n")
    assert (
        SGE.parse_accounting(unknown, [JobId("59")]) == {}
    )  # it never appears for a job deleted while pending
    assert SGE.accounting_commands([JobId("57", 1), JobId("57", 2), JobId("6")]) == [
        ["qacct", "-j", "6"],
        ["qacct", "-j", "57"],
    ]


@each(
    ("failed", "exit_status", "category", "lasted", "state"),
    [
        ("0    ", "0", "NONE", "1s", "COMPLETED"),
        ("37  : qmaster enforced h_rt, h_cpu, or h_vmem limit", "137 (Killed)", "-l h_rt=00:01:40", "101s", "TIMEOUT"),
        ("37  : qmaster enforced", "137 (Killed)", "NONE", "50s", "TIMEOUT"),  # the queue's limit
        ("37  : qmaster enforced", "137 (Killed)", "-l h_rt=00:01:40,h_vmem=1G", "50s", "OUT_OF_MEMORY"),
        ("37  : qmaster enforced", "137 (Killed)", "-l h_rt=100,h_vmem=1G", "105.5s", "TIMEOUT"),
        ("18  : shepherd returned error", "0", "NONE", "9s", "NODE_FAIL"),
        ("21  : in recognizing job", "0", "NONE", "9s", "NODE_FAIL"),
        ("25  : rescheduling", "0", "NONE", "9s", "PREEMPTED"),
        ("26  : opening input/output file", "0", "NONE", "0s", "FAILED"),
        ("", "", "", "", "UNKNOWN"),  # cut off
    ],
)  # fmt: skip
def test_the_end_of_a_job_follows_from_its_failure_and_exit_status(
    failed: str, exit_status: str, category: str, lasted: str, state: str
) -> None:
    block = (
        f"====\njobnumber 5\ntaskid undefined\nfailed {failed}\nexit_status {exit_status}\nru_wallclock {lasted}\n"
        f"category {category}\n"
    )
    assert (
        SGE.parse_accounting(CommandResult(("qacct",), 0, block), [JobId("5")])[
            JobId("5")
        ].state.value
        == state
    )


def test_last_of_several_records_counts() -> None:
    text = "====\njobnumber 5\ntaskid 1\nfailed {}\nexit_status 0\n"
    both = text.format("25  : rescheduling") + text.format("0")
    assert (
        SGE.parse_accounting(CommandResult(("qacct",), 0, both), [JobId("5", 1)])[
            JobId("5", 1)
        ].state
        is JobState.COMPLETED
    )


DOWN = (
    "error: commlib error: got select error (Connection refused)\n"
    'Unable to run job: unable to send message to qmaster using port 6444 on host "node1": got send error\nExiting.\n'
)


@each(
    ("result", "away"),
    [
        (CommandResult(("qsub",), 1, "", DOWN), True),
        (CommandResult(("qstat",), 1, "", DOWN), True),
        (CommandResult(("qdel",), 1, 'unable to send message to qmaster using port 6444 on host "n": got send error\n'), True),
        (said("qstat-down.xml"), True),  # exit code 0
        (CommandResult(("qstat",), None, problem="qstat did not respond within 60 s"), True),
        (CommandResult(("qsub",), 1, "", "error: failed receiving gdi request response for mid=1 (got syncron message receive timeout error)."), True),
        (CommandResult(("qsub",), 1, "", 'Unable to run job: Job was rejected because job requests unknown queue "nosuch.q"\nExiting.\n'), False),
        (CommandResult(("qsub",), 1, "", "Unable to run job: error: no suitable queues\nExiting.\n"), False),
        (CommandResult(("qsub",), 1, "", 'Unable to run job: denied: host "login2" is no submit host\n'), False),
        (CommandResult(("qstat",), 1, "", "error: commlib error: access denied (client IP resolved to host name \"x\")\n"), False),
        (said("qstat-empty.xml"), False),
    ],
)  # fmt: skip
def test_away_is_told_from_refused(result: CommandResult, away: bool) -> None:
    assert (SGE.reply(result) is Reply.NONE) is away


@dataclass(frozen=True)
class Answers(SchedulerClient):
    """A client whose commands have fixed results."""

    results: Mapping[str, CommandResult] = field(default_factory=dict)

    def _run(self, argv: Any, **_: Any) -> CommandResult:
        return self.results[argv[0]]


def query(job: JobId, **results: CommandResult) -> JobStatus:
    """Return the status of a job by the results of the commands."""
    return Answers(SGE, timeout=0.0, results=results).status([job], [])[job]


def test_what_is_not_listed_is_not_finished() -> None:
    missing = CommandResult(("qacct",), 1, "", "error: job id 59 not found\n")
    empty = said("qstat-empty.xml")
    assert query(JobId("59"), qstat=empty, qacct=missing) == NOT_LISTED
    assert query(JobId("57", 3), qstat=empty, qacct=said("qacct.txt")).exit_code == 7
    # An error message, or truncated output, says nothing about the jobs.
    failure = CommandResult(("qstat", "-xml"), 1, "", "error: no such thing")
    status = query(JobId("59"), qstat=failure, qacct=missing)
    assert status.state is JobState.UNKNOWN and status != NOT_LISTED
    truncated = CommandResult(("qstat", "-xml"), 0, "<job_info><queue_info>")
    with pytest.raises(UnavailableError, match="the answer of qstat is incomplete: <job_info>"):
        query(JobId("59"), qstat=truncated, qacct=missing)


def test_jobs_are_found_by_the_full_name_only() -> None:
    text = "".join(
        f"<job_list><JB_job_number>{n}</JB_job_number><JB_name>{name}</JB_name><tasks>1-2:1</tasks></job_list>"
        for n, name in ((1, "quickstart-7f3a"), (2, "quickstart-1234"), (3, "quickstart-7f3a"))
    )
    assert SGE.parse_find(f"<job_info>{text}</job_info>", "quickstart-7f3a") == {"1", "3"}
    assert SGE.parse_find("<job_info", "quickstart-7f3a") == set()


def test_cancel_is_one_call() -> None:
    assert SGE.cancel_commands({"7": [], "8": [1, 2, 3, 6]}) == [["qdel", "7", "8.1-3", "8.6"]]
    assert SGE.show_id(JobId("8", 3)) == "8.3"


@pytest.mark.parametrize(
    ("stdout", "gone"),
    [
        ('denied: job "99999" does not exist\ndenied: job "61" does not exist\n', True),
        ('alice has registered the job 7 for deletion\ndenied: job "61" does not exist\njob 63 is already in deletion\n', True),
        ('bob - you do not have the necessary privileges to delete the job "64"\n', False),
    ],
)  # fmt: skip
def test_a_cancel_that_came_too_late_is_told_from_a_refused_one(stdout: str, gone: bool) -> None:
    assert SGE.already_ended(CommandResult(("qdel",), 1, stdout)) is gone


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("-pe smp 4", {"-pe"}), ("-l gpu=2,h_vmem=4G", {"-l gpu", "-l h_vmem"}), ("-l exclusive", {"-l exclusive"}),
        ("-p -10 -q long", {"-p", "-q"}), ("-hard -l a=1 -soft -l b=2", {"-l a", "-l b"}), ("-ac allow=L", {"-ac"}),
    ],
)  # fmt: skip
def test_the_options_of_a_line_are_recognized(line: str, options: set[str]) -> None:
    assert SGE.options(line) == options


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"directives": ["-l h_rt=9:0:0"]}, "h_rt is written by gpujobs"),
        ({"directives": ["-l h_vmem=1G,gpu=4"]}, "gpu is written by the site"),
        ({"directives": ["-V"]}, "whole environment"),
        ({"directives": ["-l s_rt=60"]}, "soft limit"),
        ({"directives": ["-t 1-4"]}, "-t is written by gpujobs"),
        ({"name": "2d-svd"}, "no digit or - first"),
    ],
)  # fmt: skip
def test_what_a_profile_cannot_ask_for_is_refused(
    tmp_path: Path, profile: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        plan(tmp_path, {"gpus": 2, "gpu_type": "a100", "walltime": "1h", **profile}, "myriad")


def test_gpus_of_each_slot_may_be_a_fraction(tmp_path: Path) -> None:
    site = {
        "description": "gpu counts each slot", "scheduler": "sge", "visible_devices": {"variable": "SGE_HGR_gpu"},
        "request": ["-pe smp {cpus_per_job}", "-l gpu={gpus_per_cpu}"],
        "queues": {"main": {"gpus_per_node": 2, "cpus_per_node": 8, "gpu_fractions": True, "max_walltime": "1d"}},
    }  # fmt: skip
    from ..support.cli import text_of

    (tmp_path / "own.yaml").write_text(text_of(site))
    made = plan(tmp_path, {"gpus": 2, "walltime": "1h"}, str(tmp_path / "own.yaml"))
    assert list(made.groups[0].lines) == ["-pe smp 8", "-l gpu=0.25"]


def test_site_must_say_which_gpus(tmp_path: Path) -> None:
    site = "description: x\nscheduler: sge\nqueues: {main: {gpus_per_node: 2, cpus_per_node: 8, max_walltime: 1d}}\n"
    (tmp_path / "own.yaml").write_text(site)
    with pytest.raises(InputError, match="itself does not list a job's GPUs"):
        plan(tmp_path, {"gpus": 2, "walltime": "1h"}, str(tmp_path / "own.yaml"))


def test_the_largest_array_and_an_estimate_are_read() -> None:
    assert (
        SGE.parse_limit("max_aj_instances             2000\nmax_aj_tasks                 75000\n")
        == 75000
    )
    assert SGE.parse_limit("max_aj_tasks                 0\n") is None
    assert SGE.parse_limit("") is None
    fits = CommandResult(("qsub",), 0, "verification: found suitable queue(s)\n")
    assert "can run it" in SGE.parse_estimate(fits)
    offers = 'Unable to run job: Job 25 (-l gpu=200) cannot run at host "node1" because it offers only hc:gpu=4.000000\n'
    assert SGE.parse_estimate(CommandResult(("qsub",), 1, "", offers)) == ""

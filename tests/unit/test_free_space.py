"""A file system that is nearly full: `plan`, `submit` and `doctor` say so."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.clusters.space import quota_problems, space_problems
from gpujobs.doctor.checks import CheckState
from gpujobs.doctor.host import _check_directory

from ..support.each import each
from .support import make_spec


@dataclass(frozen=True)
class Disk:
    """What os.statvfs returns."""

    f_bavail: int
    f_files: int
    f_favail: int
    f_frsize: int = 4096


@pytest.mark.parametrize(
    ("disk", "problem"),
    [
        (Disk(2**18, 10**6, 10**4), ""),
        (Disk(2**18, 0, 0), ""),  # it counts no inodes
        (Disk(2**17, 10**6, 10**4), "has only 512MiB left"),
        (Disk(2**18, 10**6, 9999), "has room for only 9999 more files"),
    ],
)
def test_a_disk_that_is_nearly_full_is_a_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, problem: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    expected = [f"{home} {problem}"] if problem else []
    assert list(space_problems(home / "not" / "there")) == expected
    notes = make_cluster_plan(make_spec(home, {"gpus": 1}, str(home / "s.yaml"))).notes
    assert any(note == f"warning: {home} {problem}" for note in notes) == bool(problem)
    check = _check_directory("~/.gpujobs")
    assert check.state == (CheckState.WARNING if problem else CheckState.OK)
    assert problem in check.result


# The layouts are those of public sources; only names and amounts are changed.
# Lustre: print_quota in lustre/utils/lfs.c, and, with brackets, the page "Lustre" of the manual of OzSTAR.
LFS = """Disk quotas for usr alice (uid 10000):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
{name} {kbytes:>7s}  1048576 2097152       -       1       0       0       -
uid 10000 is using default file quota setting
"""
LFS_LONG = "/scratch/of/the/project\n               "  # more than 15 characters
LFS_VERBOSE = """lustre-MDT0000_UUID
                      9       -       0       -       1       -       0       -
lustre-OST0000_UUID
                1047552       - 1048576       -       -       -       -       -
Total allocated inode limit: 0, total allocated block limit: 1048576
"""
# quota-tools: heading, print_fs_location and showquotas in quota.c; without -w, with -w, and with -p.
QUOTA = """Disk quotas for user alice (uid 1000): {none}
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
{rows}"""
QUOTA_ROWS = """       /dev/sda1 2097152* 2000000 2097152   6days     123       0       0        
/dev/mapper/vg0-home
                     100       0       0            9990   10000       0        
"""
QUOTA_WIDE = "/dev/mapper/vg0-home     100       0       0            9990   10000       0\n"
QUOTA_P = "       /dev/sda1 2097152       0       0       0  995001  1000000       0       0\n"
# Spectrum Scale: IBM's page of mmlsquota, GPFSLsQuotaCommandTest.java of StoRM, and, with a fileset, the manual of WashU RIS.
# The grace period of two words is a guess: no source shows one that runs.
MMLSQUOTA = """                         Block Limits                                    |     File Limits
Filesystem type             KB      quota      limit   in_doubt    grace |    files   quota    limit in_doubt    grace  Remarks
storage_2  FILESET  203872043440 204010946560 204010946560   39468360     none |   279103       0        0     2490     none a.example.org
"""
MMLSQUOTA_FILESET = """Filesystem Fileset    type             KB      quota      limit   in_doubt    grace |    files   quota    limit in_doubt    grace  Remarks
rs_gpfs    homes      USR       444181792 1073741824 1073741824    6072144     none |   999985 1000000  1000000     2462     none
rs_gpfs    work       USR            2048       1024       4096          0   6 days |        1       0        0        0     none
"""
# Tables for people: TACC, and `quota -s`.
TACC = "| Disk         Usage (GB)     Limit    %Used   File Usage       Limit   %Used |\n| /home1              0.7      25.0     2.90         4752      200000    2.38 |"
QUOTA_S = "      /dev/sdb1  12690M  20480M  30720M            161k       0       0        "


@each(
    ("output", "problems"),
    [
        (LFS.format(name="       /scratch", kbytes="1047552"), ["/scratch has only 1MiB left"]),
        (LFS.format(name="       /scratch", kbytes="[1047552]"), ["/scratch has only 1MiB left"]),
        (LFS.format(name="       /scratch", kbytes="2097153**"), ["/scratch has only 0B left"]),
        (LFS.format(name=LFS_LONG, kbytes="1047552") + LFS_VERBOSE, ["/scratch/of/the/project has only 1MiB left"]),
        (LFS.format(name="       /scratch", kbytes="0"), []),
        (QUOTA.format(none="", rows=QUOTA_ROWS), ["/dev/sda1 has only 0B left", "/dev/mapper/vg0-home has room for only 10 more files"]),
        (QUOTA.format(none="", rows=QUOTA_WIDE), ["/dev/mapper/vg0-home has room for only 10 more files"]),
        (QUOTA.format(none="none", rows=""), []),
        (QUOTA_P, ["/dev/sda1 has room for only 4999 more files"]),
        (MMLSQUOTA, []),
        (MMLSQUOTA_FILESET, ["rs_gpfs has room for only 15 more files", "rs_gpfs has only 0B left"]),
        (TACC, []),
        (QUOTA_S, []),
        ("Quota: 1.2T of 2T, 12345 files\nPath 1 2 3 4\n1 2 3 4 5 6 7\n", []),
        (f"/q {'9' * 5000} 1 1 - 1 0 0 -", []),  # more digits than int() takes
        ("", []),
    ],
)  # fmt: skip
def test_outputs_of_quota_commands_tell_what_is_nearly_full(
    output: str, problems: list[str]
) -> None:
    assert list(quota_problems(output)) == [f"the quota of {problem}" for problem in problems]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["printf", "%s", "/q 1 2049 0 - 1 0 0 -"], "the quota of /q has only 2MiB left"),
        (["sh", "-c", "echo /q '1*' 1 1 - 1 0 0 -; exit 1"], "the quota of /q has only 0B left"),
        (["echo", "/q `echo 1` 2 2 1 0 0"], ""),  # no shell reads it
        (["/nosuch/quota"], ""),
    ],
)
def test_the_quota_command_of_the_site_is_run_by_plan_and_doctor(
    home: Path, command: list[str], problem: str
) -> None:
    text = (home / "s.yaml").read_text()
    (home / "s.yaml").write_text(f"{text}quota_command: {json.dumps(command)}\n")
    spec = make_spec(home, {"gpus": 1}, str(home / "s.yaml"))
    notes = make_cluster_plan(spec).notes
    assert [note for note in notes if "quota" in note] == [f"warning: {problem}"] * bool(problem)
    check = _check_directory("~/.gpujobs", command)
    assert problem in check.result
    assert check.state == CheckState.WARNING or not problem

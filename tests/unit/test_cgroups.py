"""The memory of a job, by the groups of version 1 and 2 of different batch schedulers and containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.clusters.cgroups import available_memory

GIB = 2**30
NONE = "9223372036854771712"
"""Of version 1."""


def limits(folder: Path, groups: str, mounts: list[str], files: dict[str, str]) -> Path:
    """Write the files of a process, and those of its groups; return the folder of the process."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    lines = ["22 1 0:20 / /proc rw - proc proc rw", *(mount.format(folder) for mount in mounts)]
    (proc / "mountinfo").write_text("\n".join(lines))
    return proc


V2 = "30 22 0:26 / {}/cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:31 / {}/cg/memory rw,relatime - cgroup cgroup rw,memory"
CPU = "32 31 0:32 / {}/cg/cpu rw,relatime - cgroup cgroup rw,cpu"


@pytest.mark.parametrize(
    ("groups", "mounts", "files"),
    [
        (  # Slurm: the limit is that of the step, or of the job above it
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
            [V2],
            {
                "cg/system.slice/slurmstepd.scope/job_7/memory.max": str(GIB),
                "cg/system.slice/slurmstepd.scope/job_7/step_0/memory.max": str(2 * GIB),
                "cg/system.slice/slurmstepd.scope/job_7/step_0/user/memory.max": "max",
            },
        ),
        (
            "4:memory:/slurm/uid_1000/job_7/step_0\n3:cpu:/slurm\n",
            [CPU, V1],
            {
                "cg/memory/memory.limit_in_bytes": NONE,
                "cg/memory/slurm/uid_1000/job_7/memory.limit_in_bytes": str(GIB),
                "cg/memory/slurm/uid_1000/job_7/step_0/memory.limit_in_bytes": NONE,
            },
        ),
        (  # PBS, with both versions
            "9:cpuset,memory:/pbs_jobs.service/jobid/12.server\n0::/user.slice\n",
            ["35 31 0:31 / {}/cg/memory rw - cgroup cgroup rw,cpuset,memory", V2],
            {"cg/memory/pbs_jobs.service/jobid/12.server/memory.limit_in_bytes": str(GIB)},
        ),
        (  # a container that has only its own group
            "4:memory:/lsf/c/job.7/run\n",
            ["35 31 0:31 /lsf/c/job.7 {}/cg/memory ro - cgroup cgroup rw,memory"],
            {
                "cg/memory/memory.limit_in_bytes": str(GIB),
                "cg/memory/run/memory.limit_in_bytes": NONE,
            },
        ),
        ("0::/\n", [V2], {"cg/memory.max": str(GIB)}),  # a namespace of its own
        ("4:memory:/of/the/host\n", [V1], {"cg/memory/memory.limit_in_bytes": str(GIB)}),
    ],
)
def test_the_least_limit_counts(
    tmp_path: Path, groups: str, mounts: list[str], files: dict[str, str]
) -> None:
    assert available_memory(limits(tmp_path, groups, mounts, files)) == GIB


@pytest.mark.parametrize(
    ("groups", "mounts", "files"),
    [
        ("0::/job\n", [V2], {"cg/job/memory.max": "max", "cg/memory.max": "max"}),
        ("4:memory:/job\n", [V1], {"cg/memory/job/memory.limit_in_bytes": NONE}),
        ("4:cpu:/job\n", [CPU], {}),
        ("", [], {}),
        ("damaged\n", ["x"], {}),
    ],
)
def test_without_a_limit_a_job_has_its_node(
    tmp_path: Path, groups: str, mounts: list[str], files: dict[str, str]
) -> None:
    host = available_memory(Path("/nosuch"))
    assert host > GIB
    assert available_memory(limits(tmp_path, groups, mounts, files)) == host

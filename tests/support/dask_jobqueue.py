"""The example configurations of dask-jobqueue's documentation: of known machines, and its own.

Names of queues and network interfaces are those of the machines; a test replaces them by its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Example:
    """A cluster of the documentation."""

    name: str
    kind: str
    """Slurm, PBS, LSF or SGE."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """Dask's configuration under the key of the batch scheduler."""
    refused: tuple[str, ...] = ()
    """Keywords or keys that gpujobs refuses."""

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}"

    def without(self, *keys: str) -> Example:
        """Return the example without some keywords and keys."""
        return replace(
            self,
            keywords={key: value for key, value in self.keywords.items() if key not in keys},
            configuration={k: value for k, value in self.configuration.items() if k not in keys},
        )

    def on(self, **names: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return keywords and configuration with ``queue`` and ``interface`` of this machine.

        `gpus_per_job` is a keyword: the number of processes.
        """
        keywords, configuration = (
            {key: names.get(key, value) for key, value in values.items()}
            for values in (self.keywords, self.configuration)
        )
        gpus = {**self.configuration, **self.keywords}.get("processes", 1)
        return {**keywords, "gpus_per_job": gpus}, configuration


_PBS_PAGE = {
    "cores": 24, "memory": "100GB", "shebang": "#!/usr/bin/env zsh", "processes": 6,
    "resource_spec": "select=1:ncpus=24:mem=100GB", "queue": "regular", "account": "my-account",
    "walltime": "02:00:00", "local_directory": "$TMPDIR",
}  # fmt: skip

EXAMPLES = [
    Example("cheyenne", "PBS", configuration={
        "name": "dask-worker", "cores": 36, "memory": "109 GB", "processes": 9, "interface": "ib0",
        "queue": "regular", "walltime": "00:30:00", "resource-spec": "select=1:ncpus=36:mem=109GB",
    }),
    Example("cheyenne", "Slurm", configuration={
        "name": "dask-worker", "cores": 1, "memory": "25 GB", "processes": 1, "interface": "ib0",
        "account": "PXYZ123", "walltime": "00:30:00", "job-extra": {"-C geyser": None},
    }),
    Example("cori", "Slurm", configuration={
        "cores": 64, "memory": "115GB", "processes": 4, "queue": "debug", "walltime": "00:10:00",
        "job-extra": ["-C haswell", "-L project, SCRATCH, cscratch1"],
    }, refused=("job-extra",)),
    Example("stratus", "PBS", configuration={
        "name": "dask-worker", "cores": 36, "memory": "270GB", "processes": 6, "interface": "ib0",
        "local-directory": "$localscratch", "queue": "high_mem", "account": "arm",
        "walltime": "00:30:00", "job-extra": ["-W group_list=cades-arm"],
    }),
    Example("comet", "Slurm", configuration={
        "name": "dask-worker", "cores": 24, "memory": "120GB", "processes": 1, "interface": "ib0",
        "death-timeout": 60, "local-directory": "/scratch/$USER/$SLURM_JOB_ID",
        "queue": "compute", "walltime": "00:30:00", "job-mem": "120GB",
    }),
    Example("datarmor", "PBS", configuration={
        "name": "dask-worker", "cores": 28, "processes": 28, "memory": "120GB", "interface": "ib0",
        "local-directory": "$TMPDIR", "queue": "mpi_1", "account": "myAccount",
        "walltime": "48:00:00", "resource-spec": "select=1:ncpus=28:mem=120GB",
        "job-extra": ["-m n"],
    }),
    Example("page", "PBS", keywords=_PBS_PAGE),
    Example("page-yaml", "PBS", configuration={
        **{key.replace("_", "-"): value for key, value in _PBS_PAGE.items()}, "interface": "ib0",
    }),
    Example("tmpdir", "PBS", keywords={
        "queue": "regular", "project": "DaskOnPBS", "local_directory": "$TMPDIR", "cores": 24,
        "processes": 6, "memory": "16GB", "resource_spec": "select=1:ncpus=24:mem=100GB",
    }),
    Example("zsh", "PBS", keywords={
        "cores": 24, "processes": 6, "shebang": "#!/usr/bin/env zsh", "memory": "6GB",
        "project": "P48500028", "queue": "premium", "walltime": "02:00:00", "interface": "ib0",
        "resource_spec": "select=1:ncpus=36:mem=109G",
    }),
    Example("class", "PBS", keywords={
        "queue": "regular", "account": "myaccountingstring", "cores": 24, "memory": "500 GB",
    }),
    Example("deployment", "SGE", keywords={
        "queue": "default.q", "walltime": "1500000", "processes": 10, "memory": "20GB",
        "resource_spec": "m_mem_free=20G",
    }, refused=("walltime",)),
    Example("class", "SGE", keywords={
        "queue": "regular", "project": "myproj", "cores": 24, "memory": "500 GB",
    }),
    Example("deployment", "LSF", keywords={
        "queue": "general", "project": "cpp", "walltime": "00:30", "cores": 15, "memory": "25GB",
    }),
    Example("class", "LSF", keywords={
        "queue": "general", "project": "DaskonLSF", "cores": 15, "memory": "25GB",
        "use_stdin": True,
    }),
    Example("deployment", "Slurm", keywords={
        "cores": 8, "processes": 4, "memory": "16GB", "project": "woodshole",
        "walltime": "01:00:00", "queue": "normal",
    }),
    Example("low-priority", "Slurm", keywords={
        "cores": 24, "processes": 6, "memory": "16GB", "project": "co_laika",
        "queue": "savio2_bigmem", "job_extra": ['--qos="savio_lowprio"'],
        "job_script_prologue": [
            'export LANG="en_US.utf8"', 'export LANGUAGE="en_US.utf8"', 'export LC_ALL="en_US.utf8"',
        ],
    }),
    Example("resources", "Slurm", keywords={
        "memory": "8g", "processes": 1, "cores": 2,
        "worker_extra_args": ["--resources ssdGB=200,GPU=2"],
    }),
    Example("lifetime", "Slurm", keywords={
        "walltime": "01:00:00", "cores": 4, "memory": "16gb",
        "worker_extra_args": ["--lifetime", "55m", "--lifetime-stagger", "4m"],
    }),
    Example("class", "Slurm", keywords={
        "queue": "regular", "account": "myaccount", "cores": 24, "memory": "500 GB",
    }),
]  # fmt: skip

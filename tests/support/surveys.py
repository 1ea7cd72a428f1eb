"""Surveys of batch schedulers from their recorded answers."""

from __future__ import annotations

from collections.abc import Mapping

from gpujobs.schedulers import get_scheduler
from gpujobs.schedulers.inventory import Survey

from .transcripts import recorded

ANSWERS: dict[str, dict[str, tuple[str, str]]] = {
    "slurm": {
        "sinfo": ("sinfo.txt", "nodes and partitions"),
        "scontrol show partition -o -a": ("limits.txt", "partitions"),
        "sacctmgr -n -P show qos": ("limits.txt", "qos"),
    },
    "sge": {
        "qstat -f -F": ("qstat-F.txt", "queue instances"),
        "qconf -sc": ("hosts.txt", "complexes"),
    },
    "pbs": {
        "pbsnodes": ("03-status.txt", "nodes, json"),
        "qstat -Q": ("03-status.txt", "queue, json"),
        "qstat -B": ("03-status.txt", "server, json"),
    },
    "torque": {
        "pbsnodes": ("03-status.txt", "nodes, xml"),
        "qstat -Q -f1": ("queues.txt", "queues"),
        "qstat -B -f1": ("queues.txt", "server"),
    },
    "lsf": {
        "bhosts": ("hosts.txt", "hosts"),
        "bqueues -l": ("hosts.txt", "queue limits"),
        "bparams -l": ("inventory.txt", "parameters, long"),
        "lshosts -w": ("inventory.txt", "memory of hosts"),
    },
}
TEXTS = {
    "slurm": {
        "scontrol show config": "AccountingStorageEnforce = associations,limits\nMaxArraySize = 1001\n  ConstrainDevices  = yes\n",
        "sacctmgr -n -P show associations user=ada ": "p1|ada\np2|ada\n",
    },
    "sge": {
        "qconf -sql": "main\nshort\n",
        "qconf -sq short": "qname short\nh_rt      00:10:00\nprolog  NONE\n",
        "qconf -se node1": "hostname node1\ncomplex_values        gpu=4,slots=8\n",
        "qconf -se node2": "hostname node2\ncomplex_values        gpu=4, \\\n     slots=8\n",
        "qconf -spl": "mpi\nsmp\n",
        "qconf -sp smp": "pe_name  smp\nallocation_rule    $pe_slots\n",
        "qconf -sp mpi": "pe_name  mpi\nallocation_rule    $fill_up\n",
        "qconf -sconf": "prolog     root@/opt/prolog.sh\nmax_aj_tasks   75000\nenforce_project  false\n",
        "cat /opt/prolog.sh": 'echo "CUDA_VISIBLE_DEVICES=0" >> "$SGE_JOB_SPOOL_DIR/environment"\n',
    },
}


def survey_of(name: str, changes: Mapping[str, str] | None = None, user: str = "ada") -> Survey:
    """Return the survey of ``name``; ``changes`` are answers by the start of their commands."""
    texts = {**TEXTS.get(name, {}), **(changes or {})}
    answers = {words: recorded(name, *place).stdout for words, place in ANSWERS[name].items()}
    inventory = get_scheduler(name).inventory
    assert inventory

    def ask(argv: object) -> str:
        words = " ".join(argv)  # type: ignore[call-overload]
        found = [text for start, text in {**answers, **texts}.items() if words.startswith(start)]
        return found[-1] if found else ""

    return inventory().survey(ask, user)

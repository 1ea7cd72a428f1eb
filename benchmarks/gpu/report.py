"""The results as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from gpujobs.injob.transport import Choice

CLUSTERS = {
    "auto": "gpujobs, `layout: workers`, one job of all GPUs, protocol auto",
    "reference": 'hand-written `LocalCUDACluster(protocol="ucxx")`',
    "tcp": "gpujobs, plain tcp (`encryption: false`)",
    "tls": "gpujobs, tcp with TLS",
    "one-gpu-jobs": "gpujobs, one job per GPU, protocol auto",
    "mpi": "gpujobs, `layout: mpi`, protocol auto",
    "pool": "gpujobs, `rmm_pool_size`, protocol auto",
    "maximum-pool": "gpujobs, `rmm_pool_size` and `rmm_maximum_pool_size`, protocol auto",
    "track": "gpujobs, `rmm_track_allocations`, protocol auto",
    "async": "gpujobs, `rmm_async`, protocol auto",
    "async-ucxx": "gpujobs, `rmm_async`, protocol ucxx",
    "threshold": "gpujobs, `rmm_async` and `rmm_release_threshold`, protocol ucxx",
    "managed": "gpujobs, `rmm_managed_memory`, protocol auto",
    "managed-ucxx": "gpujobs, `rmm_managed_memory`, protocol ucxx",
    "managed-pool": "gpujobs, `rmm_managed_memory` and `rmm_pool_size`, protocol ucxx",
    "isolated-jobs": "gpujobs, one job per GPU, isolated, protocol auto",
    "isolated-reference": "hand-written jobs of `dask cuda worker`, one per GPU, isolated, ucxx",
    "isolated-tcp": "gpujobs, one job per GPU, isolated, plain tcp",
    "isolated-default-ucx": "gpujobs, one job per GPU, isolated, ucxx with UCX's own settings",
    "pairs": "gpujobs, jobs of two isolated GPUs, protocol auto",
    "pairs-tcp": "gpujobs, jobs of two isolated GPUs, plain tcp",
    "pairs-default-ucx": "gpujobs, jobs of two isolated GPUs, ucxx with UCX's own settings",
}
MEASURED = {"transfer": "GB/s", "far": "GB/s", "transpose": "seconds", "svd": "seconds"}
RATIOS = [
    ("auto", "reference"),
    ("auto", "tcp"),
    ("tls", "tcp"),
    ("one-gpu-jobs", "auto"),
    ("mpi", "auto"),
    ("pool", "auto"),
    ("maximum-pool", "pool"),
    ("track", "auto"),
    ("async", "auto"),
    ("async-ucxx", "async"),
    ("threshold", "async"),
    ("managed", "auto"),
    ("managed-ucxx", "managed"),
    ("managed-pool", "managed"),
    ("isolated-jobs", "auto"),
    ("isolated-jobs", "isolated-reference"),
    ("isolated-jobs", "isolated-tcp"),
    ("isolated-jobs", "isolated-default-ucx"),
    ("pairs", "pairs-tcp"),
    ("pairs", "pairs-default-ucx"),
]


def report(about: dict[str, str], steps: list[dict[str, Any]]) -> str:
    """Return the whole text."""
    columns = [
        "cluster",
        "protocol",
        "workers after (s)",
        "one worker per GPU",
        "GPUs a worker can open",
    ]
    columns += [
        "array between two workers (GB/s)",
        "between the first and the last (GB/s)",
        "(y + y.T).sum() (s)",
        "svd (s)",
    ]
    head = f"| {' | '.join(columns)} |"
    lines = [
        "# gpujobs on real GPUs",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
    ]
    lines += [
        "Medians of 3 to 61 repetitions in 4 s after two warm-ups, new data each time. One that "
        "takes longer than 4 s is not repeated, and has one warm-up.",
        "",
        head,
        "|---" * len(columns) + "|",
        *(_row(step) for step in steps if step["name"] in CLUSTERS),
        "",
        *_starts(steps),
        *_trials(steps),
        "",
    ]
    by_name = {step["name"]: step for step in steps}
    lines += [
        "How many times as fast:",
        "",
        f"| | {' | '.join(MEASURED)} |",
        "|---" * (1 + len(MEASURED)) + "|",
    ]
    lines += [_ratios(by_name, *pair) for pair in RATIOS if set(pair) <= set(by_name)]
    failed = [f"- {step['name']}: {step['error']}" for step in steps if step.get("error")]
    fallen = [(step["name"], (step.get("transport") or {}).get("reason")) for step in steps]
    failed += [f"- {name} fell back: {reason}" for name, reason in fallen if reason]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else []), ""])


def _starts(steps: list[dict[str, Any]]) -> list[str]:
    """Return the median time until all workers are connected, for each kind of cluster."""
    times: dict[str, list[float]] = {}
    for step in steps:
        if step["name"].startswith("start-") and "seconds to workers" in step:
            name = step["name"].removeprefix("start-").rpartition("-")[0]
            times.setdefault(name, []).append(step["seconds to workers"])
    return [
        f"- start of {name}: {statistics.median(found):.3g} s (of {len(found)})"
        for name, found in times.items()
    ]


def _trials(steps: list[dict[str, Any]]) -> list[str]:
    """Return the rates that the trial in the job measured."""
    found = [(step["name"], Choice.parse(step.get("transport") or {})) for step in steps]
    return [f"- trial of {name}: {choice.text()}" for name, choice in found if choice.text()]


def value(step: dict[str, Any], name: str) -> float | None:
    """Return the median of one measurement."""
    found = (step.get(name) or {}).get(MEASURED[name])
    return float(found) if found is not None else None


def _row(step: dict[str, Any]) -> str:
    opened = step.get("can_open") or []
    proof = {True: "yes", False: "NO"}.get(step.get("one worker per GPU", ""), "")
    cells = [
        CLUSTERS[step["name"]],
        step.get("scheme", ""),
        _number(step.get("seconds to workers")),
        proof,
    ]
    cells += [
        "-".join(str(n) for n in sorted(set(opened))),
        *(_number(value(step, name)) for name in MEASURED),
    ]
    return f"| {' | '.join(cells)} |"


def _ratios(steps: dict[str, dict[str, Any]], name: str, base: str) -> str:
    cells = []
    for measurement, unit in MEASURED.items():
        ours, theirs = value(steps[name], measurement), value(steps[base], measurement)
        if not ours or not theirs:
            cells.append("")
        elif unit == "GB/s":
            cells.append(_number(ours / theirs))
        else:
            cells.append(_number(theirs / ours))
    return f"| {name} / {base} | {' | '.join(cells)} |"


def _number(found: float | None) -> str:
    return "" if found is None else f"{found:.3g}"

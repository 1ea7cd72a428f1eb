"""The results as Markdown."""

from __future__ import annotations

from typing import Any

CLUSTERS = {
    "auto": "gpujobs, `layout: workers`, one job of all GPUs, protocol auto",
    "reference": 'hand-written `LocalCUDACluster(protocol="ucxx")`',
    "tcp": "gpujobs, plain tcp (`encryption: false`)",
    "tls": "gpujobs, tcp with TLS",
    "one-gpu-jobs": "gpujobs, one job per GPU, protocol auto",
    "mpi": "gpujobs, `layout: mpi`, protocol auto",
    "isolated-jobs": "gpujobs, one job per GPU, ConstrainDevices=yes, protocol auto",
}
MEASURED = {"transfer": "GB/s", "transpose": "seconds", "svd": "seconds"}
RATIOS = [
    ("auto", "reference"),
    ("auto", "tcp"),
    ("tls", "tcp"),
    ("one-gpu-jobs", "auto"),
    ("mpi", "auto"),
    ("isolated-jobs", "auto"),
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
    columns += ["array between two workers (GB/s)", "(y + y.T).sum() (s)", "svd (s)"]
    head = f"| {' | '.join(columns)} |"
    lines = [
        "# gpujobs on real GPUs",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
    ]
    lines += [
        "Medians of 3 to 61 repetitions in 6 s after two warm-ups, new data each time.",
        "",
        head,
        "|---" * 8 + "|",
        *map(_row, steps),
        "",
    ]
    by_name = {step["name"]: step for step in steps}
    lines += [
        "How many times as fast:",
        "",
        "| | transfer | transpose | svd |",
        "|---|---|---|---|",
    ]
    lines += [_ratios(by_name, *pair) for pair in RATIOS if set(pair) <= set(by_name)]
    failed = [f"- {step['name']}: {step['error']}" for step in steps if step.get("error")]
    fallen = [(step["name"], (step.get("transport") or {}).get("reason")) for step in steps]
    failed += [f"- {name} fell back: {reason}" for name, reason in fallen if reason]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else []), ""])


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

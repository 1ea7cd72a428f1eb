"""Fakes of Apptainer, Singularity and of Pyxis in srun: ``runtimes.py COMMAND ARGUMENT…``.

They take over what gpujobs depends on: options, mounts, the environment, signals. An image is a file with the path of a
root folder, which Charliecloud runs: without its mount, a folder of the host is not there. Each call is appended to
IMAGE.calls as a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

NVML = Path(__file__).parents[1] / "nvml"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def fail(message: str, code: int = 255) -> None:
    sys.stderr.write(f"{message}\n")
    sys.exit(code)


def options_of(
    argv: list[str], flags: set[str], values: set[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the values of each option at the start of ``argv``, and the rest; other options are refused."""
    found: dict[str, list[str]] = {}
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            return found, argv[index:]
        if name not in (values if equals else flags):
            fail(f"unknown flag: {word}", 2)
        found.setdefault(name, []).append(value)
    return found, []


def root_of(image: str) -> Path:
    try:
        return Path(Path(image).read_text().strip())
    except OSError as error:
        fail(f"FATAL:   could not open image {image}: {error.strerror}")
        raise


def variables_of(root: Path) -> dict[str, str]:
    lines = (root / "ch" / "environment").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def record(image: str, argv: list[str], **facts: object) -> None:
    with Path(f"{image}.calls").open("a") as file:
        file.write(json.dumps({"argv": argv, **facts}) + "\n")


def inside(
    root: Path, mounts: list[str], workdir: str, command: list[str], gpus: bool
) -> list[str]:
    """Return the command that runs ``command`` in the root folder."""
    if gpus:
        mounts = [*mounts, f"{NVML}:/opt/nvml"]
    binds = [f"--bind={mount}" for mount in mounts]
    for mount in mounts:
        source = mount.partition(":")[0]
        if not Path(source).exists():
            fail(
                f"FATAL:   container creation failed: mount {mount}: {source}: no such file or directory"
            )
    return ["ch-run", *binds, f"--cd={workdir}", str(root), "--", *command]


def wait(argv: list[str], environ: dict[str, str]) -> int:
    """Run a command as a child, with signals passed on, as Apptainer does."""
    environ = {**environ, "USER": environ.get("USER", "x")}
    process = subprocess.Popen(argv, env=environ, close_fds=False)  # PMI 2 has an open file
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: process.send_signal(number))
    code = process.wait()
    return code if code >= 0 else 128 - code


def apptainer(name: str, argv: list[str]) -> int:
    """``apptainer exec``: the image has its own PATH and LD_LIBRARY_PATH; APPTAINERENV_X sets X in it."""
    if argv[:1] != ["exec"]:
        fail(f"unknown command: {argv[:1]}", 2)
    given, (image, *command) = options_of(argv[1:], {"--nv", "--no-home"}, {"--bind", "--pwd"})
    root, prefix = root_of(image), f"{name.upper()}ENV_"
    host = {
        key: value for key, value in os.environ.items() if key not in ("PATH", "LD_LIBRARY_PATH")
    }
    own = {key.removeprefix(prefix): value for key, value in host.items() if key.startswith(prefix)}
    host = {key: value for key, value in host.items() if not key.startswith(prefix)}
    record(image, argv, environ=dict(os.environ))
    gpus = "--nv" in given
    inner = inside(
        root,
        given["--bind"],
        given["--pwd"][0],
        ["/usr/bin/env", f"PATH={variables_of(root)['PATH']}", *command],
        gpus,
    )
    return wait(
        inner, {**os.environ, **host, **variables_of(root), "PATH": os.environ["PATH"], **own}
    )


PYXIS = {"--container-image", "--container-mounts", "--container-workdir", "--container-env"}


def srun(argv: list[str]) -> int:
    """Slurm's srun with Pyxis. Without ``--container-image`` it is Slurm's own."""
    real = os.environ["REAL_SRUN"]
    if argv == ["--help"]:
        subprocess.run([real, *argv], check=True)
        print(*(f"      {name}=..." for name in sorted(PYXIS)), sep="\n")
        return 0
    taken = [word for word in argv if word.startswith(("--container-", "--no-container-"))]
    rest = [word for word in argv if word not in taken]
    if not taken:
        os.execv(real, [real, *argv])
    given, _ = options_of(taken, {"--no-container-remap-root"}, PYXIS)
    start = next(index for index, word in enumerate(rest) if not word.startswith("-"))
    record(given["--container-image"][0], argv, environ=dict(os.environ))
    node = [sys.executable, "-SE", __file__, "pyxis", json.dumps(given)]
    os.execv(real, [real, *rest[:start], *node, *rest[start:]])


def pyxis(given: dict[str, list[str]], command: list[str]) -> int:
    """One task: the image's variables have priority, but for those of ``--container-env``."""
    root = root_of(given["--container-image"][0])
    kept = [name for names in given.get("--container-env", []) for name in names.split(",")]
    own = {name: os.environ[name] for name in kept}
    variables = {**variables_of(root), **own}
    gpus = os.environ.get("NVIDIA_VISIBLE_DEVICES") == "all"
    inner = inside(
        root, given["--container-mounts"][0].split(","), given["--container-workdir"][0],
        ["/usr/bin/env", f"PATH={variables['PATH']}", *command], gpus,
    )  # fmt: skip
    os.execvpe(inner[0], inner, {**os.environ, **variables, "PATH": os.environ["PATH"]})


def main(name: str, argv: list[str]) -> int:
    if name == "srun":
        return srun(argv)
    if name == "pyxis":
        return pyxis(json.loads(argv[0]), argv[1:])
    return apptainer(name, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

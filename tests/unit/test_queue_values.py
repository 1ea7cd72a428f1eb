"""Values of a queue that override those of its site: setup, scratch, mpi, env, walltime, request."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpujobs.config.sitefiles import load_site
from gpujobs.config.spec import read_spec, settings_document, with_settings, write_spec
from gpujobs.errors import InputError
from gpujobs.planning.plan import Plan, make_plan
from gpujobs.planning.render import render
from gpujobs.planning.sitecheck import site_problems

from ..support.each import each
from .support import PYTHON, SLURM, error_of, made_plan, make_spec

SITE = """\
description: test
scheduler: slurm
setup: module load site
scratch: /site
mpi: {command: [mpirun, -np, "{ranks}"], setup: module load site-mpi}
defaults: {walltime: 1h}
queues:
  a: {gpus_per_node: 4, cpus_per_node: 8, memory_per_node: 64GiB}
  b:
    like: a
    setup: module load b
    scratch: /b
    mpi: {command: [jsrun, "-n{ranks}"], setup: module load b-mpi}
    env: {A: of queue, B: of queue}
    walltime: 20m
    max_walltime: 30m
  c: {like: b, setup: ""}
  cpu: {cpus_per_node: 8}
"""


def scripts(home: Path, profile: str) -> str:
    (home / "s.yaml").write_text(SITE)
    return "".join(script.text for script in render(made_plan(home, profile), "svd-0000"))


def test_setup_and_scratch_of_a_queue_replace_those_of_the_site(home: Path) -> None:
    text = scripts(home, "gpus: 4\n")
    assert "module load site\n" in text and '--local-directory="/site"' in text
    text = scripts(home, "gpus: 4\nqueue: b\nwalltime: 10m\n")
    assert "module load b\n" in text and '--local-directory="/b"' in text
    assert "module load site" not in text and "/site" not in text
    assert "module load" not in scripts(home, "gpus: 4\nqueue: c\n")


def test_each_group_has_the_values_of_its_queue(home: Path) -> None:
    first, second = (
        script.text
        for script in render(
            made_plan_of(home, "groups: {x: {gpus: 4, queue: a}, y: {gpus: 4, queue: b}}\n"),
            "svd-0000",
        )
    )
    assert "module load site\n" in first and "module load b\n" not in first
    assert "module load b\n" in second and "module load site\n" not in second
    assert "--time=01:00:00" in first and "--time=00:20:00" in second


def made_plan_of(home: Path, profile: str) -> Plan:
    (home / "s.yaml").write_text(SITE)
    return made_plan(home, profile)


def test_the_launcher_of_a_queue_replaces_that_of_the_site(home: Path) -> None:
    text = scripts(home, "gpus: 4\nqueue: b\nlayout: mpi\n")
    assert "jsrun -n1" in text and "module load b-mpi" in text
    assert "mpirun" not in text and "site-mpi" not in text


def test_the_profile_overrides_variables(home: Path) -> None:
    text = scripts(home, "gpus: 4\nqueue: b\nenv: {B: of profile}\n")
    assert "export A='of queue'" in text and "export B='of profile'" in text
    assert "export A" not in scripts(home, "gpus: 4\nqueue: a\nenv: {B: of profile}\n")


@each(
    ("profile", "value"),
    [
        ("gpus: 4\nqueue: a\n", "default"),
        ("gpus: 4\nqueue: b\n", "'of queue'"),
        ("gpus: 4\nqueue: b\nenv: {C: x}\n", "'of queue'"),
        ("gpus: 4\nqueue: b\nenv: {A: mine}\n", "mine"),
        ("groups: {x: {gpus: 4, queue: b}}\n", "'of queue'"),
        ("groups: {x: {gpus: 4, queue: b, env: {C: x}}}\n", "'of queue'"),
        ("groups: {x: {gpus: 4, queue: b, env: {A: mine}}}\n", "mine"),
        ("env: {A: mine}\ngroups: {x: {gpus: 4, queue: b}}\n", "mine"),
    ],
)
def test_variables_of_a_queue_override_the_defaults(home: Path, profile: str, value: str) -> None:
    site = SITE.replace("defaults: {walltime: 1h}", "defaults: {walltime: 1h, env: {A: default}}")
    (home / "s.yaml").write_text(site)
    (script,) = render(made_plan(home, profile), "svd-0000")
    assert f"export A={value}\n" in script.text


@pytest.mark.parametrize(
    ("profile", "time"),
    [
        ("queue: a\n", "01:00:00"),
        ("queue: b\n", "00:20:00"),
        ("queue: b\nwalltime: 25m\n", "00:25:00"),
        ("queue: b\ngroups: {x: {walltime: 5m}}\n", "00:05:00"),
        ("queue: a\nwalltime: 5m\ngroups: {x: {queue: b}}\n", "00:05:00"),
    ],
)
def test_the_walltime_of_a_queue_replaces_that_of_the_site(
    home: Path, profile: str, time: str
) -> None:
    gpus = "" if "groups" in profile else "gpus: 4\n"
    assert f"#SBATCH --time={time}" in scripts(home, gpus + profile)


def test_a_walltime_equal_to_the_default_of_the_site_is_the_users(home: Path) -> None:
    (home / "s.yaml").write_text(SITE)
    message = error_of(home, "gpus: 4\nqueue: b\nwalltime: 1h\n")
    assert "walltime 1h is more than its 30m" in message


def test_a_queue_may_have_the_only_walltime(home: Path) -> None:
    text = SITE.replace("defaults: {walltime: 1h}\n", "")
    (home / "s.yaml").write_text(text)
    assert "`walltime` is needed" in error_of(home, "gpus: 4\n")
    assert made_plan(home, "gpus: 4\nqueue: b\n").groups[0].walltime == 1200


def test_a_stored_specification_keeps_the_origin_of_the_walltime(home: Path) -> None:
    (home / "s.yaml").write_text(SITE)
    for profile, walltime in (("", 1200), ("walltime: 25m\n", 1500)):
        spec = make_spec(home, f"gpus: 4\nqueue: b\n{profile}", "./s.yaml")
        write_spec(spec, home / "spec.json")
        stored = read_spec(home / "spec.json")
        assert make_plan(stored, python=PYTHON).groups[0].walltime == walltime
        changed = with_settings(stored, settings_document(("walltime=3m",)))
        assert make_plan(changed, python=PYTHON).groups[0].walltime == 180


def test_jobs_of_several_nodes_have_their_own_request(home: Path) -> None:
    text = SITE + (
        "request: ['-p shared', '--gpus={gpus_per_job}', '--mem={memory_per_job:GB}G']\n"
        "multi_node_request: ['-p whole', '-N {nodes}', '--gpus-per-node={gpus_per_node}']\n"
    )
    (home / "s.yaml").write_text(text)
    one, several = made_plan(home, "gpus: 4\n"), made_plan(home, "gpus: 8\nlayout: mpi\n")
    assert one.groups[0].lines == ("-p shared", "--gpus=4", "--mem=64G")
    assert several.groups[0].lines == ("-p whole", "-N 2", "--gpus-per-node=4")
    (home / "s.yaml").write_text(text.replace("'-p whole'", "'--job-name=x'"))
    message = error_of(home, "gpus: 8\nlayout: mpi\n")
    assert "s.yaml:20:22: `--job-name=x`: job-name is written by gpujobs" in message


def test_the_request_of_a_queue_overrides_all_of_the_site(home: Path) -> None:
    text = SITE.replace("  c: {", "  c: {request: ['-G {gpus_per_job}'], ")
    (home / "s.yaml").write_text(text + "multi_node_request: ['-p whole', '-N {nodes}']\n")
    made = made_plan(home, "gpus: 8\nlayout: mpi\nqueue: c\n")
    assert made.groups[0].lines == ("-G 8",)


LAUNCHER = """\
description: test
scheduler: lsf
request: ["-q {queue}", "-nnodes {nodes}"]
visible_devices: exclusive
workers_launcher: [jsrun, -n1, "-c{cpus_per_node}", "-g{gpus_per_node}", "--env=$HOME/a b"]
queues:
  a: {exclusive: true, gpus_per_node: 6, cpus_per_node: 42}
  b: {like: a, workers_launcher: [lrun, -N1]}
  c: {like: a, workers_launcher: []}
  cpu: {cpus_per_node: 20}
defaults: {walltime: 1h}
"""


def test_the_launcher_of_workers_stands_before_the_supervisor(home: Path) -> None:
    (home / "s.yaml").write_text(LAUNCHER)

    def script(profile: str) -> str:
        return render(made_plan(home, profile), "svd-0000")[0].text

    start = '"$python" "$GPUJOBS_FOLDER/injob.pyz" supervise'
    text = script("gpus: 6\n")
    assert f'\njsrun -n1 -c42 -g6 "--env=$HOME/a b" \\\n{start}' in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=True).returncode == 0
    assert f"\nlrun -N1 \\\n{start}" in script("gpus: 6\nqueue: b\n")
    assert f"\n{start}" in script("gpus: 6\nqueue: c\n")
    assert "jsrun -n1 -c1 -g0" in script("gpus: 6\nhead: {queue: cpu, cpus: 1}\n")
    assert f"\n{start}" in script("gpus: 12\nlayout: mpi\n")
    assert not site_problems(load_site("./s.yaml"))


def test_containers_start_under_the_launcher_of_workers(home: Path) -> None:
    (home / "s.yaml").write_text(LAUNCHER)
    container = "environment: {{container: {{runtime: {}, image: /i.sif}}}}\n"
    made = made_plan(home, "gpus: 6\n" + container.format("apptainer"))
    text = render(made, "svd-0000")[0].text
    assert '"--env=$HOME/a b" \\\n"${container[@]}"' in text and "--batch-script" not in text
    message = error_of(home, "gpus: 6\n" + container.format("pyxis"))
    assert "processes of this site start through " in message
    assert ", but pyxis starts containers through srun" in message


def test_a_launcher_cannot_use_a_number_that_the_queue_does_not_state(home: Path) -> None:
    (home / "s.yaml").write_text(LAUNCHER.replace("cpus_per_node: 42", "nodes: 9"))
    error = error_of(home, "gpus: 6\n")
    assert "s.yaml:5:19: {cpus_per_node} is not known: queue a does not state cpus_per_no" in error


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("walltime: 2d", "has a walltime above its max_walltime"),
        ("scratch: $(id)", "`queues.gpu.scratch`"),
        ("env: {LD_PRELOAD: x}", "LD_PRELOAD would change how every program starts"),
        ("mpi: {command: ['{rank}']}", "{rank} is not a placeholder"),
        ("workers_launcher: ['{ranks}']", "{ranks} is not a placeholder"),
        ("setup: [x]", "must be bash text"),
    ],
)
def test_invalid_values_of_a_queue_are_refused(home: Path, keys: str, message: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1", keys))
    with pytest.raises(InputError, match=re.escape(message)):
        load_site("./s.yaml")


NODE = "gpus_per_node: 4, cpus_per_node: 8, memory_per_node: 64GiB"


def test_a_queue_that_is_not_chosen_leaves_no_notes(home: Path) -> None:
    (home / "s.yaml").write_text(f"""\
description: test
scheduler: slurm
defaults: {{walltime: 1h}}
queues:
  small: {{{NODE}, gpu_types: {{x: x, y: y}}, nodes: 1}}
  large: {{{NODE}, nodes: 4}}
""")
    plan = made_plan(home, "gpus: 8\nlayout: mpi\n")
    assert plan.groups[0].queue_key == "large"
    assert not [note for note in plan.notes if "small" in note]
    plan = made_plan(home, "gpus: 4\n")
    assert [note for note in plan.notes if "queue small get GPUs of any type" in note]


def test_an_empty_list_of_a_queue_replaces_that_of_the_site(home: Path) -> None:
    (home / "s.yaml").write_text(f"""\
description: test
scheduler: slurm
defaults: {{walltime: 1h}}
layouts: [mpi]
submit_arguments: [--site]
request: ["-p {{queue}}", "--gres=gpu:{{gpus_per_node}}", "--exclude=n1"]
queues:
  a: {{{NODE}}}
  b: {{{NODE}, layouts: [], submit_arguments: [], request: []}}
""")
    assert "it is for layout: mpi" in error_of(home, "gpus: 4\nqueue: a\n")
    plan = made_plan(home, "gpus: 4\nqueue: b\n")
    assert not plan.groups[0].submit_arguments
    assert not [line for line in plan.groups[0].lines if "--exclude" in line]

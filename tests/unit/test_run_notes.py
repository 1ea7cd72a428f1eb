"""Notes of `gpujobs plan` about the command, the Python of the jobs, and too few nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpujobs.cli.main import main
from gpujobs.cli.plan_text import plan_text
from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.config.spec import load_spec
from gpujobs.errors import InputError

from ..support.each import each
from .support import SLURM, error_of, made_plan, make_spec


def notes(home: Path, profile: dict[str, object]) -> list[str]:
    spec = make_spec(home, {"gpus": 1, **profile}, str(home / "s.yaml"))
    return list(make_cluster_plan(spec).notes)


@pytest.mark.parametrize(
    "run",
    [
        ["python", "frist.py"], ["python3.11", "-u", "frist.py", "x.py"], ["./frist.py"],
        ["/opt/bin/python", "-X", "dev", "lib/frist.py"],
    ],
)  # fmt: skip
def test_a_script_that_is_not_in_the_working_directory_has_a_note_with_the_right_name(
    home: Path, run: list[str]
) -> None:
    (home / "first.py").write_text("")
    (home / "lib").mkdir()
    (home / "lib" / "first.py").write_text("")
    found = notes(home, {"run": run})
    if run[1:2] == ["-X"]:  # `dev` is taken for the script, so nothing is known
        assert found == []
        return
    (note,) = found
    assert note.startswith("warning: run: there is no file ") and note.endswith(
        "did you mean first.py?"
    )


def test_scripts_are_looked_for_in_the_working_directory_of_the_profile(home: Path) -> None:
    (home / "there").mkdir()
    (home / "there" / "first.py").write_text("")
    assert notes(home, {"run": ["python", "first.py"], "workdir": str(home / "there")}) == []
    (note,) = notes(home, {"run": ["python", "first.py"]})
    assert note == f"warning: run: there is no file first.py in {home}"


def test_the_working_directory_may_be_relative(home: Path, monkeypatch: Any) -> None:
    (home / "there").mkdir()
    (home / "there" / "first.py").write_text("")
    monkeypatch.chdir(home)
    spec = make_spec(home, {"gpus": 1, "workdir": "there"}, str(home / "s.yaml"))
    assert spec.workdir == home / "there"
    assert notes(home, {"run": ["python", "first.py"], "workdir": "there"}) == []


def test_a_script_beside_the_profile_gets_a_note(home: Path, monkeypatch: Any) -> None:
    (home / "first.py").write_text("")
    (home / "there").mkdir()
    monkeypatch.chdir(home / "there")
    (home / "p.yaml").write_text("gpus: 1\nrun: python first.py\n")
    spec = load_spec(Path("../p.yaml"), site=str(home / "s.yaml"))
    (note,) = make_cluster_plan(spec).notes
    assert note.endswith(f"there, but beside the profile: submit there, or set `workdir: {home}`")


def test_a_script_of_a_folder_above_has_a_note_with_that_folder(
    home: Path, monkeypatch: Any
) -> None:
    (home / "top" / "lib").mkdir(parents=True)
    (home / "top" / "lib" / "first.py").write_text("")
    monkeypatch.chdir(home / "top" / "lib")
    (note,) = notes(home, {"run": ["python", "lib/first.py"]})
    assert note.endswith(f"lib, but in {home}/top: submit there, or set `workdir: {home}/top`")


@pytest.mark.parametrize(
    ("run", "note"),
    [
        (["./first.py"], "./first.py is not executable; write run: [python, ./first.py]"),
        (["first.py"], "first.py is not executable; write run: [python, first.py]"),
        (["tool.py"], "PATH has no tool.py; write run: [./tool.py]"),
    ],
)
def test_scripts_that_cannot_start_have_a_note(home: Path, run: list[str], note: str) -> None:
    (home / "first.py").write_text("")
    (home / "tool.py").touch(mode=0o755)
    assert notes(home, {"run": run}) == [f"warning: run: {note}"]
    assert notes(home, {"run": ["./tool.py"]}) == []
    in_ranks = {"layout": "mpi", "run_on": "ranks", "run": run}  # which Python starts
    assert not any("warning: run" in text for text in notes(home, in_ranks))


@pytest.mark.parametrize(
    "run",
    [
        ["python", "-m", "x.py"], ["python", "-c", "x.py"], ["python", "-um", "x"], ["nosuch"], ["python", "first.py"],
        ["bash", "-c", "python frist.py > out"], ["python", "first.py", "a>b", "-x=1", "A&B", "5$"],
    ],
)  # fmt: skip
def test_commands_that_can_start_have_no_note(home: Path, run: list[str]) -> None:
    (home / "first.py").write_text("")
    assert notes(home, {"run": run}) == []


@each(
    ("run", "word"),
    [
        ("python first.py > out", ">"), ("python first.py >out 2>&1", ">out"), ("python first.py | tee x", "|"),
        ("python first.py && ls", "&&"), ("python first.py < in", "<"), ("python first.py 2> err", "2>"),
        ("python first.py $SCRATCH/x", "$SCRATCH/x"), ("python first.py ${A}", "${A}"), ("python first.py &", "&"),
    ],
)  # fmt: skip
def test_words_that_only_a_shell_understands_have_a_note(home: Path, run: str, word: str) -> None:
    (home / "first.py").write_text("")
    (note,) = notes(home, {"run": run})
    assert f"no shell runs the command, so it gets `{word}` as it is" in note and "bash, -c" in note


def test_places_that_this_host_does_not_have_are_noted(home: Path) -> None:
    """The node may see another file system, so these are notes."""
    (home / "venv" / "bin").mkdir(parents=True)
    (home / "venv" / "bin" / "activate").touch()

    def said(**profile: Any) -> list[str]:
        found = notes(home, {"run": ["ls"], "idle_timeout": 0, **profile})
        return [note for note in found if "the nodes need it" in note]

    there = "on this host; the nodes need it"
    assert said(workdir="/nosuch/w") == [f"workdir: there is no /nosuch/w {there}"]
    python = {"environment": {"python": "/nosuch/bin/python"}}
    assert said(**python) == [f"environment.python: there is no /nosuch/bin/python {there}"]
    for line, path in {
        "source venv/bin/activate": "",
        "source vemv/bin/activate": f"{home}/vemv/bin/activate",
        "module load x\n. /nosuch/bin/activate && true": "/nosuch/bin/activate",
        "source ~/nosuch/activate\nexport A=1": str(Path("~/nosuch/activate").expanduser()),
        "source '~/nosuch/activate'": f"{home}/~/nosuch/activate",  # which bash does not expand
        "source $HOME/nosuch/activate": "",
        "source ~/{a,b}/activate": "",
        "cd /scratch\nsource env/activate": "",
        "python -m venv own\nsource own/bin/activate": "",
        "if [ -e /nosuch/x ]; then\n  source /nosuch/x\nfi": "",
        "[ ! -e /nosuch/x ] || source /nosuch/x": "",
        "source activate env": "",
    }.items():
        found = said(environment={"setup": line, "python": "python"})
        assert found == ([f"setup: there is no {path} {there}"] if path else []), line
    assert said(workdir="/nosuch/$A/w", environment={"python": "/nosuch/*/python"}) == []


def test_a_setup_that_may_choose_another_python_is_noted(home: Path) -> None:
    made = made_plan(home, "gpus: 1\nidle_timeout: 0\n")
    assert "\npython          /opt/env/bin/python\n" in plan_text(made, "x-0000")
    assert made.notes == ()
    setup = "gpus: 1\nidle_timeout: 0\nenvironment: {setup: module load python"
    made = made_plan(home, f"{setup}}}\n")
    assert "\npython          python\n" in plan_text(made, "x-0000")
    (note,) = made.notes
    assert note.startswith("the profile's `setup` selects the Python of the jobs")
    assert "not /opt/env/bin/python" in note
    made = made_plan(home, f"{setup}, python: /opt/python}}\n")
    assert "\npython          /opt/python\n" in plan_text(made, "x-0000") and made.notes == ()


def test_a_site_of_another_cluster_is_noted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "s.yaml").write_text(SLURM + "cluster_names: [delta]\n")
    (home / "slurm.conf").write_text("ClusterName=frontera\n")
    assert notes(home, {"run": "ls"}) == []
    monkeypatch.setenv("SLURM_CONF", str(home / "slurm.conf"))
    assert notes(home, {"run": "ls"}) == ["this host's cluster is frontera, not delta"]
    (home / "slurm.conf").write_text("ClusterName=delta\n")
    assert notes(home, {"run": "ls"}) == []


def test_more_gpus_than_the_queue_has_are_noted(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1", "nodes: 3"))
    (note,) = made_plan(home, "gpus: 16\nrun: ls\n").notes
    assert note == "16 GPUs wanted; the queue has 12: 4 GPUs will not come while this cluster runs"
    assert made_plan(home, "gpus: 12\nrun: ls\n").notes == ()
    message = error_of(home, "gpus: 16\nlayout: mpi\n")
    assert "jobs of 4 nodes; it has 3" in message and "s.yaml:5" in message


@pytest.mark.parametrize("name", ["first.py", "job.sh", "x.ipynb"])
def test_a_program_is_no_profile(home: Path, name: str) -> None:
    (home / name).write_text("print('hello')\n")
    with pytest.raises(InputError) as caught:
        make_spec(home, "print('hello')\n", "local", name=name)
    assert f"{name} is a program; is this a profile?" in str(caught.value)
    assert "hint: write a profile" in str(caught.value) and name in caught.value.problems[0].hint


# -- gpujobs plan --verbose, and the submit command of `render` ------------------------------------
def printed(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "p.yaml", "--site", "./t.yaml"])


@pytest.fixture
def extended(home: Path) -> Path:
    """The site t.yaml over s.yaml, and a profile."""
    (home / "p.yaml").write_text("gpus: 8\nworkers: {memory: 20GiB}\nenv: {A: b}\n")
    text = SLURM.replace("walltime: 1h", "walltime: 1h, env: {A: site, B: site}")
    (home / "s.yaml").write_text(f"{text}setup: module load x\n")
    more = "queues: {other: {gpus_per_node: 1}}\n"
    (home / "t.yaml").write_text(f"extends: ./s.yaml\ndefaults: {{walltime: 30m}}\n{more}")
    return home


def test_each_value_is_shown_with_its_origin(extended: Path) -> None:
    done = printed("plan", "--verbose", "--set", "gpus=4", "--set", "gpus=2")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(printed("plan", "--set", "gpus=2").stdout)
    profile, _, site = done.stdout.partition("# the profile\n")[2].partition("# site t\n")
    found = {line.strip().replace(f"{extended}/", "") for line in profile.splitlines()}
    assert found >= {
        "gpus: 2  # --set gpus=2",
        "walltime: 30m  # t.yaml:2",
        "memory: 20GiB  # p.yaml:2",
        "A: b  # p.yaml:3",
        "B: site  # s.yaml:6",
    }
    found = {line.strip().replace(f"{extended}/", "") for line in site.splitlines()}
    assert found >= {"max_walltime: 1d  # s.yaml:5", "setup: module load x  # s.yaml:7", "gpu:"}
    assert "other:" not in found and "defaults:" not in found


def test_the_origins_are_not_json(extended: Path) -> None:
    done = printed("plan", "--verbose", "--json")
    assert (done.exit_code, done.stdout) == (2, "")


def test_render_shows_the_submit_command_apart_from_the_scripts(extended: Path) -> None:
    done = printed("render")
    assert "submit command: sbatch --parsable < SCRIPT, in " in done.stderr
    assert "submit command" not in done.stdout
    (extended / "t.yaml").write_text("extends: ./s.yaml\ncommands: {sbatch: /opt/slurm/sbatch}\n")
    assert "/opt/slurm/sbatch --parsable" in printed("render").stderr


@pytest.mark.parametrize("run", ["module load a\npython x.py", ["bash", "-c", "a\nb"]])
def test_several_lines_of_run_belong_into_a_file(home: Path, run: object) -> None:
    text = error_of(home, {"gpus": 1, "run": run})
    assert "run: [bash, job.sh]" in text and "environment.setup" in text


def test_a_line_break_after_run_is_no_second_line(home: Path) -> None:
    assert made_plan(home, {"gpus": 1, "run": "python x.py\n"}).profile.run == ("python", "x.py")


@pytest.mark.parametrize("run", ["module load cuda", "conda activate x", "source env/bin/activate"])
def test_a_command_that_prepares_a_shell_belongs_to_setup(home: Path, run: str) -> None:
    assert any("it belongs to `environment.setup`" in note for note in notes(home, {"run": run}))

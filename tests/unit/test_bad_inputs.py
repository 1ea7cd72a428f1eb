"""Bad inputs by number: what goes in, and what the user is told, with file, line and column."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from gpujobs.config.sitefiles import load_site
from gpujobs.errors import InputError
from gpujobs.planning.plan import Machine
from gpujobs.planning.render import render

from .support import MACHINE, make_spec, plan

SLURM = """\
description: test
scheduler: slurm
account: {directive: "--account={account}", required: false, pattern: '[a-z0-9]+'}
queues:
  gpu: {gpus_per_node: 4, cpus_per_node: 64, memory_per_node: 480GiB, max_walltime: 1d, max_nodes: 1}
defaults: {walltime: 1h}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "s.yaml").write_text(SLURM)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(home: Path, profile: Any, site: str = "s.yaml", **settings: str) -> Any:
    return plan(home, profile, str(home / site) if site.endswith(".yaml") else site, **settings)


def refused(home: Path, profile: Any, site: str = "s.yaml", machine: Machine = MACHINE) -> str:
    """Return what is said, which must name a place."""
    with pytest.raises(InputError) as caught:
        plan(home, profile, str(home / site) if site.endswith(".yaml") else site, machine=machine)
    assert caught.value.exit_code == 2
    return str(caught.value)


# -- YAML ----------------------------------------------------------------------------------------------------------
def test_01_walltime_is_hours_minutes_seconds(home: Path) -> None:
    assert (
        made(home, "gpus: 1\nwalltime: 12:30:00\n").profile.walltime == 45000
    )  # 12 h 30 min, not base 60


def test_02_two_part_time_is_refused(home: Path) -> None:
    said = refused(home, "gpus: 1\nwalltime: 30:00\n")
    assert "svd.yaml:2:11" in said and "minutes or hours?" in said


@pytest.mark.parametrize("word", ["NO", "on", "yes", "off", "Null0"])
def test_03_words_that_yaml_once_took_for_booleans_are_text(home: Path, word: str) -> None:
    assert made(home, f"gpus: 1\nenv: {{A: {word}}}\nrun: [echo, {word}]\n").profile.env == {
        "A": word
    }


@pytest.mark.parametrize("word", ["yes", "on", "1", "NO"])
def test_03_and_are_no_booleans(home: Path, word: str) -> None:
    assert "neither true nor false" in refused(home, f"gpus: 1\nnetwork: {{encryption: {word}}}\n")


@pytest.mark.parametrize(
    "number",
    ["010", "0x10", "1e1", "8.0", "1_0", "+8", "'8 '", "eight", "true", "null", "[8]", "1:30"],
)
def test_04_numbers_are_plain(home: Path, number: str) -> None:
    said = refused(home, f"gpus_per_job: {number}\ngpus: 010\n")
    assert "svd.yaml:2:7" in said and "'010' is not a whole number" in said
    if number != "null":
        assert "svd.yaml:1:15" in said


@pytest.mark.parametrize("account", ["0123", "12e03", "0x10", "1_000"])
def test_05_accounts_stay_text(home: Path, account: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace("[a-z0-9]+", "[a-z0-9_]+"))
    assert f"--account={account}" in made(home, f"gpus: 1\naccount: {account}\n").workers.lines


def test_06_duplicate_key_names_both_lines(home: Path) -> None:
    said = refused(home, "gpus: 1\nwalltime: 1h\ngpus: 2\n")
    assert "svd.yaml:3:1" in said and "first in line 1" in said and "svd.yaml:1:1" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [x]\nb: &b [*a, *a]\n", "1:4: anchors and aliases"),
        ("a: &a {b: *a}\n", "anchors and aliases"),
        ("gpus: !!int 8\n", "1:7: tags"),
        ("gpus: !!python/object/apply:os.system [ls]\n", "tags"),
        ("<<: {gpus: 8}\n", "merge keys"),
        ("gpus: 8\n---\ngpus: 9\n", "2:1: a second document"),
        ("- gpus: 8\n", "must be a mapping"),
        ("just text\n", "must be a mapping"),
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("? [a, b]\n: 1\n", "a key must be text"),
    ],
)
def test_07_what_a_job_has_no_use_for(home: Path, text: str, said: str) -> None:
    assert said in refused(home, text)


def test_08_bom_and_crlf(home: Path) -> None:
    assert made(home, "\ufeffgpus: 2\r\nwalltime: 2h\r\nrun: [python, a.py]\r\n").profile.run == (
        "python",
        "a.py",
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("gpus: 8\n\twalltime: 1h\n", "2:1"),
        ("gpus: 8\nrun: [python\n", "2:6"),
        ("gpus: 'x\n", "1:7"),
    ],
)
def test_09_syntax_errors_have_a_place(home: Path, text: str, place: str) -> None:
    assert f"svd.yaml:{place}: not valid YAML" in refused(home, text)


def test_10_what_has_no_end_is_not_read_to_its_end(home: Path) -> None:
    from gpujobs.config.spec import load_spec

    with pytest.raises(InputError, match="larger than 256 KiB"):
        load_spec(Path("/dev/zero"), site="local")
    reader, writer = os.pipe()  # gpujobs submit <(make-a-profile)
    os.write(writer, b"gpus: 0\nname: piped\n")
    os.close(writer)
    assert load_spec(Path(f"/dev/fd/{reader}"), site="local").name == "piped"
    os.close(reader)
    with pytest.raises(InputError, match="directory"):
        load_spec(home, site="local")


def test_10_bad_bytes(home: Path) -> None:
    for raw, said in (
        (b"gpus: 8\nname: \xff\n", "2:7: not UTF-8"),
        (b"gpus: 8\nname: a\x00b\n", "control character"),
        ("gpus: 8\nname: a\u2028b\n".encode(), "2:8: has a control character"),
        (b"gpus: 8\n" + b"# " + b"x" * 300_000, "larger than 256 KiB"),
        (b"gpus: " + b"[" * 100 + b"]" * 100, "nested more than 20 deep"),
        (b"a: " * 1 + b"{a: " * 5000, "nested more than 20 deep"),
    ):
        path = home / "svd.yaml"
        path.write_bytes(raw)
        with pytest.raises(InputError, match=re.escape(said)):
            from gpujobs.config.spec import load_spec

            load_spec(path, site="local")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("waltime: 1h", "walltime"), ("gpu: 8", "gpus"), ("memory: 1GiB", "workers.memory"), ("threads: 2", "workers.threads"),
        ("gpus-per-job: 1", "gpus_per_job"), ("workers: {rmm_pool: 0.5}", "workers.rmm_pool_size"), ("protocol: tcp", "network.protocol"),
    ],
)  # fmt: skip
def test_11_unknown_keys_get_a_suggestion(home: Path, key: str, meant: str) -> None:
    said = refused(home, f"gpus: 1\n{key}\n")
    assert "unknown key" in said and f"did you mean `{meant}`?" in said and "svd.yaml:2:" in said


def test_12_all_errors_in_one_run(home: Path) -> None:
    said = refused(
        home,
        "gpus: x\nwaltime: 1h\nworkers: {memory: 16, threads: 0}\nenv: {A-B: 1}\nrun: 'a \"b'\nlayout: mpj\n",
    )
    assert re.findall(r"svd\.yaml:(\d)", said) == ["1", "2", "3", "3", "4", "5", "6"]


@pytest.mark.parametrize(
    "size", ["16", "1.5", "'16'", "GiB", "16XB", "-1GB", "0GiB", "16 G i B", "1e3GiB", "true"]
)
def test_13_sizes_need_units(home: Path, size: str) -> None:
    said = refused(home, f"gpus: 1\nworkers: {{memory: {size}}}\n")
    assert "svd.yaml:2:19" in said
    if size in ("16", "1.5"):
        assert f"as in {size}GiB or {size}MiB" in said


@pytest.mark.parametrize(
    "line",
    ["walltime: .inf", "walltime: 0", "walltime: 0h", "walltime: -1h", "walltime: true", "walltime: forever", "gpus: -1", "gpus: .inf",
     "workers: {threads: 0}", "workers: {threads: -1}", "start_timeout: 5", "walltime: 1:99:00", "walltime: 99999999h"],
)  # fmt: skip
def test_14_numbers_that_mean_nothing(home: Path, line: str) -> None:
    assert "svd.yaml:" in refused(
        home, f"{line}\n" if line.startswith("gpus") else f"gpus: 1\n{line}\n"
    )


# -- values into scripts -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "key", ["account", "queue", "gpu_type", "name", "workdir", "walltime", "directives", "run", "env", "workers.local_directory",
            "network.interface", "environment.python", "workers.pre_import", "workers.options"]
)  # fmt: skip
@pytest.mark.parametrize(
    "bad", ["a\nb", "a\rb", "a\x1bb", "a\u2028b", "a\u0085b"], ids=["LF", "CR", "ESC", "LS", "NEL"]
)
def test_15_no_control_characters_anywhere(home: Path, key: str, bad: str) -> None:
    value: Any = {"directives": [f"--comment={bad}"], "run": ["echo", bad], "env": {"A": bad}, "workers.pre_import": [bad],
                  "workers.options": {"x": bad}}.get(key, bad)  # fmt: skip
    for part in reversed(key.split(".")[1:]):
        value = {part: value}
    said = refused(home, {"gpus": 1, key.split(".")[0]: value})
    assert "control character" in said or "is not" in said or "up to 40" in said


@pytest.mark.parametrize(
    "name",
    [
        "A;x",
        "A-B",
        "1A",
        "",
        "A B",
        "BASH_ENV",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "IFS",
        "A=B",
        "BASH_FUNC_x",
    ],
)
def test_18_names_of_variables(home: Path, name: str) -> None:
    assert "svd.yaml" in refused(home, {"gpus": 1, "env": {name: "1"}})


def test_17_braces_stay(home: Path) -> None:
    text = render(
        made(home, {"gpus": 1, "run": ["echo", "{{7*7}}", "{% raw %}"], "env": {"A": "{{ 7*7 }}"}}),
        "svd-0000",
    )[0].text
    assert "'{{7*7}}' '{% raw %}'" in text and "export A='{{ 7*7 }}'" in text and "49" not in text


@pytest.mark.parametrize("name", ["-x", "a" * 41, "a b", "a/b", "ä", ""])
def test_19_names_of_jobs(home: Path, name: str) -> None:
    assert "up to 40 letters, digits and '-'" in refused(home, {"gpus": 1, "name": name})


def test_20_paths_with_spaces(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = home / "my #1 dir 50%"
    strange.mkdir()
    monkeypatch.setenv("HOME", str(strange))
    text = render(made(home, {"gpus": 1, "workdir": str(strange), "run": ["ls"]}), "svd-0000")[
        0
    ].text
    assert (
        f'#SBATCH --output="{strange}/.gpujobs/%x/logs/slurm-%j.log"'.replace("50%", "50%%") in text
    )
    assert f"cd '{strange}'" in text


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ jobs.__init__.__globals__ }}", "{{ bash.__base__ }}", "{{ env.update(a=1) }}",
     "{% set x = jobs.source.shape.__class__ %}{{ x.__name__ }}", "{{ cycler.__init__.__globals__.os }}"],
)  # fmt: skip
def test_21_templates_cannot_reach_python(home: Path, template: str) -> None:
    (home / "templates").mkdir()
    (home / "templates" / "slurm.sh.j2").write_text(f"#!/bin/bash\n{template}\n")
    with pytest.raises(InputError, match=r"slurm\.sh\.j2:2"):
        render(made(home, {"gpus": 1}), "svd-0000", site_folder=home)


def test_22_undefined_variable_in_a_template(home: Path) -> None:
    (home / "templates").mkdir()
    (home / "templates" / "slurm.sh.j2").write_text("#!/bin/bash\n\necho {{ walltimes }}\n")
    with pytest.raises(InputError, match=r"slurm\.sh\.j2:3:1: template: 'walltimes' is undefined"):
        render(made(home, {"gpus": 1}), "svd-0000", site_folder=home)
    (home / "templates" / "slurm.sh.j2").write_text("#!/bin/bash\n{% if %}\n")
    with pytest.raises(InputError, match=r"slurm\.sh\.j2:2"):
        render(made(home, {"gpus": 1}), "svd-0000", site_folder=home)


@pytest.mark.parametrize(
    ("directive", "option"),
    [
        ("-pgpu", "partition"), ("--part=gpu", "partition"), ("-p gpu", "partition"), ("--partition gpu", "partition"), ("-t 1", "time"),
        ("--tim=1", "time"), ("-J x", "job-name"), ("--job-n=x", "job-name"), ("-o x", "output"), ("--array=1-5", "array"), ("-a 1", "array"),
        ("--mem-per-cpu=1", "mem"), ("--mem-per-gpu=4G", "mem"), ("-G 4", "gpus"), ("--gpus-per-node=4", "gpus-per-node"), ("-N2", "nodes"),
        ("--gpu-bind=closest", "NVLink"), ("--gpus-per-task=1", "NVLink"), ("--ntasks=4", "one task per node"), ("-d after:1", "dependency"),
        ("--comment='x' --partition=gpu", "partition"), ("--signal=USR1", "signal"), ("-c 4", "cpus-per-task"), ("-M other", "cluster"),
    ],
)  # fmt: skip
def test_23_directives_that_override_managed_ones(home: Path, directive: str, option: str) -> None:
    said = refused(home, {"gpus": 1, "directives": ["--qos=high", directive]})
    assert option in said and "svd.yaml:" in said and directive in said


@pytest.mark.parametrize(
    "directive",
    [
        "--constraint=a100",
        "--qos=high",
        "--comment=--partition",
        "--mail-type=END",
        "--reservation=x",
        "--exclude=n1",
    ],
)
def test_23_other_directives_are_fine(home: Path, directive: str) -> None:
    assert made(home, {"gpus": 1, "directives": [directive]}).workers.lines[-1] == directive


def test_23_unbalanced_quote_in_a_directive(home: Path) -> None:
    assert "is no directive" in refused(home, {"gpus": 1, "directives": ["--comment='x"]})


@pytest.mark.parametrize(
    ("profile", "limit", "said"),
    [
        ("gpus: 1\nwalltime: 25h\n", "max_walltime", "walltime 25h is more than its 24h"),
        ("gpus: 8\ngpus_per_job: 8\n", "gpus_per_node", "its nodes have 4 GPUs"),
        ("gpus: 4\nworkers: {memory: 121GiB}\n", "memory_per_node", "at most 120GiB"),
        ("gpus: 4\nworkers: {threads: 17}\n", "", "the job has 64 CPUs"),
        ("gpus: 7\ngpus_per_job: 2\n", "", "not whole jobs of 2"),
        ("gpus: 1\ngpu_type: h100\n", "gpu_type", "of no named type"),
    ],
)
def test_25_more_than_the_queue_allows_names_both_lines(
    home: Path, profile: str, limit: str, said: str
) -> None:
    told = refused(home, profile)
    assert said in told
    assert re.search(r"svd\.yaml:\d:\d", told)
    if limit and limit in SLURM:
        assert re.search(r"see .*s\.yaml:5:\d", told)


def test_25_more_jobs_than_allowed(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1", "max_jobs: 2"))
    told = refused(home, "gpus: 12\n")
    assert "3 jobs; the queue allows 2 of one user" in told and "s.yaml:5" in told


# -- sites ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--account={account}", "--account={acount}"), "s.yaml:3"),
        (("scheduler: slurm", "scheduler: slurn"), "s.yaml:2:12: `scheduler`: 'slurn' is not one of"),
        (("description: test\n", ""), "`description` is required"),
        (("gpus_per_node", "gpus_pernode"), "did you mean `queues.gpu.gpus_per_node`?"),
        (("'[a-z0-9]+'", "'[a-z'"), "is not a regular expression"),
        (("480GiB", "480"), "480 needs a unit"),
        (("queues:\n", "directives: [qos=high]\nqueues:\n"), "does not start with '-'"),
        (("queues:\n", "request: ['--gres=gpu:{gpus}']\nqueues:\n"), "s.yaml:4:23: `request[0]`: {gpus} is not a placeholder"),
        (("queues:\n", "request: ['--mem={memory_per_node}']\nqueues:\n"), "needs a unit, as in {memory_per_node:GB}"),
        (("queues:\n", "request: ['--mem={memory_per_node:XB}']\nqueues:\n"), "one of KB, MB, GB, TB"),
        (("queues:\n", "request: ['--mem={nodes:GB}']\nqueues:\n"), "cannot have a unit"),
        (("queues:\n", "request: ['{{7*7}}']\nqueues:\n"), "does not start with '-'"),
        (("queues:\n", "request: ['-x {{nodes}}']\nqueues:\n"), "{ is not a placeholder"),
        (("queues:\n", "shell: /bin/zsh\nqueues:\n"), "the jobs are bash scripts"),
        (("queues:\n", "directory: gpujobs\nqueues:\n"), "must be an absolute path"),
        (("queues:\n", "scratch: $(rm -rf /)\nqueues:\n"), "must be an absolute path"),
        (("queues:\n", "visible_devices: all\nqueues:\n"), "must be `scheduler`, `exclusive`"),
        (("queues:\n", "network: {protocols: [udp]}\nqueues:\n"), "'udp' is not one of"),
    ],
)  # fmt: skip
def test_site_files(home: Path, change: tuple[str, str], said: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace(*change))
    with pytest.raises(InputError) as caught:
        load_site(str(home / "s.yaml"))
    assert said in str(caught.value)


def test_site_defaults_are_checked_where_they_stand(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("walltime: 1h", "waltime: 1h"))
    said = refused(home, "gpus: 1\n")
    assert "s.yaml:6:12: unknown key `waltime`" in said


def test_request_without_gpus_needs_exclusive_nodes(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM + "request: ['--nodes={nodes}']\n")
    assert "must be `exclusive: true`" in refused(home, "gpus: 4\n")
    (home / "s.yaml").write_text(
        SLURM.replace("max_nodes: 1", "exclusive: true") + "request: ['--nodes={nodes}']\n"
    )
    assert made(home, "gpus: 4\n").workers.lines == ("--nodes=1",)


def test_required_account(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("required: false", "required: true"))
    told = refused(home, "gpus: 1\n")
    assert "requires an `account`" in told and "s.yaml:3" in told
    told = refused(home, "gpus: 1\naccount: ABC\n")
    assert "svd.yaml:2:10" in told and "does not match the site's pattern [a-z0-9]+" in told


def test_account_is_ignored_where_there_is_none(home: Path) -> None:
    (home / "s.yaml").write_text(re.sub("account: .*", "account:", SLURM))
    found = made(home, "gpus: 1\naccount: abc\n")
    assert not any("abc" in line for line in found.workers.lines)
    assert any("account abc is ignored" in note for note in found.notes)


def test_gpus_auto_is_for_this_machine(home: Path) -> None:
    assert "for the local site" in refused(home, "gpus: auto\n")


def test_local_machine_has_too_few_gpus(home: Path) -> None:
    machine = Machine(gpus=("1",), cpus=8, memory=2**34, busy={"0": "process 4242"})
    said = refused(home, "gpus: 2\n", "local", machine)
    assert "2 GPUs wanted, 1 free on this machine; GPU 0 is used by process 4242" in said
    assert "no directives" in refused(home, "gpus: 0\ndirectives: [--x]\n", "local", machine)


def test_not_yet(home: Path) -> None:
    assert "`groups` is not supported yet" in refused(home, {"groups": {"a": {"gpus": 1}}})


def test_no_such_site(home: Path) -> None:
    with pytest.raises(InputError, match=r"there is no site `nosuch`; known: .*local"):
        make_spec(home, "gpus: 1\n", "nosuch")
    (home / "svd.yaml").write_text("site: nosuch\n")
    with pytest.raises(InputError, match=r"svd\.yaml:1:7: there is no site"):
        from gpujobs.config.spec import load_spec

        load_spec(home / "svd.yaml")


@pytest.mark.parametrize(
    "setting", ["gpus", "=8", "gpus=8=9", "workers.memory=16", "a b=1", "gpus=[1"]
)
def test_settings(home: Path, setting: str) -> None:
    from gpujobs.config.spec import load_spec

    (home / "svd.yaml").write_text("gpus: 1\n")
    with pytest.raises(InputError, match="--set"):
        load_spec(home / "svd.yaml", site="local", settings=(setting,))

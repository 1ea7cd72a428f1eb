"""Directives with values of the profile: `options` of a site, reservations, the head's account."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.cli.plan_text import plan_text
from gpujobs.config import model
from gpujobs.config.document import Document
from gpujobs.config.profile import (
    DIRECTIVE_KEYS,
    IN_DIRECTIVE,
    NUMBER_IN_DIRECTIVE,
    directive_keys,
)
from gpujobs.config.sitefiles import load_site
from gpujobs.errors import InputError
from gpujobs.planning.sitecheck import site_problems
from gpujobs.schedulers import get_scheduler, scheduler_names

from ..support.each import each
from .support import SLURM, error_of, made_plan

REQUEST = {
    "slurm": "--gres=gpu:{gpus_per_node}",
    "pbs": "-l select=1:ngpus={gpus_per_node}",
    "lsf": "-gpu num={gpus_per_node}",
    "sge": "-l gpu={gpus_per_node}",
}
STORAGE = 'options: {storage: {directive: "-l storage={storage}", default: "gdata/{account}"}}\n'


def site(home: Path, text: str, scheduler: str = "pbs") -> None:
    (home / "s.yaml").write_text(
        f"description: x\nscheduler: {scheduler}\nvisible_devices: scheduler\n"
        f"request: ['{REQUEST[scheduler]}']\nqueues: {{gpu: {{gpus_per_node: 4}}, cpu: {{}}}}\n"
        f"defaults: {{walltime: 1h}}\n{text}"
    )


def lines(home: Path, profile: str) -> tuple[str, ...]:
    return made_plan(home, f"gpus: 4\n{profile}").groups[0].lines


def test_a_profile_chooses_the_value(home: Path) -> None:
    site(home, STORAGE)
    assert "-l storage=gdata/ab12" in lines(home, "account: ab12\n")
    chosen = lines(home, "account: ab12\noptions: {storage: gdata/xy34+scratch/xy34}\n")
    assert "-l storage=gdata/xy34+scratch/xy34" in chosen and "gdata/ab12" not in str(chosen)
    assert "`account` is needed: option storage of the site names it" in error_of(home, "gpus: 4\n")


ADDABLE = STORAGE.replace("}}", """, pattern: '[a-z0-9/+]+', separator: "+"}}""")


def test_a_profile_adds_to_the_default(home: Path) -> None:
    site(home, ADDABLE)
    added = "account: ab12\noptions: {storage: +gdata/xy34}\n"
    assert "-l storage=gdata/ab12+gdata/xy34" in lines(home, added)
    assert "-l storage=gdata/xy34" in lines(home, added.replace("+", ""))
    assert "-l storage=gdata/ab12" in lines(home, "account: ab12\n")
    in_group = "account: ab12\ngroups: {g: {gpus: 4, options: {storage: +gdata/xy34}}}\n"
    assert "-l storage=gdata/ab12+gdata/xy34" in made_plan(home, in_group).groups[0].lines
    assert "`account` is needed" in error_of(home, "gpus: 4\noptions: {storage: +gdata/xy34}\n")
    message = error_of(home, f"gpus: 4\n{added.replace('xy34', 'XY34')}")
    assert "storage 'gdata/ab12+gdata/XY34' does not match the site's pattern" in message
    assert "p.yaml:3:" in message or "svd.yaml:3:" in message


def test_without_a_separator_a_value_replaces_the_default(home: Path) -> None:
    site(home, STORAGE)
    assert "-l storage=+x" in lines(home, "account: ab12\noptions: {storage: +x}\n")


def test_an_addition_cannot_set_another_option(home: Path) -> None:
    site(home, ADDABLE.replace("[a-z0-9/+]+", ".*"))
    message = error_of(home, "gpus: 4\naccount: a\noptions: {storage: '+x,ngpus=9'}\n")
    assert "would set another option of the batch scheduler" in message


def test_a_separator_needs_a_default(home: Path) -> None:
    site(home, ADDABLE.replace('default: "gdata/{account}", ', ""))
    with pytest.raises(InputError, match="needs `default` with `separator`"):
        load_site("./s.yaml")


def test_an_option_without_a_value_has_no_directive(home: Path) -> None:
    site(home, STORAGE.replace(', default: "gdata/{account}"', ""))
    assert "storage" not in str(lines(home, "account: ab12\n"))


REQUIRED = STORAGE.replace('default: "gdata/{account}"', "required: true, pattern: 'g/.*', hint: h")


def test_an_option_without_its_required_value_is_an_error(home: Path) -> None:
    site(home, REQUIRED)
    message = error_of(home, "gpus: 4\n")
    assert "option `storage` is needed: the site requires it" in message
    assert "hint: h" in message and "s.yaml:7:" in message
    assert "-l storage=g/x" in lines(home, "options: {storage: g/x}\n")
    assert not site_problems(load_site("./s.yaml"))  # with an invented value
    site(home, REQUIRED.replace("required", "default: g/a, required"))
    with pytest.raises(InputError, match="cannot have `default` with `required: true`"):
        load_site("./s.yaml")


OF_QUEUE = """{gpus_per_node: 4, options: {
  kind: {directive: "-l kind={kind}"}, storage: {directive: "-l disk={storage}", required: true}}}"""


def test_options_of_a_queue_are_of_its_jobs_only(home: Path) -> None:
    site(home, STORAGE)
    text = (home / "s.yaml").read_text()
    (home / "s.yaml").write_text(text.replace("{gpus_per_node: 4}", OF_QUEUE))
    found = lines(home, "options: {kind: fast, storage: x}\n")
    assert "-l kind=fast" in found and "-l disk=x" in found
    assert "option `storage` is needed" in error_of(home, "gpus: 4\n")
    made = made_plan(home, "gpus: 0\nqueue: cpu\naccount: a\noptions: {kind: fast}\n")
    assert "-l storage=gdata/a" in made.groups[0].lines and "fast" not in str(made.groups[0].lines)
    assert "option `kind` is ignored: queue cpu does not have it" in made.notes
    assert not site_problems(load_site("./s.yaml"))
    wrong = OF_QUEUE.replace("={kind}", "=x")
    (home / "s.yaml").write_text(text.replace("{gpus_per_node: 4}", wrong))
    with pytest.raises(
        InputError, match=re.escape("`queues.gpu.options.kind.directive` must have {kind}")
    ):
        load_site("./s.yaml")


def test_a_group_overrides_the_options_of_the_profile(home: Path) -> None:
    site(home, STORAGE)
    made = made_plan(
        home,
        "account: a\noptions: {storage: x}\n"
        "groups: {gpu: {gpus: 4}, prep: {gpus: 0, options: {storage: y}}}\n",
    )
    assert "-l storage=x" in made.groups[0].lines and "-l storage=y" in made.groups[1].lines


@each(
    ("scheduler", "directive", "value", "message"),
    [
        ("pbs", "-l storage={storage}", "'x,walltime=99:00:00'", "'x,walltime=99:00:00' would set another option"),
        ("pbs", "-l storage={storage}", "'x,ngpus=8'", "would set another option"),
        ("sge", "-l storage={storage}", "'x,h_rt=99'", "would set another option"),
        ("slurm", "--comment={storage}", "x --gres=gpu:8", "cannot stand in a directive: it has ' '"),
        ("slurm", "--comment={storage}", '"x\\n#SBATCH --gres=gpu:8"', "has a control character"),
        ("slurm", "--comment={storage}", "$(id)", "cannot stand in a directive: it has '$'"),
        ("slurm", "--comment={storage}", "'x;y'", "cannot stand in a directive: it has ';'"),
        ("slurm", "--comment={storage}", "'x''y'", "cannot stand in a directive"),
        ("slurm", "--comment={storage}", "''", "cannot stand in a directive: it has nothing"),
        ("slurm", "--comment={storage}", "'{account}'", "does not match the site's pattern"),
        ("slurm", "--comment={storage}", "x!", "does not match the site's pattern"),
        ("lsf", "-R \\\"select[{storage}]\\\"", "'x]rusage[mem=1'", "does not match the site's pattern"),
    ],
)  # fmt: skip
def test_values_that_would_change_other_directives_are_refused(
    home: Path, scheduler: str, directive: str, value: str, message: str
) -> None:
    site(home, f'options: {{storage: {{directive: "{directive}"}}}}\n', scheduler)
    found = error_of(home, f"gpus: 4\noptions: {{storage: {value}}}\n")
    assert message in found and "svd.yaml:2:20" in found


def test_a_value_is_never_a_template(home: Path) -> None:
    text = "options: {name: {directive: '--comment={name}', pattern: '.+'}}\n"
    site(home, text, "slurm")
    assert "--comment={gpus_per_node}" in lines(home, "options: {name: '{gpus_per_node}'}\n")


def test_an_option_may_not_set_what_another_line_sets(home: Path) -> None:
    text = "options: {qos: {directive: '--qos={qos}', default: a}}\ndirectives: [--qos=b]\n"
    site(home, text, "slurm")
    message = error_of(home, "gpus: 4\n")
    assert "`--qos=a`: qos is written by the site" in message
    text = "options: {time: {directive: '--time={time}', default: '9'}}\n"
    site(home, text, "slurm")
    assert "`--time=9`: time is written by gpujobs" in error_of(home, "gpus: 4\n")


def test_an_option_that_the_site_does_not_have_is_refused_with_the_known_ones(home: Path) -> None:
    site(home, STORAGE)
    message = error_of(home, "gpus: 4\naccount: a\noptions: {storgae: x}\n")
    assert "site s has no option `storgae`: it has storage" in message
    assert "did you mean storage?" in message


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("storage: {directive: '-l x=1'}", "`options.storage.directive` must have {storage}"),
        ("storage: {directive: 'x={storage}'}", "does not start with '-'"),
        ("storage: {default: x}", "`options.storage` needs `directive`: no line of the site has"),
        ("storage: {}", "needs `default` or `required: true` without `directive`"),
        ("storage: {directive: '-l x={storage}', default: 'a b'}", "cannot stand in a directive"),
        ("storage: {directive: '-l x={storage}', default: '{x}'}", "{x} is not a placeholder"),
        ("storage: {directive: '-l x={storage}', pattern: '['}", "is not a regular expression"),
        ("nodes: {directive: '-l x={nodes}'}", "'nodes' is not a name of an option"),
    ],
)
def test_mistakes_of_a_site_in_its_options_are_refused(
    home: Path, option: str, message: str
) -> None:
    site(home, f"options: {{{option}}}\n")
    with pytest.raises(InputError, match=re.escape(message)):
        load_site("./s.yaml")


def test_an_unknown_placeholder_of_a_directive_is_refused_at_its_place(home: Path) -> None:
    site(home, "options: {name: {directive: '-l x={name}:{acount}', default: a}}\n")
    message = error_of(home, "gpus: 4\n")
    assert "s.yaml:7:29: {acount} is not a placeholder; did you mean {account}? known: " in message


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        ("slurm", "--reservation=week_1"), ("lsf", "-U week_1"), ("sge", "-ar week_1"),
        ("torque", "-W x=FLAGS:ADVRES:week_1"), ("pbs", "-q week_1"),
    ],
)  # fmt: skip
def test_a_reservation_has_the_directive_of_the_batch_scheduler(
    home: Path, scheduler: str, line: str
) -> None:
    text = SLURM.replace("scheduler: slurm", f"scheduler: {scheduler}\nvisible_devices: scheduler")
    (home / "s.yaml").write_text(re.sub(r"(?m)^account: .*\n", "", text))  # an option of Slurm
    found = lines(home, "reservation: week_1\n")
    assert line in found and len([one for one in found if "week_1" in one]) == 1


def test_a_reservation_of_pbs_replaces_a_missing_queue(home: Path) -> None:
    site(home, "")
    assert lines(home, "reservation: R42\n")[-1] == "-q R42"


def test_reservations_that_are_not_possible_are_refused(home: Path) -> None:
    site(home, "directives: [--reservation=r]\n", "slurm")
    message = error_of(home, "gpus: 4\nreservation: x\n")
    assert "svd.yaml:2:14: `--reservation=x`: reservation is written by the site" in message
    message = error_of(home, "gpus: 0\nreservation: x\n", "local")
    assert "local has no directive for `reservation`" in message


def test_the_head_may_have_an_account_of_its_own(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1}", "max_nodes: 1}\n  cpu: {}"))
    made = made_plan(home, "gpus: 4\naccount: gpu1\nhead: {account: cpu1}\n")
    assert made.head and "--account=cpu1" in made.head.lines
    assert "--account=gpu1" in made.groups[0].lines
    message = error_of(home, "gpus: 4\nhead: {account: CPU}\n")
    assert "svd.yaml:2:17" in message and "'CPU' does not match" in message


ARGUMENTS = "submit_arguments: ['-g {account}', '-v X=1']\naccount: {}\n"


def test_arguments_of_the_command_that_submits_are_no_directives(home: Path) -> None:
    site(home, ARGUMENTS, "sge")
    job = made_plan(home, "gpus: 4\naccount: tga_ada\n").groups[0]
    assert job.submit_arguments == ("-g", "tga_ada", "-v", "X=1")
    assert "tga_ada" not in str(job.lines)
    assert made_plan(home, "gpus: 4\n").groups[0].submit_arguments == ("-v", "X=1")
    text = plan_text(made_plan(home, "gpus: 4\naccount: tga_ada\n"), "x-0000")
    assert re.search(r"submitted with +-g tga_ada -v X=1", text)


def test_arguments_are_checked_as_directives(home: Path) -> None:
    site(home, "submit_arguments: [-N x]\n", "sge")
    assert "s.yaml:7:20: `-N x`: -N is written by gpujobs" in error_of(home, "gpus: 4\n")
    site(home, "submit_arguments: [--qos=a]\ndirectives: [--qos=b]\n", "slurm")
    assert "qos is written by the site" in error_of(home, "gpus: 4\n")
    site(home, "submit_arguments: [\"-x 'a b'\"]\n", "sge")
    assert "must have no quotes" in error_of(home, "gpus: 4\n")


def test_the_client_passes_the_arguments(home: Path, tmp_path: Path) -> None:
    command = tmp_path / "qsub"
    command.write_text('#!/bin/sh\ncat > /dev/null\necho "$@" > arguments\necho 42\n')
    command.chmod(0o755)
    client = SchedulerClient(
        get_scheduler("pbs")(), {"qsub": str(command)}, arguments=("-g", "a;b $c")
    )
    assert client.submit("#!/bin/bash\n", "x-0000", [], tmp_path) == "42"
    assert (tmp_path / "arguments").read_text().endswith("-g a;b $c\n")


def test_a_number_in_a_directive_is_a_number() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Section(model.Model):
        """A section."""

        word: str | None = model.optional(IN_DIRECTIVE, "a word")
        nice: int | None = model.optional(NUMBER_IN_DIRECTIVE, "a number")
        other: str | None = model.optional(model.WORD, "in no directive")

    assert directive_keys(Section) == ("word", "nice")
    assert model.build(Section, Document({"nice": "0"})).nice == 0
    with pytest.raises(InputError, match="'lots' is not a whole number"):
        model.build(Section, Document({"nice": "lots"}))
    with pytest.raises(InputError, match="not a whole number"):
        model.build(Section, Document({"nice": "5 --exclusive"}))


def test_keys_with_a_directive_are_those_of_the_batch_schedulers() -> None:
    """`KEY_directive` of a class and a key of the profile belong together, by name."""
    written = {
        (name.removesuffix("_directive"), line)
        for scheduler in map(get_scheduler, scheduler_names())
        for name, line in vars(scheduler).items()
        if name.endswith("_directive")
    }
    assert {key for key, _ in written} == {"account", *DIRECTIVE_KEYS}
    assert [line for key, line in written if f"{{{key}}}" not in line] == []

"""Invalid YAML and invalid values of a profile: the error names file, line and column."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gpujobs.config import fields, hints
from gpujobs.config.document import read
from gpujobs.config.model import key_names, keys_of
from gpujobs.config.profile import Profile, Workers
from gpujobs.config.site import Site
from gpujobs.config.sitequeue import Queue
from gpujobs.config.spec import load_spec
from gpujobs.config.synonyms import INSIDE, WORDS
from gpujobs.errors import InputError, Position

from ..support.each import each
from .support import SLURM, error_of, made_plan


def test_a_walltime_is_hours_minutes_seconds(home: Path) -> None:
    profile = made_plan(home, "gpus: 1\nwalltime: 12:30:00\n").profile
    assert profile.walltime == 45000  # 12 h 30 min, not base 60


def test_a_time_of_two_parts_is_refused_as_ambiguous(home: Path) -> None:
    message = error_of(home, "gpus: 1\nwalltime: 30:00\n")
    assert "svd.yaml:2:11" in message and "minutes or hours?" in message


@each(
    ("text", "size"),
    [("1B", 1), ("512B", 2**9), ("1.5KiB", 1536), ("3MB", 3 * 2**20), ("2G", 2**31), ("0.5TiB", 2**39), ("2PiB", 2**51)],
)  # fmt: skip
def test_each_unit_of_a_size_is_1024_of_the_one_before(text: str, size: int) -> None:
    assert fields.size(text) == size


def test_the_caret_is_below_the_value(home: Path) -> None:
    place, line, caret = error_of(home, "gpus: 1\nwalltime: 30:00\n").splitlines()[:3]
    assert place.startswith(f"{home}/svd.yaml:2:11: ")
    assert line.partition(" | ")[::2] == ("    2", "walltime: 30:00")
    assert line.index("30:00") == caret.index("^") and caret.strip() == "|           ^^^^^"


def test_an_excerpt_of_a_long_line_has_110_characters_and_its_position_is_the_80th() -> None:
    line = "".join(chr(ord("a") + number % 26) for number in range(300))
    shown, caret = Position("p.yaml", 1, 200, line, width=100).excerpt().splitlines()
    assert shown == f"    1 | {line[120:230]}"
    assert caret == f"      | {79 * ' '}{31 * '^'}"


@pytest.mark.parametrize("word", ["NO", "on", "yes", "off", "Null0"])
def test_yes_and_no_are_text(home: Path, word: str) -> None:
    assert made_plan(home, f"gpus: 1\nenv: {{A: {word}}}\nrun: [echo, {word}]\n").profile.env == {
        "A": word
    }


@pytest.mark.parametrize("word", ["yes", "on", "1", "NO"])
def test_yes_and_no_are_no_booleans(home: Path, word: str) -> None:
    assert "neither true nor false" in error_of(home, f"gpus: 1\nnetwork: {{encryption: {word}}}\n")


@each(
    "number",
    ["010", "0x10", "1e1", "8.0", "1_0", "+8", "'8 '", "eight", "true", "null", "[8]", "1:30"],
)
def test_a_number_that_is_not_plain_is_refused(home: Path, number: str) -> None:
    message = error_of(home, f"gpus_per_job: {number}\ngpus: 010\n")
    assert "svd.yaml:2:7" in message and "'010' is not a whole number" in message
    if number != "null":
        assert "svd.yaml:1:15" in message


@pytest.mark.parametrize("account", ["0123", "12e03", "0x10", "1_000"])
def test_an_account_of_digits_stays_text(home: Path, account: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace("[a-z0-9]+", "[a-z0-9_]+"))
    assert (
        f"--account={account}" in made_plan(home, f"gpus: 1\naccount: {account}\n").groups[0].lines
    )


def test_a_duplicate_key_names_both_lines(home: Path) -> None:
    message = error_of(home, "gpus: 1\nwalltime: 1h\ngpus: 2\n")
    assert "svd.yaml:3:1" in message and "first in line 1" in message and "svd.yaml:1:1" in message


@each(
    ("text", "message"),
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
def test_unsupported_yaml_is_refused_with_its_name(home: Path, text: str, message: str) -> None:
    assert message in error_of(home, text)


def test_a_file_with_bom_and_crlf_is_read(home: Path) -> None:
    assert made_plan(
        home, "\ufeffgpus: 2\r\nwalltime: 2h\r\nrun: [python, a.py]\r\n"
    ).profile.run == (
        "python",
        "a.py",
    )


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("gpus: 8\n\twalltime: 1h\n", "2:1"),
        ("gpus: 8\nrun: [python\n", "2:6"),
        ("gpus: 'x\n", "1:7"),
    ],
)
def test_a_syntax_error_has_a_position(home: Path, text: str, position: str) -> None:
    assert f"svd.yaml:{position}: not valid YAML" in error_of(home, text)


def test_an_endless_file_is_not_read_to_its_end(home: Path) -> None:
    with pytest.raises(InputError, match="larger than 256 KiB"):
        load_spec(Path("/dev/zero"), site="local")
    reader, writer = os.pipe()  # gpujobs submit <(make-a-profile)
    os.write(writer, b"gpus: 0\nname: piped\n")
    os.close(writer)
    assert load_spec(Path(f"/dev/fd/{reader}"), site="local").name == "piped"
    os.close(reader)
    with pytest.raises(InputError, match="directory"):
        load_spec(home, site="local")


def test_invalid_bytes_and_too_large_or_deep_files_are_refused(home: Path) -> None:
    for raw, message in (
        (b"gpus: 8\nname: \xff\n", "2:7: not UTF-8"),
        (b"gpus: 8\nname: a\x00b\n", "control character"),
        ("gpus: 8\nname: a\u2028b\n".encode(), "2:8: has a control character"),
        (b"gpus: 8\n" + b"# " + b"x" * 300_000, "larger than 256 KiB"),
        (b"gpus: " + b"[" * 100 + b"]" * 100, "nested more than 20 deep"),
        (b"a: " * 1 + b"{a: " * 5000, "nested more than 20 deep"),
    ):
        path = home / "svd.yaml"
        path.write_bytes(raw)
        with pytest.raises(InputError, match=re.escape(message)):
            load_spec(path, site="local")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("waltime: 1h", "walltime"), ("gpu: 8", "gpus"), ("memory: 1GiB", "workers.memory"), ("threads: 2", "workers.threads"),
        ("gpus-per-job: 1", "gpus_per_job"), ("workers: {rmm_pool: 0.5}", "workers.rmm_pool_size"), ("protocol: tcp", "network.protocol"),
    ],
)  # fmt: skip
def test_an_unknown_key_gets_a_suggestion(home: Path, key: str, meant: str) -> None:
    message = error_of(home, f"gpus: 1\n{key}\n")
    assert "unknown key" in message and f"`{meant}`" in message and "svd.yaml:2:" in message


def test_an_unknown_key_that_is_like_no_other_gets_all_keys_of_a_small_section(
    home: Path,
) -> None:
    message = error_of(home, "gpus: 1\nhead: {zzz: 1}\n")
    assert "unknown key `head.zzz`" in message and "hint: keys: account, cpus, " in message


def test_an_unknown_key_of_a_large_section_gets_only_keys_that_are_alike(home: Path) -> None:
    message = error_of(home, "groups:\n  cpu: {gpus: 0, zzz: 1}\n")
    assert "unknown key `groups.cpu.zzz`" in message
    assert message.endswith("hint: `gpujobs schema profile` lists all")
    message = error_of(home, "gpus: 1\nclient_limit: 1h\n")
    assert "hint: similar keys: client_timeout; `gpujobs" in message


def test_a_size_without_a_unit_is_refused_with_two_examples() -> None:
    with pytest.raises(ValueError, match=r"^16 needs a unit, as in 16GiB or 16MiB$"):
        fields.size("16")


def test_twelve_keys_are_listed_and_thirteen_are_not() -> None:
    keys = [f"key_{number}" for number in range(13)]
    assert hints._keys_like("zzz", keys[:12], "Profile") == f"keys: {', '.join(keys[:12])}"
    assert hints._keys_like("zzz", keys, "Profile") == "`gpujobs schema profile` lists all"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("gpus:2", "gpus"),
        ("gpus:2\nwalltime: 1h", "line 1: a space is missing after `gpus"),
        ("gpus: 2\nwalltime:1h\nrun: [true]", "line 2: a space is missing after `walltime"),
        ("gpus: 2\nworkers:{count: 1}", "workers"),
    ],
)
def test_a_missing_space_after_a_colon_is_named(home: Path, text: str, key: str) -> None:
    assert f"{key}:`" in error_of(home, f"{text}\n").partition("hint: ")[2]


def test_an_address_is_no_key_without_its_blank(home: Path) -> None:
    assert "space" not in error_of(home, "http://example.org\n")


def test_all_errors_are_told_in_one_run(home: Path) -> None:
    message = error_of(
        home,
        "gpus: x\nwaltime: 1h\nworkers: {memory: 16, threads: 0}\nenv: {A-B: 1}\nrun: 'a \"b'\nlayout: mpj\n",
    )
    assert re.findall(r"svd\.yaml:(\d)", message) == ["1", "2", "3", "3", "4", "5", "6"]


@each("size", ["16", "1.5", "'16'", "GiB", "16XB", "-1GB", "0GiB", "16 G i B", "1e3GiB", "true"])
def test_a_size_needs_a_unit(home: Path, size: str) -> None:
    message = error_of(home, f"gpus: 1\nworkers: {{memory: {size}}}\n")
    assert "svd.yaml:2:19" in message
    if size in ("16", "1.5"):
        assert f"as in {size}GiB or {size}MiB" in message


@each(
    "line",
    ["walltime: .inf", "walltime: 0", "walltime: 0h", "walltime: -1h", "walltime: true", "walltime: forever", "gpus: -1", "gpus: .inf",
     "workers: {threads: 0}", "workers: {threads: -1}", "start_timeout: 5", "walltime: 1:99:00", "walltime: 99999999h"],
)  # fmt: skip
def test_a_number_out_of_range_is_refused(home: Path, line: str) -> None:
    assert "svd.yaml:" in error_of(
        home, f"{line}\n" if line.startswith("gpus") else f"gpus: 1\n{line}\n"
    )


@each(
    ("key", "hint"),
    [
        ("partitions: x", "`queue`"), ("partition: x", "`queue`"), ("qos: x", "directives: [--qos=NAME]"),
        ("constraint: x", "directives: [--constraint=NAME]"), ("mem: 1G", "`memory_per_job`"), ("time: 1h", "`walltime`"),
        ("nthreads: 1", "`workers.threads`"), ("environ: {}", "`env`"), ("idle-timeout: 1h", "did you mean `idle_timeout`?"),
        ("worker_gpu: 1", "`workers.gpus_per_worker`"), ("rmm_pool_size: 0.5", "`workers.rmm_pool_size`"), ("nodes: 2", "`gpus_per_job`"),
        ("cpus_per_task: 8", "`cpus_per_job`"), ("workers: {nthreads: 2}", "`workers.threads`"), ("script: x", "`run`"),
        ("modules: x", "`environment.setup`"),
    ],
)  # fmt: skip
def test_a_word_of_another_program_gets_a_hint(home: Path, key: str, hint: str) -> None:
    assert (
        f"hint: use {hint}" in (message := error_of(home, f"gpus: 1\n{key}\n")) or hint in message
    )
    assert "options" not in message and "container" not in message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("partitions: {}", "`queues`"), ("qos: x", "`directives`"), ("walltime: 1h", "`defaults.walltime`"), ("modules: x", "`setup`"),
        ("name: x", "the name of the file"), ("hostname: x", "`hostnames`"),
    ],
)  # fmt: skip
def test_a_word_of_another_program_in_a_site_file_gets_a_hint(
    home: Path, text: str, hint: str
) -> None:
    (home / "s.yaml").write_text(f"{SLURM}{text}\n")
    assert hint in error_of(home, "gpus: 1\n")


@pytest.mark.parametrize(
    "text", ["mem: 1G", "cpus: 8", "gpus: 1", "time: 1h", "qos: x", "partition: x"]
)
def test_a_word_of_another_program_in_a_queue_gets_a_hint(home: Path, text: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1", text))
    assert "hint: use " in (message := error_of(home, "gpus: 1\n")) or "`directives`" in message


@pytest.mark.parametrize(
    "key", ["layout", "run_on", "network: {protocol", "workers: {worker_class"]
)
def test_nothing_is_not_a_choice(home: Path, key: str) -> None:
    message = error_of(home, f"gpus: 1\n{key}:{' }' if '{' in key else ''}\n")
    assert "None" not in message and re.search(
        r"svd\.yaml:2:\d+: `[\w.]+` must be .* or .*, not nothing", message
    )


def test_words_of_other_programs_mean_keys() -> None:
    keys, top = set(key_names(Profile)), set(keys_of(Profile))
    assert len(WORDS) >= 100
    assert {key for key in WORDS.values() if " " not in key} <= keys
    assert not {*WORDS} & top
    of_site = {*key_names(Site), "defaults.walltime"}
    for model, words in INSIDE.items():
        files = {"Workers": keys, "Site": of_site, "Queue": set(keys_of(Queue))}
        assert {key for key in words.values() if " " not in key} <= files[model]
        own = {"Workers": Workers, "Site": Site, "Queue": Queue}[model]
        assert not set(words) & set(keys_of(own))


@each(
    ("text", "hint"),
    [
        ("gpus: 1\nworker_memory: 1G", "use `workers.memory`"),
        ("gpus: 1\nworkers: {threads_per_worker: 2}", "use `workers.threads`"),
        ("groups: {a: {gpus: 1, run: x}}", "`run` is for the whole cluster: write it outside of `groups`"),
        ("groups: {a: {gpus: 1, workers: {nthreads: 1}}}", "use `groups.a.workers.threads`"),
        ("gpus: 1\nsoftware: x", "use `environment`"),
        ("gpus: 1\nenviron: {}", "use `env`"),
        ("gpus: 1\nscript: x", "use `run`"),
        ("ngpus: 1", "use `gpus`: each GPU has one worker"),
        ("gpus: 1\nmemory_limit: 1G", "use `workers.memory`"),
        ("gpus: 1\nnthreads: 1", "use `workers.threads`"),
        ("gpus: 1\nworker_options: {}", "use `workers.options`"),
        ("gpus: 1\nncores: 1", "use `cpus_per_job`"),
        ("gpus: 1\nregion: x", "it is for machines of a cloud"),
        ("gpus: 1\ncontainer: mine", "did you mean `environment.container`?"),
        ("gpus: 1\nworkers: 4", "workers: {count: 4} for CPU workers; `gpus` has a worker each"),
        ("gpus: 1\nenvironment: {container: mine}", "container: {image: mine}"),
        ("gpus: 1\nnetwork: ucxx", "network: {protocol: ucxx}"),
        ("gpus: 1\ncolour: red", "`gpujobs schema profile` lists all"),
        ("gpus: 1\nwallclock: 1h", "use `walltime`"),
        ("gpus: 1\nstart_timeout: 0", "`start_timeout` must be longer than 0 seconds"),
    ],
)  # fmt: skip
def test_hints_are_right(home: Path, text: str, hint: str) -> None:
    assert hint in error_of(home, f"{text}\n")


@pytest.mark.parametrize("word", ["poll: 5s", "hostnames: [a]"])
def test_a_key_of_the_site_in_a_queue_belongs_outside(home: Path, word: str) -> None:
    (home / "s.yaml").write_text(SLURM.replace("max_nodes: 1", word))
    name = word.partition(":")[0]
    hint = f"hint: `{name}` is for the whole site: write it outside of `queues`"
    assert hint in error_of(home, "gpus: 1\n")


def test_values_are_nested_as_deep_as_the_limit_and_no_deeper(home: Path) -> None:
    (home / "deep.yaml").write_text(f"a: {'[' * 20}{']' * 20}\n")
    assert read(home / "deep.yaml").items["a"]
    for text in (f"a: {'[' * 21}{']' * 21}\n", f"{'{a: ' * 22}1{'}' * 22}\n"):
        (home / "deep.yaml").write_text(text)
        with pytest.raises(InputError, match="nested more than 20 deep"):
            read(home / "deep.yaml")

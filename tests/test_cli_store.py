"""The commands of the store, on real stores: what they print, what they change, how they end."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import safetensors
import typer
from click.testing import CliRunner, Result

from featcache.cli import COMMANDS, _from_typer, app
from featcache.errors import ConfigError
from featcache.features import Header, Layout, TensorSpec, checksum
from featcache.tiers.disk import DiskTier

ENCODER_A, ENCODER_B = bytes([0xAA] * 32), bytes([0xBB] * 32)
BUDGET = 64 << 20

Run = Callable[..., Result]


def record(number: int, encoder: bytes = ENCODER_A, tokens: int = 16) -> tuple[Header, list[memoryview]]:
    """Record `number`: its key and its data follow from the number."""
    key = random.Random(number).randbytes(32)
    layout = Layout(tokens, 640 + number, 480, grid=(1, 8, 8), tiles=(1, 1))
    header = Header.of(key, encoder, layout, {"rows": TensorSpec("F16", (tokens, 64))})
    return header, [memoryview(random.Random(-1 - number).randbytes(header.data_bytes))]


def key(number: int) -> str:
    return record(number)[0].key.hex()


def fill(path: Path, records: list[tuple[Header, list[memoryview]]], model: str = "org/model-a") -> None:
    tier = DiskTier.open(path, max_bytes=BUDGET)
    for one in records:
        assert tier.write([one]).stored == 1
    tier.put_encoder(ENCODER_A, {"family": "qwen2_vl", "model": model, "dtype": "bfloat16"})
    tier.close()


def contents(path: Path) -> dict[str, bytes]:
    """Every entry and its data, as the tier reads them back."""
    tier = DiskTier.open(path, max_bytes=BUDGET, readonly=True)
    found = {}
    for entry in tier.entries():
        data = bytearray(entry.data_bytes)
        assert tier.read(entry.key, lambda header, data=data: memoryview(data)) is not None
        found[entry.key.hex()] = bytes(data)
    tier.close()
    return found


def damage(path: Path, number: int) -> None:
    """Overwrite some of a record's bytes in the store's data file."""
    _, (data,) = record(number)
    file = path / "data.mdb"
    content = file.read_bytes()
    assert content.count(data) == 1
    with file.open("r+b") as out:
        out.seek(content.index(data) + 100)
        out.write(bytes(value ^ 0xFF for value in data[100:108]))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Six entries of one encoder and two of another, stored one after the other."""
    path = tmp_path / "store"
    fill(path, [record(n) for n in range(6)] + [record(n, ENCODER_B, tokens=256) for n in (6, 7)])
    return path


@pytest.fixture
def run(store: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("FEATCACHE_STORE", str(store))
    monkeypatch.setenv("FEATCACHE_DISK_BYTES", str(BUDGET))

    def invoke(*args: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return invoke


def table(result: Result) -> list[dict[str, str]]:
    titles, *rows = [line.split("\t") for line in result.stdout.splitlines()]
    return [dict(zip(titles, row, strict=True)) for row in rows]


def facts(result: Result) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in result.stdout.splitlines() if "\t" in line)


# Looking


def test_stats(run: Run, store: Path) -> None:
    document = json.loads(run("stats", "--json").stdout)
    assert document["path"] == str(store)
    assert document["disk"]["entries"] == 8
    assert document["disk"]["data_bytes"] == 6 * 16 * 128 + 2 * 256 * 128
    assert document["disk"]["file_bytes"] <= (store / "data.mdb").stat().st_size
    by_fingerprint = {encoder["fingerprint"]: encoder for encoder in document["encoders"]}
    assert by_fingerprint["aa" * 32]["entries"] == 6
    assert by_fingerprint["aa" * 32]["description"]["model"] == "org/model-a"
    assert by_fingerprint["bb" * 32]["data_bytes"] == 2 * 256 * 128
    shown = run("stats").stdout
    assert "entries\t8\n" in shown
    assert "aaaaaaaaaaaaaaaa\torg/model-a\tqwen2_vl\tbfloat16\t6\t12 KiB" in shown


def test_ls_lists_the_newest_first(run: Run) -> None:
    rows = table(run("ls"))
    assert [row["key"] for row in rows] == [key(n)[:16] for n in reversed(range(8))]
    assert rows[0] | {"stored": "", "used": ""} == {
        "key": key(7)[:16],
        "image": "647x480",
        "tokens": "256",
        "features": "32 KiB",
        "encoder": "bb" * 8,
        "stored": "",
        "used": "",
    }
    assert [row["key"] for row in table(run("ls", "--oldest", "--limit", "2"))] == [key(0)[:16], key(1)[:16]]


def test_ls_says_when_there_is_more(run: Run) -> None:
    assert "3 of 8 entries; --limit 0 shows all" in run("ls", "-n", "3").stderr
    assert run("ls", "-n", "8").stderr == ""
    assert len(table(run("ls", "--limit", "0"))) == 8


def test_ls_for_programs(run: Run) -> None:
    assert run("ls", "-q", "--oldest").stdout.split() == [key(n) for n in range(8)]
    first = json.loads(run("ls", "--json", "-n", "1").stdout)[0]
    assert first["key"] == key(7)
    assert first["fingerprint"] == "bb" * 32
    assert first["layout"] == {
        "num_tokens": 256,
        "width": 647,
        "height": 480,
        "grid": [1, 8, 8],
        "tiles": [1, 1],
    }
    assert first["data_bytes"] == 256 * 128
    assert abs(first["created"] - time.time()) < 300


def test_ls_of_one_encoder(run: Run) -> None:
    of_b = [key(7), key(6)]
    assert run("ls", "-q", "--encoder", "bbbbbb").stdout.split() == of_b
    assert len(run("ls", "-q", "--encoder", "org/model-a").stdout.split()) == 6
    assert "no encoder 'cccccc'" in run("ls", "--encoder", "cccccc", code=1).stderr


def test_show(run: Run) -> None:
    document = json.loads(run("show", key(3), "--json").stdout)
    assert document["key"] == key(3)
    assert document["tensors"] == {"rows": {"dtype": "F16", "shape": [16, 64]}}
    assert document["encoder"] == {"family": "qwen2_vl", "model": "org/model-a", "dtype": "bfloat16"}
    shown = facts(run("show", key(3)))
    assert shown["key"] == key(3)
    assert shown["image"] == "643x480"
    assert shown["grid"] == "1x8x8"
    assert shown["rows"] == "F16 [16, 64]"
    assert "org/model-a" in shown["encoder"]


@pytest.mark.parametrize("digits", [6, 7, 12, 63, 64])
def test_keys_may_be_given_by_their_first_digits(run: Run, digits: int) -> None:
    assert facts(run("show", key(3)[:digits]))["key"] == key(3)
    assert facts(run("show", key(3)[:digits].upper()))["key"] == key(3)


def test_keys_that_name_no_entry(run: Run, store: Path) -> None:
    assert "is no key; a key is 64 hex digits" in run("show", key(3)[:5], code=1).stderr
    assert "is no key" in run("show", "not-hex", code=1).stderr
    assert "no entry 000000" in run("show", "000000", code=1).stderr
    twin = bytes.fromhex(key(3)[:10]) + bytes(27)
    header, data = record(3)
    fill(store, [(Header.of(twin, ENCODER_A, header.layout, header.specs), data)])
    assert "beginning of several keys; give more digits" in run("show", key(3)[:9], code=1).stderr
    assert facts(run("show", key(3)[:11]))["key"] == key(3)


# Upkeep


def test_verify_of_a_sound_store(run: Run) -> None:
    assert facts(run("verify"))["damaged"] == "0"
    assert json.loads(run("verify", "--json").stdout)["checked"] == 8


def test_verify_names_damage_and_repair_removes_it(run: Run, store: Path) -> None:
    damage(store, 6)
    result = run("verify", code=1)
    assert f"entry {key(6)} is damaged: its checksum" in result.stderr
    assert facts(result)["damaged"] == "1"
    assert len(run("ls", "-q").stdout.split()) == 8  # looking changes nothing
    report = json.loads(run("verify", "--repair", "--json").stdout)
    assert [entry["key"] for entry in report["damaged"]] == [key(6)]
    assert report["removed"] == 1
    assert key(6) not in run("ls", "-q").stdout
    assert json.loads(run("verify", "--json").stdout)["is_clean"] is True


def test_prune_by_size_takes_the_least_recently_used(run: Run, store: Path) -> None:
    tier = DiskTier.open(store, max_bytes=BUDGET)
    sizes = {entry.key.hex(): entry.file_bytes for entry in tier.entries()}
    tier.touch(record(0)[0].key)  # the oldest is used again
    tier.write([])
    tier.close()
    limit = sum(sizes.values()) - sizes[key(1)] - sizes[key(2)]
    planned = json.loads(run("prune", "--max-bytes", limit, "--dry-run", "--json").stdout)
    assert planned["removed"] == 2
    assert planned["kept_bytes"] == limit
    assert len(contents(store)) == 8
    done = json.loads(run("prune", "--max-bytes", limit, "--json").stdout)
    assert done == {**planned, "dry_run": False}
    assert contents(store).keys() == sizes.keys() - {key(1), key(2)}
    assert run("prune", "--max-bytes", limit).stdout.startswith("removed\t0 entries")
    run("prune", "--max-bytes", "0")
    assert contents(store) == {}


def test_prune_by_age(run: Run, store: Path) -> None:
    assert json.loads(run("prune", "--older-than", "1h", "--json").stdout)["removed"] == 0
    time.sleep(0.01)
    assert json.loads(run("prune", "--older-than", "0", "--dry-run", "--json").stdout)["removed"] == 8
    run("prune", "--older-than", "0s")
    assert contents(store) == {}


def test_prune_by_encoder(run: Run, store: Path) -> None:
    assert facts(run("prune", "--encoder", "bbbbbbbb", "--dry-run"))["would remove"].startswith("2 entries")
    run("prune", "--encoder", "org/model-a", "--max-bytes", "1TiB")  # nothing is too much
    assert len(contents(store)) == 8
    run("prune", "--encoder", "org/model-a")
    assert contents(store).keys() == {key(6), key(7)}
    assert json.loads(run("stats", "--json").stdout)["disk"]["entries"] == 2


def test_prune_needs_to_know_what(run: Run) -> None:
    assert "say what to remove" in run("prune", code=2).stderr
    assert "--max-bytes: 'lots' is not a size" in run("prune", "--max-bytes", "lots", code=1).stderr
    assert "--older-than: 'old' is not a duration" in run("prune", "--older-than", "old", code=1).stderr


# Moving


def test_what_is_exported_can_be_imported(run: Run, store: Path, tmp_path: Path) -> None:
    before = contents(store)
    files, other = tmp_path / "files", tmp_path / "other"
    assert facts(run("export", "--all", "--to", files))["exported"].startswith("8 entries")
    assert {path.name for path in files.iterdir()} == {"encoders.json", *(f"{k}.safetensors" for k in before)}
    result = run("import", files, "--store", other)
    assert facts(result)["imported"].startswith("8 entries")
    assert contents(other) == before
    assert "org/model-a" in run("stats", "--store", other).stdout
    again = json.loads(run("import", files, "--store", other, "--json").stdout)
    assert (again["imported"], again["already_there"], again["failed"]) == (0, 8, [])


def test_exported_files_are_plain_safetensors(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    run("export", key(2)[:8], "--to", file)
    header, (data,) = record(2)
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata()["key"] == key(2)
        assert opened.get_tensor("rows").tobytes() == data
    assert file.read_bytes() == header.to_bytes(checksum(header, [data])) + data
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["one.safetensors"]


def test_export_of_some(run: Run, tmp_path: Path) -> None:
    run("export", "--encoder", "bbbbbb", "--to", tmp_path / "b")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == 2
    result = run("export", key(1), "000000", key(2), "--to", tmp_path / "c", code=3)
    assert "featcache: 000000: no entry" in result.stderr
    assert {path.stem for path in (tmp_path / "c").glob("*.safetensors")} == {key(1), key(2)}
    assert "say what to export" in run("export", "--to", tmp_path / "d", code=2).stderr
    assert "say what to export" in run("export", key(1), "--all", "--to", tmp_path / "d", code=2).stderr
    assert "one file, for one key" in run("export", "--all", "--to", "x.safetensors", code=2).stderr


def test_damaged_entries_are_not_exported(run: Run, store: Path, tmp_path: Path) -> None:
    damage(store, 6)
    result = run("export", "--all", "--to", tmp_path / "files", "--json", code=3)
    document = json.loads(result.stdout)
    assert document["exported"] == 7
    assert [failure["name"] for failure in document["failed"]] == [key(6)]
    assert not (tmp_path / "files" / f"{key(6)}.safetensors").exists()


def test_damaged_and_foreign_files_are_refused_by_name(run: Run, store: Path, tmp_path: Path) -> None:
    files, other = tmp_path / "files", tmp_path / "other"
    run("export", "--all", "--to", files)
    damaged, cut, renamed = (files / f"{key(n)}.safetensors" for n in (0, 1, 2))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-5])
    renamed.rename(files / "renamed.safetensors")  # a name says nothing
    (files / "notes.safetensors").write_bytes(b"not a record")
    os.mkfifo(files / "pipe.safetensors")
    result = run("import", files, tmp_path / "missing.safetensors", "--store", other, "--json", code=3)
    document = json.loads(result.stdout)
    assert document["imported"] == 6
    reasons = {Path(failure["name"]).name: failure["reason"] for failure in document["failed"]}
    assert "checksum does not match" in reasons[damaged.name]
    assert "by its header it is" in reasons[cut.name]
    assert "not a safetensors file" in reasons["notes.safetensors"]
    assert reasons["pipe.safetensors"] == "is not a regular file"
    assert reasons["missing.safetensors"] == "No such file or directory"
    assert len(reasons) == 5
    for name in reasons:
        assert name in result.stderr
    assert (
        contents(other).items()
        == {k: v for k, v in contents(store).items() if k not in (key(0), key(1))}.items()
    )


def test_import_of_an_empty_folder_and_of_a_store_without_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no .safetensors files" in run("import", tmp_path / "empty", code=3).stderr
    run("import", code=2)


def test_import_keeps_the_budget(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [record(100 + n, tokens=1 << 13) for n in range(45)]  # of 1 MiB each
    source = tmp_path / "large"
    fill(source, large)
    run("export", "--all", "--to", tmp_path / "files", "--store", source)
    monkeypatch.setenv("FEATCACHE_DISK_BYTES", "32MiB")
    result = json.loads(run("import", tmp_path / "files", "--store", tmp_path / "small", "--json").stdout)
    assert result["imported"] == 45
    assert result["evicted"] >= 45 - 32
    assert (tmp_path / "small" / "data.mdb").stat().st_size <= 1.15 * (32 << 20)


# Ends


STORE_COMMANDS = [
    ("stats",),
    ("ls",),
    ("show", "0" * 64),
    ("verify",),
    ("prune", "--older-than", "1d"),
    ("export", "--all", "--to", "files"),
]


@pytest.mark.parametrize("command", STORE_COMMANDS)
def test_a_missing_store_is_named_and_not_made(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    missing = tmp_path / "nowhere"
    result = run(*command, "--store", missing, code=1)
    assert (
        result.stderr == f"featcache: no store at {missing}; name another with --store or FEATCACHE_STORE\n"
    )
    assert result.stdout == ""
    assert not missing.exists()


@pytest.mark.parametrize("command", STORE_COMMANDS)
def test_a_folder_that_is_no_store_is_refused(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "data.mdb").write_bytes(b"something else" * 1000)
    result = run(*command, "--store", tmp_path, code=1)
    assert str(tmp_path) in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "data.mdb").read_bytes() == b"something else" * 1000


def test_every_command_has_help_and_json(run: Run) -> None:
    for name in COMMANDS:
        if COMMANDS[name].module in ("inspect", "upkeep", "transfer", "version"):
            assert "--json" in run(name, "--help").stdout
    assert "No such option" in run("stats", "--nonsense", code=2).stderr
    assert "Did you mean" in run("stat", code=2).stderr


def test_help_lists_what_there_is(run: Run) -> None:
    listed = re.findall(r"^  (\w+)  ", run("--help").stdout, re.MULTILINE)
    assert listed == [name for name in COMMANDS if name in listed]
    assert {"stats", "ls", "show", "verify", "prune", "export", "import", "version"} <= set(listed)
    for name in listed:
        assert (Path(sys.modules["featcache.cli"].__path__[0]) / f"{COMMANDS[name].module}.py").exists()


def test_versions(run: Run) -> None:
    document = json.loads(run("version", "--json").stdout)
    assert document["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", document["lmdb"])
    assert facts(run("version")) == document


# Commands that are Typer functions


def test_a_typer_function_is_a_command(tmp_path: Path) -> None:
    def say(word: str, loud: Annotated[bool, typer.Option("--loud")] = False, code: int = 0) -> None:
        """Say a word."""
        if word == "boom":
            raise ConfigError("boom is no word")
        typer.echo(word.upper() if loud else word)
        raise typer.Exit(code)

    command = _from_typer("say", say)
    run = CliRunner().invoke
    assert run(command, ["hello", "--loud"]).output == "HELLO\n"
    assert run(command, ["hello", "--code", "3"]).exit_code == 3
    assert "Say a word." in run(command, ["--help"]).output
    assert run(command, ["--nonsense"]).exit_code == 2
    assert isinstance(run(command, ["boom"]).exception, ConfigError)  # which the group makes a line of


# As real processes


def featcache(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from featcache.cli import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_the_command_itself(store: Path, tmp_path: Path) -> None:
    listed = featcache("ls", "-q", "--store", str(store))
    assert (listed.returncode, listed.stderr, len(listed.stdout.split())) == (0, "", 8)
    missing = featcache("stats", "--store", str(tmp_path / "nowhere"))
    assert missing.returncode == 1
    assert missing.stderr.startswith("featcache: no store at ")
    assert len(missing.stderr.splitlines()) == 1


def test_store_commands_import_nothing_heavy(store: Path, tmp_path: Path) -> None:
    script = """
import sys
from featcache.cli import app
for args in {commands!r}:
    try:
        app([*args, "--store", {store!r}, "--json"])
    except SystemExit as end:
        assert end.code == 0, args
heavy = {{"torch", "transformers", "numpy", "PIL", "rich", "typer", "pydantic"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    commands = [["stats"], ["ls"], ["show", key(1)], ["verify"], ["prune", "--older-than", "1d"]]
    commands += [["export", "--all", "--to", str(tmp_path / "f")], ["import", str(tmp_path / "f")]]
    result = subprocess.run(
        [sys.executable, "-c", script.format(commands=commands, store=str(store))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_a_reader_that_goes_away_is_no_error(store: Path) -> None:
    fill(store, [record(n, tokens=1) for n in range(1000, 1600)])
    script = "from featcache.cli import main; main()"
    command = [sys.executable, "-c", script, "ls", "--limit", "0", "--json", "--store", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_tables_on_a_terminal(store: Path) -> None:
    shown = on_terminal("ls", "--store", str(store))
    assert key(7)[:16] in shown
    assert "─" in shown  # drawn
    assert "\t" not in shown
    stats = on_terminal("stats", "--store", str(store))
    assert "org/model-a" in stats


def on_terminal(*args: str) -> str:
    """What the command prints to a terminal of 120 columns."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"COLUMNS": "120", "TERM": "xterm"}
        os.execv(sys.executable, [sys.executable, "-c", "from featcache.cli import main; main()", *args])
    output = b"".join(chunks(terminal))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, output
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())


def chunks(terminal: int) -> Iterator[bytes]:
    try:
        while chunk := os.read(terminal, 65536):
            yield chunk
    except OSError:  # Linux's way to say that the other side is closed
        return
    finally:
        os.close(terminal)

"""Tests of the command line and environment of a server launch."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from sglang.srt.server_args import ServerArgs

from dsv4_sglang.srt import launch
from dsv4_sglang.srt.launch.checkpoint_check import INDEX, check_checkpoint
from dsv4_sglang.srt.launch.command import (
    CPU_FLAGS,
    CPU_SHIM,
    OPT_IN_FLAG,
    Command,
    config_of,
    cpu_environment,
    engine_arguments,
    flag_value,
    server_command,
)
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.plugin import entry_point
from dsv4_sglang.testing import tiny
from dsv4_sglang.testing.tiny_config import TinySpec, config_json

FLAG = OPT_IN_FLAG


def _override(command: Command) -> dict:
    values = [command.argv[i + 1] for i, word in enumerate(command.argv) if word == FLAG]
    assert len(values) == 1
    return json.loads(values[0])


def test_overrides_of_the_user_are_kept() -> None:
    given = {"dsv4_sglang": {"indexer_format": "fp32"}, "rope_theta": 5}
    command = server_command("m", ["--port", "1", FLAG, json.dumps(given), "--tp", "1"], cpu=False)
    assert _override(command) == given
    assert command.argv[-4:] == ["--port", "1", "--tp", "1"]
    assert _override(server_command("m", [FLAG + '={"a": 1}'], cpu=True)) == {"dsv4_sglang": {}, "a": 1}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "config.json cannot be read (No such file or directory); give the folder of a checkpoint"),
        ('{"model_type": ', "config.json is not JSON: Expecting value: line 1 column 16"),
        ("[1]", "config.json has the model_type None; expected one of deepseek_v4, "),
        ('{"model_type": "llama"}', "config.json has the model_type 'llama'; expected one of deepseek_v4, "),
        ("", "config.json is not JSON: Expecting value: line 1 column 1"),
        ({"hidden_size": None}, "config.json: config field 'hidden_size' is missing; restore the file of the check"),
        ({"vocab_size": None}, "config.json: config field 'vocab_size' is missing; "),
        ({"architectures": None}, "config.json: config field 'architectures' is missing; "),
        ({"hidden_size": "wide"}, "config.json: config field 'hidden_size' is 'wide'; expected an integer; "),
        ({"compress_ratios": [0, 4]}, "config.json: config field 'compress_ratios' has 2 entries; expected at least "),
        ({"compress_ratios": "0"}, "config.json: config field 'compress_ratios' is '0'; expected a list; "),
        ({"rope_scaling": "yarn"}, "config.json: config field 'rope_scaling' is 'yarn'; expected a mapping; "),
    ],
)
def test_the_file_of_a_broken_config_is_named(
    tmp_path: Path, written: str | dict[str, object] | None, said: str
) -> None:
    if isinstance(written, dict):
        written = json.dumps({**config_json(TinySpec()), **written})
    if written is not None:
        (tmp_path / "config.json").write_text(written)
    with pytest.raises(LaunchError) as error:
        config_of(str(tmp_path), None)
    assert str(error.value).startswith(f"{tmp_path / said}")


def test_overrides_replace_fields_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config_json(TinySpec()), "hidden_size": "wide"}))
    assert config_of(str(tmp_path), '{"hidden_size": 512, "dsv4_sglang": {}}')["hidden_size"] == 512


def test_missing_model_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("deepseek-ai/DeepSeek-V4-Flash", "s3://bucket/a/b"):
        assert config_of(name, None) == {}
    for missing in (str(tmp_path / "gone"), "DeepSeek-V4-Flash", "./models/tiny", "models/tiny", "a/b/c"):
        with pytest.raises(LaunchError) as error:
            config_of(missing, None)
        assert str(error.value).startswith(f"--model-path {missing}: no such folder; give ")


@pytest.mark.parametrize(("overrides", "error"), [('{"dsv4_sglang": {}}', LaunchError), ("{}", OSError)])
def test_unreadable_config_gives_one_line(
    overrides: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_args: object) -> None:
        raise OSError("no connection\nto the hub")

    monkeypatch.setattr(entry_point.OptIn, "_install", lambda *_: None)
    given = SimpleNamespace(model_path="a/b", json_model_override_args=overrides)
    with pytest.raises(
        error, match=r"--model-path a/b cannot be read; .* no connection to |^no connection\nto"
    ) as raised:
        entry_point.OptIn().build_model_config(read, given)
    assert type(raised.value) is error


def test_gpu_command_adds_only_the_opt_in() -> None:
    command = server_command("m", ["--dtype", "bfloat16"], cpu=False, python="py")
    assert command.argv == [
        *["py", "-m", "sglang.launch_server", "--model-path", "m", FLAG, '{"dsv4_sglang": {}}'],
        *["--dtype", "bfloat16"],
    ]
    assert command.environment == {}


@pytest.mark.parametrize("given", [["--max-total-tokens", "999"], ["--max-total-tokens=999"]])
def test_user_flag_replaces_the_cpu_default(given: list[str]) -> None:
    argv = server_command("m", given, cpu=True).argv
    assert argv[-len(given) :] == given
    assert sum(word.startswith("--max-total-tokens") for word in argv) == 1
    assert argv[argv.index("--device") + 1] == "cpu"


def test_the_printed_line_is_the_command() -> None:
    command = server_command("a dir/with 'quotes'", ["--host", "x y"], cpu=True)
    words = shlex.split(command.shell())
    count = len(command.environment)
    assert dict(word.split("=", 1) for word in words[:count]) == command.environment
    assert words[count:] == command.argv


def test_cpu_environment_extends_the_python_path() -> None:
    mine = os.pathsep.join(["/mine", str(CPU_SHIM), "/other"])
    path = cpu_environment({"PYTHONPATH": mine})["PYTHONPATH"].split(os.pathsep)
    assert path == [str(CPU_SHIM), "/mine", "/other"]
    assert cpu_environment({})["PYTHONPATH"] == str(CPU_SHIM)


def test_engine_arguments() -> None:
    arguments = engine_arguments("m", cpu=True, max_running_requests=3, dtype="float32")
    assert arguments["device"] == "cpu"
    assert arguments["max_running_requests"] == 3
    assert arguments["max_total_tokens"] == int(CPU_FLAGS["--max-total-tokens"])
    assert json.loads(str(arguments["json_model_override_args"])) == {"dsv4_sglang": {}}
    assert set(engine_arguments("m", cpu=False)) == {"model_path", "json_model_override_args"}


@pytest.mark.parametrize(
    ("flags", "found"),
    [(["--a", "1"], "1"), (["--a=1"], "1"), (["--a=1", "--a", "2"], "2"), (["--b", "--a"], ""), (["--ab", "1"], None)],
)
def test_flag_value(flags: list[str], found: str | None) -> None:
    assert flag_value(flags, "--a") == found


@pytest.mark.parametrize("given", [["--json-model-override", '{"a": 1}'], ['--j={"a": 1}']])
def test_an_abbreviation_counts_as_in_sglangs_parser(given: list[str]) -> None:
    command = server_command("m", ["--port", "1", *given], cpu=False)
    assert _override(command) == {"dsv4_sglang": {}, "a": 1} and command.argv[-2:] == ["--port", "1"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flags.yaml"
    path.write_text("json-model-override-args: {a: 1}\nport: 77\nmax_total_tokens: 999\nlora-paths: [a, b]\n")
    return path


@pytest.mark.parametrize("join", [False, True])
def test_flags_of_a_file(file: Path, join: bool) -> None:
    given = [f"--conf={file}"] if join else ["--config", str(file)]
    command = server_command("m", given, cpu=True)
    assert _override(command) == {"dsv4_sglang": {}, "a": 1}
    assert command.argv[-2:] == ["--config", str(file)], "in two words, which SGLang looks for"
    assert "--max-total-tokens" not in command.argv and "--max-running-requests" in command.argv
    assert flag_value(given, "--port") == "77"
    assert flag_value([*given, "--port", "5"], "--port") == flag_value(["--port", "5", *given], "--port")
    assert flag_value([*given, "--port", "5"], "--port") == "5"
    more = server_command("m", [*given, FLAG, '{"b": 2}'], cpu=False)
    assert _override(more) == {"dsv4_sglang": {}, "b": 2}, "the command line wins, as in SGLang"


@pytest.mark.parametrize("text", ["[1]", "{", None])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "flags.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"--config .*flags\.yaml"):
        server_command("m", ["--config", str(tmp_path / "flags.yaml")], cpu=False)


# Files of a checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two weight files with an index, and a NextN layer."""
    folder = tiny.make_tiny(tmp_path_factory.mktemp("whole"), TinySpec(ratios=(0, 4), hidden=128, nextn=True))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{1 + name.startswith('layers.')}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def _copy(whole: Path, folder: Path) -> Path:
    return Path(shutil.copytree(whole, folder / "copy"))


def _check(folder: Path, **flags: object) -> None:
    config = config_of(str(folder), None)
    check_checkpoint(str(folder), config, lambda field: flags.get(field))


FIRST, SECOND = "model-1.safetensors", "model-2.safetensors"


def _cut(file: Path, size: int) -> None:
    os.truncate(file, size)


def _edit_index(folder: Path, **files: str | None) -> None:
    values = json.loads((folder / INDEX).read_text())["weight_map"] | files
    (folder / INDEX).write_text(json.dumps({"weight_map": values}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / SECOND).unlink(), rf"/{SECOND} is missing \(1 of the 2 files that {INDEX} lists are\); compl"),
        (lambda f: _cut(f / SECOND, 100_000), rf"/{SECOND} has 100000 bytes, and its header says \d+; complete the "),
        (lambda f: (f / FIRST).open("ab").write(b"0"), rf"/{FIRST} has \d+ bytes, and its header says \d+; "),
        (lambda f: _cut(f / FIRST, 0), rf"/{FIRST} \(0 bytes\) is not a safetensors file, or only its beginning; "),
        (lambda f: _cut(f / FIRST, 500), rf"/{FIRST} \(500 bytes\) is not a safetensors file, or only its beginning"),
        (
            lambda f: (f / FIRST).write_text("version https://git-lfs\n" * 9),
            rf"/{FIRST} \(\d+ bytes\) is not a safeten",
        ),
        (lambda f: (f / FIRST).write_bytes(b"\x04" + bytes(7) + b"{{{{"), rf"/{FIRST} has a damaged header; complete"),
        (lambda f: (f / FIRST).write_bytes(b"\x04" + bytes(7) + b"[{}]"), rf"/{FIRST} has a damaged header; complete"),
        (lambda f: _edit_index(f, other=FIRST), rf"/{FIRST} lacks the weight other, which {INDEX} lists; complete"),
        (lambda f: _edit_index(f, other=None), rf"/{INDEX} has no valid weight_map; complete"),
        (lambda f: _cut(f / INDEX, 50), rf"/{INDEX} \(the index of the weights\) is not JSON: .*; complete"),
        (lambda f: [file.unlink() for file in f.glob("*.safetensors*")], r" has no weights \(\*.safetensors\); compl"),
        (lambda f: (f / "tokenizer.json").unlink(), r"/tokenizer.json \(the tokenizer\) cannot be read: No such file"),
        (lambda f: (f / "tokenizer_config.json").unlink(), r"/tokenizer_config.json \(the tokenizer\) cannot be read"),
        (lambda f: _cut(f / "tokenizer.json", 1000), r"/tokenizer.json \(the tokenizer\) is not JSON: .*; complete"),
    ],
)
def test_incomplete_checkpoint_file_is_named(
    whole: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    folder = _copy(whole, tmp_path)
    _check(folder)
    damage(folder)
    with pytest.raises(LaunchError, match=f"^{re.escape(str(folder))}{said}") as error:
        _check(folder)
    assert len(error.value.args) == 1 and "\n" not in str(error.value)


def test_files_that_are_not_loaded_are_not_checked(whole: Path, tmp_path: Path) -> None:
    folder = _copy(whole, tmp_path)
    (folder / "other.safetensors").write_text("not in the index")
    _check(folder)
    (folder / FIRST).unlink()
    _check(folder, load_format="dummy")
    (folder / "tokenizer.json").unlink()
    _check(folder, load_format="dummy", skip_tokenizer_init=True)
    _check(folder, load_format="dummy", tokenizer_path=str(whole))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "weights.bin").touch()
    _check(folder, load_format="auto", tokenizer_path=str(whole))
    with pytest.raises(LaunchError, match="has no weights"):
        _check(folder, load_format="safetensors", tokenizer_path=str(whole))


def test_drafts_need_the_weights_of_their_layer(whole: Path, tmp_path: Path) -> None:
    """SGLang serves drafts of a layer without weights; none is accepted."""
    spec = TinySpec(ratios=(0, 4, 0), hidden=128)
    without = tiny.make_tiny(tmp_path / "without", spec)
    _check(without)
    said = r"--speculative-algorithm EAGLE: .* has no weights of the draft layer \(mtp\.0\.\*\); give a checkpoint that"
    with pytest.raises(LaunchError, match=said):
        _check(without, speculative_algorithm="EAGLE")
    with pytest.raises(LaunchError, match=said):
        _check(whole, speculative_algorithm="EAGLE", speculative_draft_model_path=str(without))
    _check(whole, speculative_algorithm="EAGLE")
    _check(without, speculative_algorithm="EAGLE", speculative_draft_model_path=str(whole))
    _check(without, speculative_algorithm="EAGLE", speculative_draft_model_path="somebody/drafts")
    _check(without, speculative_algorithm="EAGLE", load_format="dummy")
    head = tiny.make_tiny(tmp_path / "head", replace(spec, dspark=5))
    _check(head, speculative_algorithm="DSPARK")
    tensors = load_file(head / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith("mtp.2.")}, head / "model.safetensors")
    with pytest.raises(LaunchError, match=r"has no weights of the draft layer \(mtp\.2\.\*\)"):
        _check(head, speculative_algorithm="DSPARK")


def test_the_nextn_layer_may_have_a_number(whole: Path, tmp_path: Path) -> None:
    folder = _copy(whole, tmp_path)
    (folder / INDEX).unlink()
    tensors = load_file(folder / FIRST)
    save_file({name.replace("mtp.0.", "model.layers.2."): tensor for name, tensor in tensors.items()}, folder / FIRST)
    _check(folder, speculative_algorithm="EAGLE")


def test_sglangs_command_checks_the_checkpoint_too(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the hook replaces it
    folder = _copy(whole, tmp_path)
    _cut(folder / SECOND, 100_000)
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for overrides, rejected in (('{"dsv4_sglang": {}}', True), ("{}", False)):
        args = parser.parse_args(["--model-path", str(folder), OPT_IN_FLAG, overrides])
        with pytest.raises(LaunchError, match=f"{SECOND} has 100000 bytes") if rejected else nullcontext():
            entry_point.before_command_line(object, args)


def test_launch_needs_neither_torch_nor_sglang() -> None:
    modules = [f"dsv4_sglang.srt.launch.{file.stem}" for file in Path(launch.__path__[0]).glob("[!_]*.py")]
    code = f"import sys, {', '.join(modules)}; print(*{{'torch', 'sglang'}}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert len(modules) > 4 and done.stdout == "\n"

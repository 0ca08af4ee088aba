"""Tests of the tiny model: it is reproducible, readable and small, and tests with it can fail."""

import hashlib
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import oracle_v41
from reference.oracle import Oracle
from safetensors.torch import load_file
from support.liveness import run
from transformers import AutoTokenizer, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf
from typer.testing import CliRunner

from dsv4_sglang.cache.layer_spec import Selection
from dsv4_sglang.cache.specs_v41 import v41_specs
from dsv4_sglang.cli import app
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.testing.tiny import make_tiny
from dsv4_sglang.testing.tiny_config import EXPERTS, EXPERTS_PER_TOKEN, TinySpec
from dsv4_sglang.testing.tiny_v41 import TinyV41Spec, make_tiny_v41

pytestmark = pytest.mark.full

VOCAB = TinySpec().vocab


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["--nextn", "--dspark=5"])
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafting")
    result = CliRunner().invoke(app, ["make-tiny", str(folder), request.param])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return torch.randint(3, VOCAB, (300,), generator=torch.Generator().manual_seed(7)).tolist()


def test_bytes_depend_on_the_seed_alone(tiny: Path, tmp_path: Path) -> None:
    """A model is small and made quickly."""
    start = time.process_time()
    digests = _digests(make_tiny(tmp_path / "same"))
    assert time.process_time() - start < 20
    assert sum(p.stat().st_size for p in tiny.iterdir()) < 100e6
    assert digests == _digests(tiny)
    other = _digests(make_tiny(tmp_path / "other", TinySpec(seed=1)))
    assert {name for name, digest in other.items() if digest != digests[name]} == {"model.safetensors"}


def test_transformers_reads_every_tensor(tiny: Path, drafting: Path) -> None:
    for folder in (tiny, drafting):
        _, info = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values()), info
        for name, tensor in load_file(folder / "model.safetensors").items():
            if tensor.is_floating_point():
                assert torch.equal(tensor.float(), tensor.bfloat16().float()), f"{name} is not exact in bf16"


def test_drafts_leave_the_layers_as_they_are(tiny: Path, drafting: Path) -> None:
    plain, tensors = (load_file(folder / "model.safetensors") for folder in (tiny, drafting))
    changed = {name for name, tensor in plain.items() if not torch.equal(tensors.pop(name), tensor)}
    block = json.loads((drafting / "config.json").read_text()).get("dspark_block_size")
    assert changed == {"head.weight"}
    assert {".".join(name.split(".")[:2]) for name in tensors} == {f"mtp.{i}" for i in range(3 if block else 1)}
    assert all(tensor.isfinite().all() and tensor.count_nonzero() for tensor in tensors.values())


def test_logits_are_not_flat(oracle: Oracle, prompt: list[int]) -> None:
    logprobs = oracle.logits(prompt).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert entropy.mean() < 0.7 * torch.tensor(float(VOCAB)).log()
    assert logprobs.argmax(-1).unique().numel() > 50
    tokens = [token for i in range(0, 60, 20) for token in oracle.greedy(prompt[i : i + 20], 20)[0]]
    assert len(set(tokens)) > 15


def test_routers_choose_by_a_wide_margin(oracle: Oracle, prompt: list[int]) -> None:
    """The gap is 1 for scores of about 2, so rounding in earlier layers cannot swap experts."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        module.register_forward_hook(
            lambda m, _, out: seen.append((m.score_fn(out[0]) + m.e_score_correction_bias, out[2]))
        )
        for module in oracle.model.modules()
        if isinstance(module, hf.DeepseekV4TopKRouter)
    ]
    oracle.logits(prompt)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 4
    for scores, chosen in seen:
        top = scores.topk(EXPERTS_PER_TOKEN + 1).values
        assert (top[:, -2] - top[:, -1]).min() > 1.0
        assert len({tuple(sorted(row)) for row in chosen.tolist()}) > EXPERTS // 2  # The choice depends on the token.
        weights = scores.gather(1, chosen)
        assert weights.std() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "heads"), [(0, 64), (1, 16)])
def test_wrong_entry_moves_logprobs_beyond_rounding(tmp_path: Path, prompt: list[int], seed: int, heads: int) -> None:
    """Test 64 heads, as the released models have, and 16 heads, as most server tests use."""
    oracle = Oracle(make_tiny(tmp_path / "tiny", TinySpec(seed=seed, heads=heads)))
    target = torch.tensor(prompt[1:])[:, None]

    def logprobs(**formats: str) -> torch.Tensor:
        return oracle.logits(prompt[:-1], **formats, chunk=128).log_softmax(-1).gather(1, target)

    exact = logprobs()
    bf16, fp8 = ((logprobs(rows=rows) - exact).abs() for rows in ("bf16", "fp8"))
    assert bf16.mean() < 0.007
    assert bf16.max() < 0.035
    assert 5 * bf16.mean() < fp8.mean() < 0.12

    def spoil(
        _module: object, _args: object, out: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entries, bias = out
        entries = entries.clone()
        entries[:, :, 0] = entries[:, :, 0].roll(1, -1)
        return entries, bias

    for kind in (hf.DeepseekV4CSACompressor, hf.DeepseekV4HCACompressor):
        hooks = [m.register_forward_hook(spoil) for m in oracle.model.modules() if isinstance(m, kind)]
        spoilt = (logprobs() - exact).abs()
        for hook in hooks:
            hook.remove()
        assert spoilt.mean() > 8 * bf16.mean(), kind


def test_tokenizer(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "Grüße, 世界!\n  <x>\t" + "".join(map(chr, range(32, 127)))
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == VOCAB
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert len(tokenizer("<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>")["input_ids"]) == 6
    assert tokenizer.decode(list(range(VOCAB)))  # Every id that sampling can return.


@pytest.mark.parametrize("version", ["v4", "v41"])
def test_the_command_takes_the_seed(version: str, tmp_path: Path) -> None:
    words = ["make-tiny", str(tmp_path / "made"), "--seed", "3", *(["--v41"] if version == "v41" else [])]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "seed 3" in result.output
    other = tmp_path / "other"
    make_tiny_v41(other, TinyV41Spec(seed=3)) if version == "v41" else make_tiny(other, TinySpec(seed=3))
    assert _digests(tmp_path / "made") == _digests(other)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--dspark 0", "dspark 0: must be a number of tokens"),
        ("--dspark 5 --nextn", "nextn and dspark: both are stored as mtp.0"),
        ("--v41 --nextn", "--nextn or --dspark with --v41: "),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, arguments: str, said: str) -> None:
    result = CliRunner().invoke(app, ["make-tiny", str(tmp_path / "x"), *arguments.split()])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"dsv4-sglang make-tiny: {said}")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ratios": (0, 5)}, r"ratios \(0, 5\): give one of 0, 4, 128 for each layer"),
        ({"hidden": 200}, "hidden 200: must be a multiple of 128"),
        ({"hash_layers": 9}, "hash_layers 9: must be between"),
        ({"index_topk": 0}, "index_topk 0: must be positive"),
        ({"dspark": 5, "ratios": (0, 4)}, "dspark with 2 layers: the head reads the last 3 layers"),
    ],
)
def test_bad_sizes_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TinySpec(**fields)


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["make-tiny", "/proc/x"])
    said = "dsv4-sglang make-tiny: cannot write /proc/x (No such file or directory); give a folder that can be "
    assert result.exit_code == 2 and result.output.startswith(said)
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(app, ["make-tiny", str(tmp_path)])
    assert result.exit_code == 2 and "notes.txt" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


WITHOUT_ROOM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from dsv4_sglang.__main__ import main
main()
"""


@pytest.mark.parametrize("room", [10_000, 1_000_000])
def test_a_full_disk_is_named(room: int, tmp_path: Path) -> None:
    """A limit on the size of files fails as a full disk does, in the library's writer and in Python's."""
    code = WITHOUT_ROOM.replace("sys.argv[1]", str(room))
    done = run([sys.executable, "-c", code, "make-tiny", str(tmp_path / "new")])
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "File too large" in line
    assert re.match(rf"dsv4-sglang make-tiny: cannot write {tmp_path}/new \(.*\); give a folder .* free space$", line)
    assert not (tmp_path / "new" / "config.json").exists()


@pytest.fixture(scope="module")
def tiny_v41(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_v41(tmp_path_factory.mktemp("tiny_v41"), TinyV41Spec(index_topk=1024))


def test_v41_has_every_kind_of_layer(tiny_v41: Path) -> None:
    specs = v41_specs(V41Config.from_hf(json.loads((tiny_v41 / "config.json").read_text())))
    top_k, reuse = Selection.TOP_K, Selection.REUSE
    assert [spec.selection for spec in specs] == [Selection.NONE, top_k, reuse, top_k, top_k, reuse, top_k, reuse]
    assert [spec.kv_source for spec in specs] == [None, None, 1, None, None, 4, 4, 4]
    tensors = load_file(tiny_v41 / "model.safetensors")
    for layer, spec in enumerate(specs):
        prefix = f"layers.{layer}.attn"
        assert (f"{prefix}.compressor.wkv.weight" in tensors) == (spec.ratio > 0)
        assert (f"{prefix}.compressor.wgate.weight" in tensors) == (spec.ratio == 2)
        assert (f"{prefix}.indexer.wq_b.weight" in tensors) == (spec.selection is top_k)
    assert all(torch.equal(t.float(), t.bfloat16().float()) for t in tensors.values())


def test_v41_reveals_lost_entries_beyond_rounding(
    tiny_v41: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losing 8 of a layer's 300 entries moves log p further than rounding noise does.

    The noise is a relative change of 1e-5, small enough that each cached value is rounded up or down by chance. Sums in
    another order do the same to some values. The number of affected values depends on the processor.
    """
    oracle = oracle_v41.OracleV41(tiny_v41)
    exact = oracle.logits(prompt, chunk=128).log_softmax(-1)
    best = exact.argmax(-1)[:, None]

    def moved() -> torch.Tensor:
        return (oracle.logits(prompt, chunk=128).log_softmax(-1) - exact).gather(1, best)[:, 0].abs()

    embedding = oracle.weights["embed.weight"]
    rounding = 1e-5 * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
    monkeypatch.setitem(oracle.weights, "embed.weight", embedding * (1 + rounding))
    noise = moved()
    monkeypatch.setitem(oracle.weights, "embed.weight", embedding)

    def lose(forward: Any, x: torch.Tensor, prefix: str, ratio: int) -> None:
        write_entries(forward, x, prefix, ratio)
        if ratio == 1:
            forward.entries[128:136] = 0

    write_entries = oracle_v41._Forward.write_entries
    monkeypatch.setattr(oracle_v41._Forward, "write_entries", lose)
    lost = moved()
    assert lost[:128].mean() < noise.mean() < lost[140:].mean() / 3

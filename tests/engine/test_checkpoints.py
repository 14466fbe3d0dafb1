"""A checkpoint or a setting that cannot work is refused before anything is loaded, by name and with both values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd.runtime.config import ConfigError, DeviceConfig, KVConfig
from pd.runtime.engine.build import build
from pd.runtime.engine.shards import parts, share_of
from pd.runtime.engine.spec import read_spec
from pd.runtime.engine.weights import Reader, open_checkpoint
from pd.transfer.memory import MemoryHub, MemoryTransport
from tests.engine.driving import build_engine, generate, ids_of, prompt_of, rank_config
from tests.tiny import VOCAB_SIZE, make_tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "tiny")


def edit_config(**fields: object) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        path = checkpoint / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(checkpoint: Path) -> None:
        path = checkpoint / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)

    return spoil


def drop(name: str) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.pop(name))


def put(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.update({name: tensor}))


def remove(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).write_text(text) and None


DOWN = "model.layers.1.mlp.down_proj.weight"

BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config.json": (remove("config.json"), "has no config.json"),
    "config.json cut short": (write("config.json", '{"architectures": ['), "config.json cannot be read"),
    "no safetensors": (remove("model.safetensors"), "holds no *.safetensors"),
    "safetensors cut short": (write("model.safetensors", "xx"), "model.safetensors cannot be read"),
    "index names an absent file": (
        write("model.safetensors.index.json", '{"weight_map": {"a": "model-7-of-9.safetensors"}}'),
        "has no model-7-of-9.safetensors",
    ),
    "architecture": (edit_config(architectures=["GPT2LMHeadModel"]), "architecture GPT2LMHeadModel is not supported"),
    "no architecture": (edit_config(architectures=[]), "architecture not named in config.json"),
    "tensor missing": (drop(DOWN), f"tensor {DOWN} is missing"),
    "tensor of wrong shape": (
        put(DOWN, torch.zeros(72, 99)),
        f"tensor {DOWN} has shape [72, 99], config.json says [72, 100]",
    ),
    "tensor of unknown type": (put(DOWN, torch.zeros(72, 100, dtype=torch.int8)), f"tensor {DOWN} is of type I8"),
    "untied without a head": (drop("lm_head.weight"), "tensor lm_head.weight is missing"),
    "longrope": (edit_config(rope_parameters={"rope_type": "longrope"}), "rope type 'longrope' is not supported"),
    "rope without its factor": (
        edit_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        "rope linear: factor must be a positive number, not None",
    ),
    "rope by layer kind": (
        edit_config(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "rope parameters of their own for full_attention",
    ),
    "partial rotation": (edit_config(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    "activation": (edit_config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "quantized": (edit_config(quantization_config={"quant_method": "gptq"}), "quantization_config 'gptq'"),
    "heads that do not share": (edit_config(num_key_value_heads=2), "9 query heads do not share 2 KV heads evenly"),
    "size missing": (edit_config(num_hidden_layers=None), "num_hidden_layers must be a positive integer, not None"),
    "size of wrong type": (edit_config(vocab_size="many"), "vocab_size must be a positive integer, not 'many'"),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoint_is_refused_by_name(name: str, checkpoint: Path) -> None:
    spoil, said = BAD_CHECKPOINTS[name]
    spoil(checkpoint)
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_engine(rank_config(checkpoint))


BAD_SETTINGS: dict[str, tuple[dict[str, object], str]] = {
    "tp over the query heads": ({"tp": 10}, "tp 10 is not within 1 and the model's 9 query heads"),
    "unknown dtype": ({"dtype": "int4"}, "dtype 'int4' is unknown"),
    "unknown device": ({"device": DeviceConfig(device="tpu")}, "device 'tpu' is unknown"),
    "model length": ({"max_model_len": 513}, "max_model_len 513 is not within 1 and the model's 512 positions"),
    "no page": ({"kv": KVConfig(num_pages=0)}, "KV pool is too small: 0 pages of 16 tokens"),
    "memory below a page": ({"kv": KVConfig(kv_memory=100.0)}, "KV pool is too small: 0 pages"),
    "pool below the length": (
        {"kv": KVConfig(num_pages=3), "max_model_len": 49},
        "KV pool is too small: 3 pages of 16 tokens; max_model_len is 49",
    ),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_setting_is_refused_with_its_value(name: str, checkpoint: Path) -> None:
    settings, said = BAD_SETTINGS[name]
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_engine(rank_config(checkpoint, **settings))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused_with_a_hint(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="sees no GPU") as refusal:
        build_engine(rank_config(checkpoint, device=DeviceConfig(device="cuda")))
    assert "--device cpu" in refusal.value.hint


def test_all_faults_are_told_at_once(checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_engine(rank_config(checkpoint, tp=10, dtype="int4", max_model_len=0))
    assert len(str(refusal.value).splitlines()) == 3


def test_unsupported_architecture_is_answered_with_the_supported_ones(checkpoint: Path) -> None:
    edit_config(architectures=["GPT2LMHeadModel"])(checkpoint)
    with pytest.raises(ConfigError) as refusal:
        build_engine(rank_config(checkpoint))
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in refusal.value.hint


def test_many_missing_tensors_are_counted_not_listed(checkpoint: Path) -> None:
    edit_config(num_hidden_layers=4)(checkpoint)
    with pytest.raises(ConfigError) as refusal:
        build_engine(rank_config(checkpoint))
    lines = str(refusal.value).splitlines()
    assert len(lines) == 9
    assert lines[-1] == "and 1 more"


def test_sharded_files_read_as_one(checkpoint: Path, tmp_path: Path) -> None:
    prompt = prompt_of(9, seed=1, vocab_size=VOCAB_SIZE)
    expected = ids_of(generate(build_engine(rank_config(checkpoint)), prompt, 5))
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    files = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, checkpoint / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert ids_of(generate(build_engine(rank_config(checkpoint)), prompt, 5)) == expected


BLOCK = (8, 24)
"""Of rows and columns with one scale: neither divides what a rank holds."""


def to_float8(checkpoint: Path, kept: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Rewrite weights as float8 with a scale a block, but those of such names; return what they then stand for."""
    stored, meant = {}, {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if tensor.dim() == 1 or name.endswith(kept):
            stored[name] = meant[name] = tensor
            continue
        blocks = [-(-size // by) for size, by in zip(tensor.shape, BLOCK, strict=True)]
        scales = 2.0 ** torch.randint(-3, 3, blocks, generator=torch.Generator().manual_seed(len(name))) / 7
        of_each = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        of_each = of_each[: tensor.shape[0], : tensor.shape[1]]
        stored[name], stored[f"{name}_scale_inv"] = (tensor / of_each).to(torch.float8_e4m3fn), scales
        meant[name] = stored[name].float() * of_each
    save_file(stored, checkpoint / "model.safetensors")
    edit_config(quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK})(checkpoint)
    return meant


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
def test_float8_weights_are_read_times_their_scales(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    narrow, plain = (make_tiny(family, tmp_path / name) for name in ("narrow", "plain"))
    meant = to_float8(narrow, ("embed_tokens.weight", "lm_head.weight", "gate.weight"))
    spec = read_spec(narrow)
    for rank in range(3):
        needed = parts(spec, share_of(spec, 3, rank))
        checkpoint = open_checkpoint(narrow)
        checkpoint.check(needed)
        with Reader(checkpoint, needed, dtype=torch.float32, device=torch.device("cpu"), report=print) as reader:
            for name, part in needed.items():
                assert torch.equal(reader.read(name), meant[name].index_select(part.dim, torch.tensor(part.held))), name
    assert caplog.messages == [], "scales are used"
    save_file(meant, plain / "model.safetensors")
    prompt = prompt_of(9, seed=1, vocab_size=VOCAB_SIZE)
    told = [generate(build_engine(rank_config(each)), prompt, 5, logprobs=3) for each in (narrow, plain)]
    assert told[0] == told[1]


def test_float8_without_its_scales_is_refused_by_name(checkpoint: Path) -> None:
    to_float8(checkpoint, ())
    drop(f"{DOWN}_scale_inv")(checkpoint)
    with pytest.raises(
        ConfigError, match=re.escape(f"{DOWN}_scale_inv, of shape [9, 5] to go with float8, is missing")
    ):
        build_engine(rank_config(checkpoint))
    put(f"{DOWN}_scale_inv", torch.ones(9, 4))(checkpoint)
    with pytest.raises(ConfigError, match=re.escape("is F32 [9, 4]")):
        build_engine(rank_config(checkpoint))
    edit_config(quantization_config=None)(checkpoint)
    with pytest.raises(ConfigError, match="is of type F8_E4M3; F32, BF16, F16 are supported"):
        build_engine(rank_config(checkpoint))


def test_progress_ends_at_the_total_and_never_falls(checkpoint: Path) -> None:
    told: list[tuple[int, int]] = []
    transport = MemoryTransport(me="test/0", hub=MemoryHub())
    build(rank_config(checkpoint), transport, lambda done, total: told.append((done, total))).close()
    nbytes = sum(t.nbytes for t in load_file(checkpoint / "model.safetensors").values())
    assert told[-1] == (nbytes, nbytes)
    assert told == sorted(told)
    assert {total for _, total in told} == {nbytes}


def test_a_router_stays_float32_and_layers_that_predict_go_unread_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a layer behind the last config.json tells; another one's tensors are warned of."""
    checkpoint = make_tiny("deepseek_v3", tmp_path / "tiny")
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    edit_config(num_nextn_predict_layers=1)(checkpoint)
    put(f"model.layers.{layers}.eh_proj.weight", torch.zeros(1))(checkpoint)
    told: list[tuple[int, int]] = []
    transport = MemoryTransport(me="test/0", hub=MemoryHub())
    engine = build(rank_config(checkpoint, dtype="bfloat16"), transport, lambda *both: told.append(both))
    engine.close()
    of_router = 2 * 8 * (72 + 1)  # experts, their inputs and bias, in two layers
    num_elements = sum(t.numel() for t in load_file(checkpoint / "model.safetensors").values()) - 1
    assert told[-1] == (2 * num_elements + 2 * of_router,) * 2
    assert caplog.messages == []
    put(f"model.layers.{layers + 1}.eh_proj.weight", torch.zeros(1))(checkpoint)
    build_engine(rank_config(checkpoint)).close()
    assert [
        f"1 tensors are not used, model.layers.{layers + 1}.eh_proj.weight first" in m for m in caplog.messages
    ] == [True]


def test_closed_engine_lets_the_transport_free_its_pool(checkpoint: Path) -> None:
    transport = MemoryTransport(me="test/0", hub=MemoryHub())
    engine = build(rank_config(checkpoint), transport, lambda done, total: None)
    generate(engine, [1, 2, 3], 3)
    engine.close()
    engine.close()
    transport.close()


def test_card_names_the_model_and_its_limits(checkpoint: Path) -> None:
    engine = build_engine(rank_config(checkpoint, kv=KVConfig(page_size=16, num_pages=10)))
    assert (engine.card.name, engine.card.vocab_size, engine.card.max_model_len) == ("tiny", VOCAB_SIZE, 160)
    served = build_engine(rank_config(checkpoint, served_name="mine", dtype="bfloat16", max_model_len=100))
    assert (served.card.name, served.card.max_model_len) == ("mine", 100)
    assert served.layout.dtype == "bfloat16"
    assert served.card.fingerprint == engine.card.fingerprint


def test_fingerprint_tells_models_apart(checkpoint: Path, tmp_path: Path) -> None:
    ours = build_engine(rank_config(checkpoint)).card.fingerprint
    other = make_tiny("llama", tmp_path / "other", rms_norm_eps=1e-5)
    assert build_engine(rank_config(other)).card.fingerprint != ours


@pytest.mark.parametrize("seed", [1, 2])
def test_fingerprint_tells_revisions_apart_and_not_how_files_are_cut(tmp_path: Path, seed: int) -> None:
    first, revised = (make_tiny("llama", tmp_path / name, seed=s) for name, s in (("first", 0), ("revised", seed)))
    ours = open_checkpoint(first).fingerprint("")
    assert open_checkpoint(revised).fingerprint("") != ours
    tensors = load_file(first / "model.safetensors")
    changed = sorted(tensors)[seed]
    parts = [{name: tensors[name] for name in sorted(tensors)[i::2]} for i in (1, 0)]
    for folder, adds in (("cut", 0.0), ("merged", 0.01)):
        (tmp_path / folder).mkdir()
        for i, part in enumerate(parts):
            told = {name: tensor + adds * (name == changed) for name, tensor in part.items()}
            save_file(told, tmp_path / folder / f"{i}.safetensors")
    assert open_checkpoint(tmp_path / "cut").fingerprint("") == ours
    assert open_checkpoint(tmp_path / "merged").fingerprint("") != ours, f"{changed} differs"


def test_half_precision_checkpoint_runs_in_bfloat16_on_cpu(tmp_path: Path) -> None:
    engine = build_engine(rank_config(make_tiny("llama", tmp_path, dtype=torch.float16)))
    assert engine.layout.dtype == "bfloat16"
    assert len(generate(engine, [5, 6, 7], 4)) == 4

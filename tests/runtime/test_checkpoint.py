"""What `--model` may say, and the default model's one conversion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pd.runtime.checkpoint import resolve, served_name
from pd.runtime.config import ConfigError
from pd.runtime.gguf_checkpoint import bfloat16_bits

RESOLVE = "from pd.runtime.checkpoint import resolve; print(resolve(None))"
TEXTS = (
    "The capital of France is Paris.",
    "In 2024, 1,234,567 tokens cost $0.99; call 555-0199!",
    "def f(x):\n    return  x**2\n\n\n# done\t\tok  ",
    "naïve café — 東京 🙂 Ελληνικά",
    "don't can't we'll I'M",
    "",
)


def spawn_resolve(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", RESOLVE],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# ---- the default model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_two_processes_at_once_convert_once(cache: Path) -> None:
    processes = [spawn_resolve(cache) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    folders = {out.strip() for out, _ in outputs}
    assert len(folders) == 1
    assert sum("preparing" in err for _, err in outputs) == 1, outputs
    assert sorted(path.name for path in Path(folders.pop()).iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "pd-manifest.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.slow
def test_a_damaged_conversion_is_made_anew_and_a_whole_one_is_used(cache: Path) -> None:
    folder = Path(spawn_resolve(cache).communicate(timeout=120)[0].strip())
    good = (folder / "config.json").read_bytes()
    weights = folder / "model.safetensors"
    nbytes = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(nbytes // 2)
    (folder / "config.json").write_text("{}")
    _, err = spawn_resolve(cache).communicate(timeout=120)
    assert "preparing" in err
    assert (folder / "config.json").read_bytes() == good
    assert weights.stat().st_size == nbytes
    made = weights.stat().st_mtime_ns
    _, err = spawn_resolve(cache).communicate(timeout=120)
    assert "preparing" not in err
    assert weights.stat().st_mtime_ns == made


def bpe(text: str, vocab: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """GPT-2's byte-level BPE with each digit alone, straight from its paper: a reference, slow and short."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in letters}
    shown |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in shown)}
    pattern = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids: list[int] = []
    for piece in regex.split(r"(\p{N})", text):
        for word in regex.findall(pattern, piece):
            parts = [shown[byte] for byte in word.encode()]
            while len(parts) > 1:
                at = min(range(len(parts) - 1), key=lambda i: ranks.get((parts[i], parts[i + 1]), 1 << 30))
                if (parts[at], parts[at + 1]) not in ranks:
                    break
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            ids += [vocab[part] for part in parts]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_the_converted_tokenizer_is_byte_level_bpe_with_single_digits(text: str) -> None:
    folder = resolve(None)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    ranks = {(left, right): rank for rank, (left, right) in enumerate(model["merges"])}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids == bpe(text, model["vocab"], ranks)
    assert tokenizer.decode(ids) == text


def test_the_chat_template_and_its_marks_survive_conversion() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve(None))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_start|>user\n")[0] == 1
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [2]


@pytest.mark.slow
def test_transformers_loads_the_conversion_and_it_answers() -> None:
    torch.set_num_threads(1)
    folder = resolve(None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        answer = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == "The capital of France is Paris."


@pytest.mark.parametrize("seed", range(3))
def test_rounding_to_bfloat16_is_torchs(seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 10_000, dtype=np.uint32)
    bits[:1000] = bits[:1000] & 0xFFFF0000 | 0x8000  # ties
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (bfloat16_bits(values) == expected).all(), f"seed={seed}"


# ---- what a person may say ---------------------------------------------------------------------------------


def test_a_directory_is_itself_and_gives_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve(str(folder)) == folder
    assert served_name(str(folder)) == served_name(f"{folder}/") == "my-model"
    assert served_name("org/name") == "org/name"
    assert served_name(None) == "SmolLM2-135M-Instruct"


def test_a_directory_without_config_or_weights_is_refused_with_both_faults(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(str(tmp_path))
    assert str(caught.value).splitlines() == [
        f"model directory {tmp_path} has no config.json",
        f"model directory {tmp_path} has no *.safetensors",
    ]


@pytest.mark.parametrize("model", ["/no/such/model", "./nothing", "a/b/c"])
def test_a_missing_directory_is_named_and_no_hub_is_asked(model: str) -> None:
    with pytest.raises(ConfigError, match=rf"model directory {model} does not exist"):
        resolve(model)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        resolve(str(path))


def test_a_hub_id_without_a_hub_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="no model hub can be reached") as caught:
        resolve("some-org/some-model")
    assert "local model directory" in caught.value.hint


def test_an_unwritable_cache_is_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ConfigError, match="cannot make the cache folder"):
        resolve(None)

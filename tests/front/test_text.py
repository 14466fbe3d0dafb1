"""The text side equals transformers': who adds BOS, what a chat becomes, where an answer ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pd.runtime.config import ConfigError
from pd.runtime.front.errors import RequestError
from pd.runtime.front.text import load_text
from tests.front.fakes import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    TEMPLATE,
    VOCAB_SIZE,
    byte_fallback,
    byte_level,
    write_model,
)

TEXTS = ["hello there", "Grüße, 世界!", " a\n\n<|im_start|>b", "1 2"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "héllo <b>"},
    {"role": "assistant", "content": "the\n"},
    {"role": "user", "content": "again"},
]


def with_ends() -> Tokenizer:
    """tokenizer.json whose own post-processor adds BOS, as Llama 3's."""
    tokenizer = byte_level()
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "config"),
    [
        (byte_level(), {}),
        (with_ends(), {}),
        (with_ends(), {"add_bos_token": False}),
        (byte_level(), {"bos_token": "<|im_start|>", "add_bos_token": True}),
        (byte_level(), {"bos_token": "<|im_start|>", "add_bos_token": True, "add_eos_token": True}),
        (with_ends(), {"bos_token": {"content": "<|end|>", "__type": "AddedToken"}, "add_bos_token": True}),
        (byte_level(), {"added_tokens_decoder": {str(VOCAB_SIZE): {"content": "ll", "special": True}}}),
        (byte_fallback(), {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}),
    ],
)
def test_tokens_equal_transformers(tmp_path: Path, tokenizer: Tokenizer, config: dict[str, object]) -> None:
    text = load_text(write_model(tmp_path, tokenizer, **config))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for add in (True, False):
        assert text.encode(TEXTS, add_special_tokens=add) == theirs(TEXTS, add_special_tokens=add)["input_ids"]
    ids = theirs(TEXTS[1])["input_ids"]
    for skip in (True, False):
        assert text.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


TEMPLATES = [
    TEMPLATE,
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content | tojson }}]\n"
    "    {% elif m.role == 'system' %}{% continue %}{% else %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{{ eos_token }}{% endif %}\n{% endfor %}{{ messages | tojson(indent=1) }}",
    "{%- set ns = namespace(n=0) -%}{% for m in messages[1:] %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m['role'][:1] }}"
    "{% endfor %}{% if not tools %}none{% endif %}{{ strftime_now('%Y') }}{{ flavour | default('plain') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("generate", [True, False])
def test_chats_equal_transformers(tmp_path: Path, template: str, generate: bool) -> None:
    named = {"bos_token": "<|im_start|>", "chat_template": template}
    text = load_text(write_model(tmp_path, byte_level(), **named))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for variables in ({}, {"flavour": "sweet"}):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generate, **variables)
        assert text.render(CHAT, add_generation_prompt=generate, variables=variables) == expected
    ids = text.encode([text.render(CHAT, add_generation_prompt=generate)], add_special_tokens=False)[0]
    assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=generate)["input_ids"]


def test_template_file_wins_and_of_named_ones_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    directory = write_model(tmp_path, byte_level(), chat_template=named)
    assert load_text(directory).render(CHAT, add_generation_prompt=True) == "plain"
    (directory / "chat_template.jinja").write_text("file")
    assert load_text(directory).render(CHAT, add_generation_prompt=True) == "file"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_what_a_template_refuses_is_the_clients_to_hear(tmp_path: Path, template: str, words: str) -> None:
    text = load_text(write_model(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(RequestError, match=words) as caught:
        text.render(CHAT, add_generation_prompt=True)
    assert caught.value.status == 400


def test_model_without_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template; use /v1/completions"):
        load_text(write_model(tmp_path, byte_level())).render(CHAT, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (IM_END,)),
        ({"config.json": 5}, (5,)),
        ({"config.json": [5, 6]}, (5, 6)),
        ({"config.json": 5, "generation_config.json": [7, 8]}, (7, 8)),
        ({"config.json": 5, "generation_config.json": None}, (5,)),
    ],
)
def test_end_of_text_is_what_generate_stops_at(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    write_model(tmp_path, byte_level())
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    assert load_text(tmp_path).eos_token_ids == expected


def test_tokens_are_spelled_with_their_exact_bytes(tmp_path: Path) -> None:
    text = load_text(write_model(tmp_path, byte_level()))
    assert text.spell(END_OF_TEXT).text == "<|end|>"
    first = text.encode(["é"], add_special_tokens=False)[0][0]
    assert (text.spell(first).text, text.spell(first).utf8) == ("\ufffd", b"\xc3")
    assert text.spell(VOCAB_SIZE + 5).utf8 == b""


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("chat_template.jinja", "\n{% if %}", "malformed at line 2"),
    ],
)
def test_broken_directory_is_a_config_error(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    write_model(tmp_path, byte_level())
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        load_text(tmp_path)


def test_front_imports_neither_torch_nor_transformers() -> None:
    check = "import sys, pd.runtime.front.http; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True).stdout == "[]\n"

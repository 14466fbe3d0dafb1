"""A model's text side: tokenizer, chat template and end-of-text ids, from a Hugging Face directory.

`tokenizers` alone reads tokenizer.json (0.2 s for 49,152 tokens); transformers would cost the router's start 0.8 s.
What transformers (5.24) does around it is repeated here: added tokens, which template is meant, where an answer ends.
BOS and EOS are added by tokenizer.json's own post-processor; beside it transformers heeds no add_bos_token either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pd.runtime.config import ConfigError
from pd.runtime.front.detokenize import ByteDetokenizer, Detokenizer, Pieces, WindowDetokenizer, spelling
from pd.runtime.front.errors import RequestError
from pd.runtime.front.template import ChatTemplate, Message

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token by itself."""

    text: str  # U+FFFD where its bytes are not whole characters
    utf8: bytes  # exactly


class Text:
    """Safe to use from several threads: nothing but a lookup table grows, and a lost entry is made again."""

    def __init__(self, tokenizer: Tokenizer, *, eos_token_ids: tuple[int, ...], template: ChatTemplate | None) -> None:
        """Takes the tokenizer over. `template` None: the model is not for chats."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.eos_token_ids = eos_token_ids
        self.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))  # in characters, at the most
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        spell = spelling(tokenizer)
        self._pieces = None if spell is None else Pieces(tokenizer, spell)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. Takes 0.7 µs a character, without holding the interpreter's lock."""
        batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in batch]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """A chat as one text, special tokens spelled out. Raises RequestError if this model has no template for it."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions", code="no_chat_template", param="messages"
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """For the answer that follows `prompt`."""
        if self._pieces is None:
            return WindowDetokenizer(self._tokenizer, prompt, skip=skip_special_tokens)
        return ByteDetokenizer(self._pieces, skip=self._special_ids if skip_special_tokens else frozenset())

    def spell(self, token_id: int) -> TokenText:
        """One token as logprobs name it; special ones by name."""
        if self._pieces is None:
            text = self.decode([token_id], skip_special_tokens=False)
            return TokenText(text, text.encode())
        utf8 = self._pieces[token_id]
        return TokenText(utf8.decode("utf-8", "replace"), utf8)


def load_text(directory: Path) -> Text:
    """Read tokenizer.json and its companions. Raises ConfigError if it is missing or cannot be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"no tokenizer.json in {directory}",
            hint="a directory with only tokenizer.model is converted by transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    config = _read_json(directory / "tokenizer_config.json")
    named = _named_tokens(_read_json(directory / "special_tokens_map.json") | config)
    _add_missing_tokens(tokenizer, config)
    return Text(
        tokenizer,
        eos_token_ids=_eos_token_ids(directory, tokenizer, named.get("eos_token")),
        template=_chat_template(directory, config, named),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """An object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Either a string or a serialized AddedToken, {"content": …}."""
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _add_missing_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """tokenizer_config.json may list added tokens that tokenizer.json lacks; transformers adds them in id order."""
    listed = sorted((int(key), value) for key, value in config.get("added_tokens_decoder", {}).items())
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([AddedToken(**fields) for _, fields in listed if fields["content"] not in known])


def _eos_token_ids(directory: Path, tokenizer: Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """What `generate` of transformers stops at: generation_config.json's, else config.json's, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    token_id = tokenizer.token_to_id(eos_token) if eos_token else None
    return () if token_id is None else (token_id,)


def _chat_template(directory: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> ChatTemplate | None:
    """chat_template.jinja before tokenizer_config.json's; of several named ones, "default"."""
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return None if source is None else ChatTemplate(source, named)

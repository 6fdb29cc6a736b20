"""Text to token ids and back, and chat templates, over the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from kvjax.checkpoints.chat import render_chat
from kvjax.checkpoints.stream import Pieces, TokenStream

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    special_tokens: the text of bos_token, eos_token, unk_token and pad_token, where there is one.
    extra_eos_ids: further ids that end a generation, such as Llama 3's end of turn.
    add_bos, add_eos: what `encode` puts around a text; None leaves it to `backend`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        extra_eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ):
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.bos_id = self._id("bos_token")
        self.pad_id = self._id("pad_token")
        eos = self._id("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *extra_eos_ids]))
        self._pieces = Pieces(backend)
        self._surround(add_bos, add_eos)

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        token = None if text is None else self._backend.token_to_id(text)
        if text is not None and token is None:
            raise ValueError(f"{name}: expected a token of the vocabulary, got {text!r}.")
        return token

    def _surround(self, add_bos: bool | None, add_eos: bool | None) -> None:
        """Makes `encode` add bos and eos as asked; a backend that already does stays as it is."""
        now = self._backend.encode("").ids
        eos = self._id("eos_token")
        has_bos = bool(now) and now[0] == self.bos_id
        has_eos = len(now) > has_bos and now[-1] == eos
        want_bos = has_bos if add_bos is None else add_bos
        want_eos = has_eos if add_eos is None else add_eos
        if (want_bos, want_eos) == (has_bos, has_eos):
            return
        parts: list[str] = ["$A"]
        known: dict[str, int] = {}
        for name, wanted, token in (("bos", want_bos, self.bos_id), ("eos", want_eos, eos)):
            if not wanted:
                continue
            if token is None:
                raise ValueError(
                    f"add_{name}_token: expected a tokenizer with {name}_token, got none."
                    f" Set {name}_token in tokenizer_config.json."
                )
            text = self.special_tokens[f"{name}_token"]
            parts = [text, *parts] if name == "bos" else [*parts, text]
            known[text] = token
        self._backend.post_processor = TemplateProcessing(
            single=parts, special_tokens=list(known.items())
        )

    @classmethod
    def from_folder(cls, folder: Path, *, extra_eos_ids: Iterable[int] = ()) -> Tokenizer | None:
        """The tokenizer of a Hugging Face folder; None if the folder has none at all."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            others = [
                n
                for n in ("tokenizer.model", "vocab.json", "tokenizer_config.json")
                if (folder / n).exists()
            ]
            if not others:
                return None
            raise ValueError(
                f"{path}: expected a file, got only {', '.join(others)}. Make it with transformers:"
                " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: expected a tokenizer, got: {error}.") from error
        backend.no_padding()
        backend.no_truncation()
        config = _read_object(folder / "tokenizer_config.json")
        return cls(
            backend,
            special_tokens=_special_tokens(config),
            extra_eos_ids=extra_eos_ids,
            chat_template=_chat_template(folder, config),
            add_bos=config.get("add_bos_token"),
            add_eos=config.get("add_eos_token"),
        )

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included. A model's vocab_size may be larger (padding rows)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written in the text become their ids, as in transformers."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text. Bytes that are no UTF-8 become U+FFFD, a cut character at the end too."""
        kept = [i for i in map(int, ids) if not (skip_special_tokens and i in self._pieces.special)]
        text = b"".join(self._pieces[i] for i in kept).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._pieces.strip_first else text

    def stream(self, *, skip_special_tokens: bool = True, inside: bool = False) -> TokenStream:
        """A decoder for tokens that come one by one.

        inside: the text continues another, so that a leading space is kept (it matters only for
            SentencePiece tokenizers, whose texts begin with a space that is not there).
        """
        return TokenStream(self._pieces, skip_special_tokens=skip_special_tokens, inside=inside)

    def token_id(self, text: str) -> int | None:
        """The id of a token, or None."""
        return self._backend.token_to_id(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. Encode it with add_special_tokens=False: templates
        write the special tokens themselves."""
        if self.chat_template is None:
            raise ValueError(
                "chat_template: expected one, got none: this is a base model, which continues text."
                " Give it text, or use its instruction-tuned version."
            )
        return render_chat(
            self.chat_template,
            messages,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as a Hugging Face folder has them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}.") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(data).__name__}.")
    return data


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of tokenizer_config.json: each a string, or an object with "content"."""
    tokens = {}
    for name in SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None:
            tokens[name] = str(text)
    return tokens


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: its own file first, then tokenizer_config.json, as in transformers."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    template = _read_object(folder / "chat_template.json").get("chat_template")
    template = config.get("chat_template") if template is None else template
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(f"chat_template: expected one named 'default', got {sorted(named)}.")
        return named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template: expected text, got {type(template).__name__}.")
    return template

"""Tokens to text, piece by piece: each token is some bytes, and text is those bytes as UTF-8.

Working on bytes makes streaming exact and linear: a token may end inside a character, and the
incremental UTF-8 decoder keeps just that tail back.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # U+2581, SentencePiece's space


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable character of each byte, backwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    return table | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_table()


class Pieces:
    """The bytes of each token. `strip_first`: drop one space at the very start of a text."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._byte_level, self.strip_first = _decoder_kind(backend)
        self._added = backend.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in self._added.items() if token.special)
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        piece = self._cache.get(token)
        if piece is None:
            piece = self._cache[token] = self._bytes(token)
        return piece

    def _spaces(self, added: tokenizers.AddedToken) -> bool:
        """Whether ▁ in an added token stands for a space: it is matched in normalised text."""
        return added.normalized and not self._byte_level

    def _bytes(self, token: int) -> bytes:
        if token < 0:
            raise ValueError(f"token id: expected an int >= 0, got {token}.")
        if token in self._added:
            added = self._added[token]
            return (
                added.content.replace(_SPACE, " ") if self._spaces(added) else added.content
            ).encode()
        text = self._backend.id_to_token(token)
        if text is None:  # a padding row of the embedding table: no token, no text
            return b""
        if self._byte_level:
            if all(c in _BYTE_OF for c in text):
                return bytes(_BYTE_OF[c] for c in text)
            return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte-level, strips the first space) of a tokenizer's decoder; others are refused."""
    decoder: dict[str, Any] = {"type": None}
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
    kind = decoder["type"]
    if kind == "ByteLevel":
        return True, False
    if kind == "Metaspace" and decoder["replacement"] == _SPACE:
        return False, decoder.get("prepend_scheme", "always") != "never"
    if kind == "Sequence":
        parts = decoder["decoders"]
        if [p["type"] for p in parts] == ["ByteLevel"]:
            return True, False
        strips = [p for p in parts if p["type"] == "Strip"]
        if all(_is_sentencepiece(p) for p in parts):
            return False, bool(strips)
    raise ValueError(
        "tokenizer.json: decoder: expected ByteLevel, Metaspace, or SentencePiece's sequence"
        f" (Replace, ByteFallback, Fuse, Strip), got {decoder!r}."
    )


def _is_sentencepiece(part: dict[str, Any]) -> bool:
    match part["type"]:
        case "Replace":
            return part["pattern"] == {"String": _SPACE} and part["content"] == " "
        case "Strip":
            return (part["content"], part["start"], part["stop"]) == (" ", 1, 0)
        case kind:
            return kind in ("ByteFallback", "Fuse")


class TokenStream:
    """Text of tokens as they come. The pieces of text, joined, are the decoded whole."""

    def __init__(self, pieces: Pieces, *, skip_special_tokens: bool = True, inside: bool = False):
        self._pieces = pieces
        self._skip = pieces.special if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = pieces.strip_first and not inside
        self._open = True

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; a character cut at the end waits for the next."""
        if not self._open:
            raise ValueError("TokenStream.push: expected an open stream, got a finished one.")
        data = b"".join(self._pieces[i] for i in map(int, ids) if i not in self._skip)
        text = self._utf8.decode(data)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """Ends the stream. Bytes of a character that never came whole are dropped."""
        self._open = False
        self._utf8.reset()
        return ""

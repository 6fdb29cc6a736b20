"""Chat templates: Jinja programs that come with a model, run in a sandbox as transformers does."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training; the text
    inside is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat_template: expected a Jinja template, got {error}.") from error


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    """The prompt text of a conversation.

    special_tokens: bos_token and so on, by the names that templates use.
    kwargs: further template variables, such as tools, documents or enable_thinking.
    """
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(
                f"messages[{i}]: expected a mapping with 'role' and 'content', got {message!r}."
            )
    variables = {
        **special_tokens,
        "messages": list(messages),
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **kwargs,
    }
    try:
        return _compile(template).render(**variables)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"messages: expected a conversation that the model's chat template accepts, got:"
            f" {error}. Change the messages."
        ) from error

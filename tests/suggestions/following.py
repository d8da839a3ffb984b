"""How a scenario says which suggestions of the source it follows, and that it heard them from the program itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from lastgood.errors import LastgoodError
from tests.suggestions.source_texts import suggestions

FOLLOWED: dict[str, str] = {}
"""A part of a suggestion's text, and the scenario that follows it."""
_HEARD: list[str] = []


def text_with(part: str) -> str:
    """The one suggestion of the source that has this part."""
    found = [text for text in suggestions() if part in text]
    assert len(found) == 1, f"{len(found)} suggestions of the source have {part!r}: {found}"
    return found[0]


def is_said_in(part: str, message: str) -> bool:
    """Whether `message` was made from the suggestion that has `part`, whatever it fills in, on however many lines."""
    said, at = re.sub(r"\s+", " ", message), 0
    for words in re.split(r"\{\}|%-?[\d.]*[sdrgf]", re.sub(r"\s+", " ", text_with(part))):
        at = said.find(words, at)
        if at < 0:
            return False
        at += len(words)
    return True


def hear(message: str) -> str:
    """Note what the program said."""
    _HEARD.append(message)
    return message


def refusal(call: Callable[[], Any]) -> str:
    """The text of the error that `call` raises."""
    with pytest.raises(LastgoodError) as error:
        call()
    return hear(str(error.value))


def advice(message: str, pattern: str) -> str:
    """What the message says to write."""
    found = re.search(pattern, message)
    assert found, message
    return found[1] if found.groups() else found[0]


def follows(*parts: str, one_of_them: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated test provokes the texts with these parts, and follows them; it fails if it did not hear each.

    With `one_of_them` each run of a test with parameters hears at least one.
    """

    def decorate(scenario: Callable[..., None]) -> Callable[..., None]:
        FOLLOWED.update(dict.fromkeys(parts, scenario.__qualname__))

        @functools.wraps(scenario)
        def followed(*arguments: Any, **named: Any) -> None:
            _HEARD.clear()
            scenario(*arguments, **named)
            heard = [part for part in parts if any(is_said_in(part, message) for message in _HEARD)]
            assert heard == [*parts] or (one_of_them and heard), f"not heard: {set(parts) - {*heard}} in {_HEARD}"

        return followed

    return decorate

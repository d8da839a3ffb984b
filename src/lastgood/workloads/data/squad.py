"""Span questions in SQuAD's format, versions 1.1 and 2.0: the prepared set, or a user's JSON file.

Batches hold int64 tensors as BertForQuestionAnswering names them: ``input_ids``, ``attention_mask`` and
``token_type_ids`` of shape (batch, length), ``start_positions`` and ``end_positions`` of shape (batch,).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lastgood.errors import DataError
from lastgood.text import parse_json, read_bytes
from lastgood.units import GIB
from lastgood.workloads.base import Batch, BatchStream
from lastgood.workloads.data.order import EpochOrder
from lastgood.workloads.data.prepare import training_file
from lastgood.workloads.data.tokens import wordpiece_tokenizer

__all__ = ["Question", "find_squad", "open_squad", "read_squad"]

_MAX_BYTES = 1 * GIB
_TRAIN_NAMES = ("train-v1.1.json", "train-v2.0.json")
_SPECIAL_TOKENS = 3


@dataclass(frozen=True)
class Question:
    """A question about a context; the answer is `context[start:end]`, or nothing if both are 0 (SQuAD 2.0)."""

    question: str
    context: str
    start: int
    end: int


def find_squad(path: Path) -> Path:
    """The JSON file at a path: the file itself, or SQuAD's training file in the folder. Raises DataError if none."""
    if path.is_file():
        return path
    for name in _TRAIN_NAMES:
        if (path / name).is_file():
            return path / name
    raise DataError(f"{path}: expected a SQuAD JSON file, or a folder with {' or '.join(_TRAIN_NAMES)}")


def read_squad(path: Path) -> list[Question]:
    """Read and check a SQuAD file, the first answer of each question.

    Raises:
        DataError: The file is missing, too large, not JSON, not of this format, or an answer is not at its place; the
            message names the question.
    """
    content = parse_json(read_bytes(path, _MAX_BYTES, DataError), str(path), most_bytes=_MAX_BYTES, error=DataError)
    questions = list(_questions(content, path))
    if not questions:
        raise DataError(f"{path}: holds no question")
    return questions


def _questions(content: Any, path: Path) -> Iterator[Question]:
    for article in _field(content, "data", list, path, "the file"):
        for paragraph in _field(article, "paragraphs", list, path, "an article"):
            context = _field(paragraph, "context", str, path, "a paragraph")
            for entry in _field(paragraph, "qas", list, path, "a paragraph"):
                name = f"question {_field(entry, 'id', str, path, 'a question')!r}"
                question = _field(entry, "question", str, path, name)
                answers = _field(entry, "answers", list, path, name)
                if not answers:
                    if entry.get("is_impossible") is not True:
                        raise DataError(f"{path}: {name} has no answer and is not marked is_impossible")
                    yield Question(question, context, 0, 0)
                    continue
                text = _field(answers[0], "text", str, path, name)
                start = _field(answers[0], "answer_start", int, path, name)
                if not text or start < 0 or context[start : start + len(text)] != text:
                    raise DataError(f"{path}: {name}: the answer {text[:40]!r} is not at answer_start {start}")
                yield Question(question, context, start, start + len(text))


def _field(holder: Any, key: str, kind: type, path: Path, where: str) -> Any:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DataError(f"{path}: {where} has no {key!r} of type {kind.__name__}; expected SQuAD v1.1 or v2.0 format")
    return value


def open_squad(
    data_dir: Path, data_path: Path | None, *, batch_size: int, length: int, vocabulary: int, seed: int
) -> tuple[BatchStream, dict[str, str]]:
    """Open the prepared questions, or a user's SQuAD file. Returns the stream and the facts of the data.

    Raises:
        DataError: The data is missing or is not of this format, or the tokenizer's cache cannot be written.
    """
    path, facts = training_file("squad", data_dir, _TRAIN_NAMES[0], data_path and find_squad(data_path))
    questions = read_squad(path)
    # Questions share contexts: each counts once.
    texts = [*(question.question for question in questions), *dict.fromkeys(question.context for question in questions)]
    tokenizer = wordpiece_tokenizer(data_dir, texts, facts, vocabulary)
    return _SquadStream(questions, tokenizer, batch_size, length, seed), facts


class _SquadStream(BatchStream):
    """Questions in an order that the seed sets, tokenized when they are asked for."""

    def __init__(
        self, questions: list[Question], tokenizer: Tokenizer, batch_size: int, length: int, seed: int
    ) -> None:
        super().__init__()
        self._questions = questions
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._length = length
        self._order = EpochOrder(len(questions), seed)
        self._pad, self._begin, self._separator = (tokenizer.token_to_id(name) for name in ("[PAD]", "[CLS]", "[SEP]"))

    def batch(self, index: int) -> Batch:
        """Questions as the model takes them; see `BatchStream.batch`."""
        rows = [self._row(self._questions[item]) for item in self._order.batch(index, self._batch_size)]
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    def _row(self, example: Question) -> dict[str, Any]:
        """``[CLS] question [SEP] context [SEP]``, padded; a long context is cut to a window around its answer."""
        question = self._tokenizer.encode(example.question).ids[: self._length // 2 - _SPECIAL_TOKENS]
        encoded = self._tokenizer.encode(example.context)
        room = self._length - len(question) - _SPECIAL_TOKENS
        answered = example.end > example.start
        inside = [
            place
            for place, (begin, end) in enumerate(encoded.offsets)
            if begin < example.end and end > example.start and answered
        ]
        first, last = (inside[0], inside[-1]) if inside else (0, 0)
        window = 0
        if last >= room:
            window = max(0, min(first - (room - (last - first + 1)) // 2, len(encoded.ids) - room))
            window = min(window, first)
        context = encoded.ids[window : window + room]
        ids = [self._begin, *question, self._separator, *context, self._separator]
        padding = self._length - len(ids)
        front = len(question) + 2
        # Without an answer both positions are those of [CLS], as SQuAD 2.0's baseline has it.
        start = front + first - window if inside else 0
        end = min(front + last - window, front + room - 1) if inside else 0
        return {
            "input_ids": ids + [self._pad] * padding,
            "attention_mask": [1] * len(ids) + [0] * padding,
            "token_type_ids": [0] * front + [1] * (len(context) + 1) + [0] * padding,
            "start_positions": start,
            "end_positions": end,
        }

"""Tokenizers trained on the text itself, and the token ids of WikiText-format files. Both are cached. Needs no torch.

No vocabulary is fetched from anywhere: byte-level BPE (for OPT, BLOOM and Transformer-XL) and WordPiece (for BERT) are
trained to the size that the workload asks for. A small text may not fill a large vocabulary; the model keeps its full
size all the same, and the ids that no text reaches are simply never drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lastgood.errors import DataError
from lastgood.units import GIB, format_bytes
from lastgood.workloads.data.prepare import training_file
from lastgood.workloads.data.store import make_folder

__all__ = ["find_wikitext", "load_tokens", "read_text", "wordpiece_tokenizer"]

_END_OF_TEXT = "</s>"
_MAX_TEXT_BYTES = 4 * GIB
_TRAINING_LINES = 500_000
"""Lines that a tokenizer is trained on: WikiText-2 and the prepared texts whole, the first third of WikiText-103."""
_ENCODE_LINES = 4096
_WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_ALPHABET = 200
"""Characters that WordPiece knows, the most frequent: each takes two entries, and the smallest vocabulary has 512."""
_RECIPE = 1
_TRAIN_NAMES = ("wiki.train.tokens", "wiki.train.raw")


def find_wikitext(path: Path) -> Path:
    """The training text at a path: the file, or ``wiki.train.tokens`` in the folder or in ``wikitext-*/`` below it.

    Raises:
        DataError: There is none.
    """
    if path.is_file():
        return path
    candidates = [path / name for name in _TRAIN_NAMES]
    if path.is_dir():
        candidates += [folder / name for folder in sorted(path.glob("wikitext-*")) for name in _TRAIN_NAMES]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise DataError(f"{path}: expected a text file, or a folder with wiki.train.tokens or wikitext-*/wiki.train.tokens")


def read_text(path: Path) -> str:
    """Read a text file. Raises DataError if it is missing, empty, too large or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > _MAX_TEXT_BYTES:
            raise DataError(f"{path}: {format_bytes(size)}; texts of up to {format_bytes(_MAX_TEXT_BYTES)} are read")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: byte {error.start}") from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty")
    return text


def load_tokens(
    data_dir: Path, data_path: Path | None, vocabulary: int
) -> tuple[npt.NDArray[np.int32], dict[str, str]]:
    """Token ids of a WikiText-format text under a byte-level BPE of at most `vocabulary` entries.

    Tokenizer and ids are cached below ``<data_dir>/tokens``, under the sum of the text. Returns the ids, shape
    (tokens,), memory-mapped, and the facts of the text for the run record.

    Raises:
        DataError: The text is missing or not readable, or the cache cannot be written.
    """
    path, facts = training_file("wikitext", data_dir, _TRAIN_NAMES[0], data_path and find_wikitext(data_path))

    def fill(cache: Path) -> None:
        lines = read_text(path).splitlines(keepends=True)
        tokenizer = _train_byte_level(lines, vocabulary)
        tokenizer.save(str(cache / "tokenizer.json"))
        np.save(cache / "tokens.npy", _encode(tokenizer, lines), allow_pickle=False)

    cache = data_dir / "tokens" / f"bpe-{vocabulary}-{facts['sha256'][:16]}"
    _make_cache(cache, fill, f"tokens/{cache.name}", facts)
    ids = np.load(cache / "tokens.npy", mmap_mode="r", allow_pickle=False)
    return ids, facts


def wordpiece_tokenizer(data_dir: Path, texts: Iterable[str], facts: dict[str, str], vocabulary: int) -> Tokenizer:
    """A lower-casing WordPiece tokenizer of at most `vocabulary` entries, trained on `texts`; `facts` name the cache.

    Raises:
        DataError: The cache cannot be written or read.
    """
    cache = data_dir / "tokens" / f"wordpiece-{vocabulary}-{facts['sha256'][:16]}"

    def fill(folder: Path) -> None:
        _train_wordpiece(list(islice(texts, _TRAINING_LINES)), vocabulary).save(str(folder / "tokenizer.json"))

    _make_cache(cache, fill, f"tokens/{cache.name}", facts)
    path = cache / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path}: not a tokenizer: {error}; remove {cache} and run again") from error


def _make_cache(cache: Path, fill: Callable[[Path], None], name: str, facts: dict[str, str]) -> None:
    source = f"trained on {facts['name']} (sha256 {facts['sha256']})"
    make_folder(cache, fill, name=name, source=source, licence="as its text", recipe=_RECIPE)


def _train_byte_level(lines: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(lines, _TRAINING_LINES), trainer)
    return tokenizer


def _train_wordpiece(texts: list[str], vocabulary: int) -> Tokenizer:
    normalizer = normalizers.BertNormalizer(lowercase=True)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    frequent = sorted((char for char in counts if not char.isspace()), key=lambda char: (-counts[char], char))
    alphabet = sorted(frequent[:_ALPHABET])
    # The library numbers the inner forms ("##a") in the order of a hash table, which differs from process to process,
    # and breaks ties between merges by those numbers. Named as special tokens, they get their numbers here; the
    # vocabulary then moves to a tokenizer that does not hold them to be special.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        special_tokens=[*_WORDPIECE_SPECIAL, *(f"##{char}" for char in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained = _wordpiece(models.WordPiece(unk_token="[UNK]"), normalizer)
    trained.train_from_iterator(texts, trainer)
    return _wordpiece(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"), normalizer)


def _wordpiece(model: models.WordPiece, normalizer: normalizers.BertNormalizer) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _encode(tokenizer: Tokenizer, lines: list[str]) -> npt.NDArray[np.int32]:
    parts = []
    for start in range(0, len(lines), _ENCODE_LINES):
        encoded = tokenizer.encode_batch(lines[start : start + _ENCODE_LINES])
        parts.append(np.asarray([token for line in encoded for token in line.ids], dtype=np.int32))
    return np.concatenate(parts)

"""The text of `train_decoder.py`: Python's standard library, which is on every machine, as rows of packed documents.

A document is a docstring, or a whole source file. Each begins with the token `START`; a row is cut from the stream of all of
them, so that its first and last document may be a part of one.
"""

import collections
import inspect
import re
import sysconfig
from pathlib import Path

import numpy as np

START = 0  # byte 0, which no text holds
SHORTEST = 24  # tokens of a document; bounds how many a row can have
DOCSTRING = re.compile(r'^ *[rR]?"""(.+?)"""', re.DOTALL | re.MULTILINE)
# Letters and punctuation with the space before them; digits; white space. Every byte is in one of them.
WORD = re.compile(rb" ?[A-Za-z_\x80-\xff]+|[0-9]+| ?[^\sA-Za-z0-9_\x80-\xff]+|\s+")


def sources():
    """The files of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = sorted(path for path in folder.rglob("*.py") if not left_out & set(path.relative_to(folder).parts))
    return [path.read_text(encoding="utf-8", errors="replace").replace("\0", "") for path in paths]


def docstrings():
    """Those of up to 2000 characters without doctests, each once."""
    found = (inspect.cleandoc(text) for source in sources() for text in DOCSTRING.findall(source))
    return [text for text in dict.fromkeys(found) if len(text) <= 2000 and ">>>" not in text]


class Tokenizer:
    """Byte pair encoding: the most frequent pair of tokens within a word becomes a token, until there are ``size``."""

    def __init__(self, documents, size):
        counts = collections.Counter(word for text in documents for word in WORD.findall(text.encode()))
        # All different words in one array, each after a START, with how often its word occurs.
        tokens = np.frombuffer(b"\0" + b"\0".join(counts) + b"\0", np.uint8).astype(np.int64)
        weights = np.repeat([*counts.values(), 0], [len(word) + 1 for word in counts] + [1])
        self.pieces = [bytes([byte]) for byte in range(256)]
        while len(self.pieces) < size:
            pairs = np.where((tokens[:-1] != START) & (tokens[1:] != START), tokens[:-1] * size + tokens[1:], 0)
            best = np.bincount(pairs, weights[:-1] * (pairs > 0)).argmax()
            if best == 0:
                break  # every word is one token
            first, second = divmod(int(best), size)
            at = np.flatnonzero(pairs == best)
            if first == second:  # of three equal tokens two are merged
                run = np.cumsum(np.diff(at, prepend=-2) > 1)
                at = at[(at - at[np.searchsorted(run, run)]) % 2 == 0]
            tokens[at] = len(self.pieces)
            kept = np.ones(tokens.size, bool)
            kept[at + 1] = False
            tokens, weights = tokens[kept], weights[kept]
            self.pieces.append(self.pieces[first] + self.pieces[second])
        ends = np.flatnonzero(tokens == START)
        self.words = {word: tokens[a + 1 : b].tolist() for word, a, b in zip(counts, ends, ends[1:], strict=False)}

    def encode(self, text):
        """A word that was not in the documents is bytes."""
        return [token for word in WORD.findall(text.encode()) for token in self.words.get(word, word)]

    def decode(self, tokens):
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


def batches_of(documents, rows, length, seed=0):
    """Endless batches of packed rows, the documents in a new order each time round.

    tokens, targets, positions, document: int32 ``[rows, length]``. A target is the next token: at a document's end that is
    the next one's START. Positions are those in the row, for rotary embeddings depend on differences alone. ``document``
    numbers the row's documents from 1. offsets: ``[rows, most + 1]``, where documents begin, padded with ``length``.
    """
    documents = [np.array([START, *document], np.int32) for document in documents if len(document) >= SHORTEST]
    rng, size, most = np.random.default_rng(seed), rows * length, length // SHORTEST + 2
    stream = np.zeros(0, np.int32)
    while True:
        while stream.size < size + 1:
            stream = np.concatenate([stream, *(documents[i] for i in rng.permutation(len(documents)))])
        tokens, targets = (stream[at : at + size].reshape(rows, length) for at in (0, 1))
        stream = stream[size:]
        begins = tokens == START
        begins[:, 0] = True
        offsets = np.full((rows, most + 1), length, np.int32)
        for row, begin in enumerate(begins):
            offsets[row, : begin.sum()] = np.flatnonzero(begin)
        yield {
            "tokens": tokens,
            "targets": targets,
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
            "document": np.cumsum(begins, 1, dtype=np.int32),
            "offsets": offsets,
        }

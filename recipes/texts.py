"""A text as numbered characters, in streams that are read side by side, or line by line."""

from __future__ import annotations

import gzip
import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from phalanx.recipes.settings import SettingsError

UNKNOWN = 0  # the number of a character that the training text does not have


@dataclass(frozen=True)
class Text:
    """A text in three parts, as numbers of characters.

    Args:
        train: int64, in order.
        validation: What follows.
        test: The text's end.
        characters: Of the training part; character i has the number i + 1.
        gzip_bits: Bits per character that gzip needs for the test part, the yardstick.
        source: Where it came from, for the user.
    """

    train: Tensor
    validation: Tensor
    test: Tensor
    characters: str
    gzip_bits: float
    source: str

    @property
    def symbols(self) -> int:
        """How many numbers there are, the unknown character included."""
        return len(self.characters) + 1

    def numbers(self, text: str) -> Tensor:
        """The text's characters as numbers."""
        return numbers_of(text, self.characters)

    def characters_of(self, numbers: Sequence[int]) -> str:
        """And back; an unknown one is U+FFFD."""
        return "".join("\ufffd" if number == UNKNOWN else self.characters[number - 1] for number in numbers)

    def described(self) -> str:
        """One line for the user."""
        return (
            f"{self.source}: {len(self.train):,} characters to train on, {len(self.validation):,} held out, "
            f"{len(self.test):,} to test, "
            f"{len(self.characters)} different ones"
        )


def load_text(file: str | None, test_fraction: float) -> Text:
    """The text of ``file`` (UTF-8), by default Python's own manual of topics, split near its end.

    Raises:
        SettingsError: The file cannot be read, is no text, or is too short to be split.
    """
    if file is None:
        from pydoc_data.topics import topics

        content, source = "\n".join(topics[name] for name in sorted(topics)), "the help topics of Python"
    else:
        content, source = _read(file), file
    end = int(len(content) * (1 - test_fraction))
    held_out = int(len(content) * (1 - 1.5 * test_fraction))
    train, validation, test = content[:held_out], content[held_out:end], content[end:]
    if len(train) < 100 or len(test) < 10:
        raise SettingsError(
            f"--text-file {source}: {len(content)} characters are too few, 100 are needed to train and 10 to test.\n"
            "Fix: a longer text"
        )
    characters = "".join(sorted({*train, "\n"}))
    return Text(
        numbers_of(train, characters),
        numbers_of(validation, characters),
        numbers_of(test, characters),
        characters,
        gzip_bits=8 * len(gzip.compress(test.encode(), 9)) / len(test),
        source=source,
    )


def numbers_of(text: str, characters: str) -> Tensor:
    """A text's characters as their places in ``characters``, from 1; int64."""
    places = {character: place + 1 for place, character in enumerate(characters)}
    return torch.tensor([places.get(character, UNKNOWN) for character in text], dtype=torch.int64)


def _read(file: str) -> str:
    try:
        return unicodedata.normalize("NFC", Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--text-file {file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"--text-file {file} is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}.\n"
            f"Fix: iconv -f latin1 -t utf-8 {file} > text.txt"
        ) from error


class Streams(Dataset[tuple[Tensor, Tensor]]):
    """The text cut into streams of equal length, each in segments; item i is segment i // streams of stream
    i % streams.

    In their order the items of one step are one segment of every stream, and the next step holds what follows
    in each of them: a hidden state can be handed on. An item is (characters [segment], the ones after them
    [segment]); what does not fill a whole segment in every stream is left out.

    >>> items = Streams(torch.arange(13), streams=2, segment=3)
    >>> [items[i][0].tolist() for i in range(len(items))]
    [[0, 1, 2], [6, 7, 8], [3, 4, 5], [9, 10, 11]]

    Raises:
        SettingsError: The text is shorter than one segment in each stream.
    """

    def __init__(self, numbers: Tensor, streams: int, segment: int) -> None:
        self.streams, self.segment = streams, segment
        self.segments = (len(numbers) - 1) // (streams * segment)
        if self.segments < 1:
            raise SettingsError(
                f"{len(numbers)} characters are too few for {streams} streams of at least one segment of {segment}.\n"
                "Fix: a smaller --global-batch-size (it is the number of streams) or --segment, or a longer text"
            )
        self.numbers = numbers[: self.segments * streams * segment + 1]

    def __len__(self) -> int:
        return self.segments * self.streams

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        step, stream = divmod(index, self.streams)
        start = (stream * self.segments + step) * self.segment
        return (
            self.numbers[start : start + self.segment],
            self.numbers[start + 1 : start + self.segment + 1],
        )


class InOrder(Sampler[int]):
    """The items as they stand: streams go on where they were. As a sampler it makes a loader one for training."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.items))

    def __len__(self) -> int:
        return self.items


class Lines(Dataset[Tensor]):
    """The lines of a text, each a sample: numbers of its characters, its newline at the end included.

    Made for `padded` and a `LengthBucketSampler`: lines have different lengths.
    """

    def __init__(self, numbers: Tensor, newline: int, *, keep_empty: bool = False) -> None:
        ends = (numbers == newline).nonzero().flatten() + 1
        edges = [0, *ends.tolist()]
        if edges[-1] != len(numbers):
            edges.append(len(numbers))
        spans = itertools.pairwise(edges)
        self.lines = [numbers[start:end] for start, end in spans if keep_empty or end - start > 1]
        self.newline = newline

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Tensor:
        return self.lines[index]

    @property
    def lengths(self) -> list[int]:
        """Characters of each line."""
        return [len(line) for line in self.lines]

    def padded(self, lines: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """A batch: (what stands before each character [n, longest], the character [n, longest]), -100 where none.

        A line starts after a newline.
        """
        longest = max(len(line) for line in lines)
        before = torch.full((len(lines), longest), self.newline)
        after = torch.full((len(lines), longest), -100)
        for row, line in enumerate(lines):
            before[row, 1 : len(line)] = line[:-1]
            after[row, : len(line)] = line
        return before, after

"""Suffix decoding: drafts what followed the longest end of a request that occurred before, in it or in an answer.

A suffix automaton (Blumer et al. 1985) holds every substring of a text in at most two states a token, and takes the
next token in constant time on average. So no length of match has to be chosen, as it must for n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minisgl.drafters.protocol import DraftRow, DraftTarget
from minisgl.request import Int32Array

_SHORTEST = 2  # tokens that must match before anything is drafted
_REMEMBERED = 32_768  # tokens of earlier answers in each of the two automata
_READ = 16_384  # last tokens of a prompt that are read; a token takes about two microseconds
_LOOKED_BACK = 64  # tokens to match against answers that are new


class SuffixAutomaton:
    """All substrings of a text that grows. A state stands for substrings that end at the same places.

    ``length`` is that of a state's longest substring, ``end`` is where its first occurrence ends, and ``link`` leads to
    the longest suffix that also ends elsewhere. State 0 is the empty substring.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._last = 0  # the state of the whole text

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        self.text.append(token)
        new = self._add({}, -1, len(self.text), len(self.text))
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._split(state, token)
        self._last = new

    def _split(self, state: int, token: int) -> int:
        """The state of exactly the longest substring of ``state``, and ``token`` behind it."""
        found = self._next[state][token]
        length = self._length[state] + 1
        if self._length[found] == length:
            return found
        # Shorter substrings of ``found`` have begun to occur where the longer ones do not: they get their own state.
        clone = self._add(dict(self._next[found]), self._link[found], length, self._end[found])
        self._link[found] = clone
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def repeated_suffix(self) -> tuple[int, int]:
        """The longest suffix of the text that occurred before: its length, and where its first occurrence ends."""
        link = max(self._link[self._last], 0)
        return self._length[link], self._end[link]

    def advance(self, match: Match, token: int) -> None:
        """Make a match of the end of some other text one of that text with ``token`` behind it."""
        state = match.state
        while state >= 0 and token not in self._next[state]:
            state = self._link[state]
            match.length = self._length[state] if state >= 0 else 0
        match.state = 0 if state < 0 else self._next[state][token]
        match.length = 0 if state < 0 else match.length + 1

    def end_of(self, match: Match) -> int:
        """Where the first occurrence of a match ends."""
        return self._end[match.state]

    def sequel(self, end: int, count: int) -> list[int]:
        """Up to ``count`` tokens of the text from position ``end`` on."""
        return self.text[end : end + count]


@dataclass(slots=True)
class Match:
    """The longest end of a request that occurs in an automaton of earlier answers."""

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0


@dataclass(slots=True)
class _Sequence:
    num_read: int  # tokens of the request that are in ``own``, or before its beginning
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    matches: list[Match] = field(default_factory=list)


class SuffixDrafter:
    """Drafts from prompt, output and earlier answers of all requests (SuffixDecoding, Oliaro et al. 2024).

    Of the places where the end of a request occurred before, the one with the longest match wins, and drafts at most
    two tokens for each that matches: a long match is trusted further. Answers are remembered in two automata; when the
    newer is full, the older is forgotten.
    """

    def __init__(self, target: DraftTarget) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._answers = [SuffixAutomaton(), SuffixAutomaton()]  # the older, and the newer

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._continue(self._read(row.uid, row.tokens), row.count) for row in rows]

    def finish(self, uid: int, prompt_len: int, tokens: Int32Array) -> None:
        """Forget the request, and remember its answer."""
        self._sequences.pop(uid, None)
        answer = tokens[prompt_len:][-_REMEMBERED:].tolist()
        if len(self._answers[-1].text) + len(answer) > _REMEMBERED:
            self._answers = [self._answers[-1], SuffixAutomaton()]
        for token in answer:
            self._answers[-1].extend(token)

    def _read(self, uid: int, tokens: Int32Array) -> _Sequence:
        sequence = self._sequences.get(uid)
        if sequence is None:
            sequence = self._sequences[uid] = _Sequence(max(0, len(tokens) - _READ))
        if [match.automaton for match in sequence.matches] != self._answers:
            sequence.matches = [Match(automaton) for automaton in self._answers]
            for token in tokens[max(0, sequence.num_read - _LOOKED_BACK) : sequence.num_read].tolist():
                self._advance(sequence, token)
        for token in tokens[sequence.num_read :].tolist():
            sequence.own.extend(token)
            self._advance(sequence, token)
        sequence.num_read = len(tokens)
        return sequence

    def _advance(self, sequence: _Sequence, token: int) -> None:
        for match in sequence.matches:
            match.automaton.advance(match, token)

    def _continue(self, sequence: _Sequence, count: int) -> list[int]:
        source = sequence.own
        length, end = source.repeated_suffix()
        for match in sequence.matches:
            if match.length > length:
                source, length, end = match.automaton, match.length, match.automaton.end_of(match)
        return source.sequel(end, min(count, 2 * length)) if length >= _SHORTEST else []

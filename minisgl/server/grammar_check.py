"""A trial for grammars: each new one is compiled in a process of its own before the engine sees it.

A schema of fifty characters can take minutes and gigabytes to compile, and nothing in its text says so. So the server
lets a child try, with a limit on its processor time and its memory that the kernel enforces: what exceeds them ends the
child alone. The child compiles for a vocabulary of single bytes, since the cost does not depend on the vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections import OrderedDict
from pathlib import Path

from minisgl.errors import InvalidRequest
from minisgl.sampling_params import SamplingParams

_MAX_KNOWN = 1024  # verdicts that are remembered
_MAX_ANSWER = 2**16  # bytes of a line in which the child answers


class GrammarCheck:
    """Tries grammars one by one. Belongs to one event loop; the child is started when it is first needed.

    A grammar may take ``max_seconds`` of processor time and ``max_memory`` bytes to compile.
    """

    def __init__(self, max_seconds: float, max_memory: int) -> None:
        self._max_seconds = max_seconds
        self._max_memory = max_memory
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._known: OrderedDict[tuple[str, str], str | None] = OrderedDict()  # what is wrong with a grammar, if it is

    async def check(self, params: SamplingParams) -> None:
        """Raise `InvalidRequest` unless the grammar of ``params``, if it has one, compiles within the limits.

        Cancelling this ends the child, and with it what it compiles.
        """
        grammar = params.grammar
        if grammar is None:
            return
        if grammar not in self._known:
            async with self._turn:
                if grammar not in self._known:  # another request with the same grammar was first
                    self._known[grammar] = await self._try(*grammar)
                    if len(self._known) > _MAX_KNOWN:
                        self._known.popitem(last=False)
        if (reason := self._known[grammar]) is not None:
            raise InvalidRequest(grammar[0], reason)

    async def close(self) -> None:
        """End the child."""
        if (child := self._end()) is not None:
            await child.wait()

    def _end(self) -> asyncio.subprocess.Process | None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
        return child

    async def _try(self, field: str, text: str) -> str | None:
        try:
            if self._child is None or self._child.returncode is not None:
                self._child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", __name__, str(self._max_seconds), str(self._max_memory)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                    limit=_MAX_ANSWER,
                )
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.write(json.dumps([field, text]).encode() + b"\n")
            line = await self._child.stdout.readline()
            if line:
                answer: str | None = json.loads(line)
                return answer
            code = await self._child.wait()
        except BaseException:
            self._end()
            raise
        if code == -signal.SIGPROF:
            return f"takes more than {self._max_seconds:g} s to compile; simplify it, or raise --grammar-timeout"
        return f"takes more than {self._max_memory >> 20} MiB to compile; simplify it, or raise --grammar-memory"


def main() -> None:
    """Compile what comes, a grammar a line; answer with null, or with what is wrong with it.

    Arguments are the seconds and bytes that each may take.
    """
    from llguidance import LLTokenizer

    from minisgl.grammar import compile_grammar

    max_seconds, max_memory = float(sys.argv[1]), int(sys.argv[2])
    vocabulary = LLTokenizer("byte")
    if sys.platform == "linux":  # elsewhere the limit cannot be had
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + max_memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, max_seconds)  # the signal ends this process, also within the compiler
        answer = None
        try:
            compile_grammar(vocabulary, *json.loads(line))
        except InvalidRequest as error:
            answer = error.message
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

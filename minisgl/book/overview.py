"""What returns in every chapter: the picture of the engine with the part that it builds, and the scoreboard."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture
from minisgl.book.tables import RESULTS, Markdown, kept, table, three_digits
from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """A box: what it is called, the chapters that build it, and its place in CSS pixels."""

    label: str
    chapters: tuple[int, ...]
    x: float
    y: float
    width: float


_HEIGHT = 46.0
_SERVER, _HOST, _MEMORY, _DEVICE, _INSIDE = 56.0, 146.0, 212.0, 308.0, 366.0  # upper edges of the rows of boxes
PARTS = {
    "request": Part("Request", (1,), 26, _HOST, 78),
    "tokenizer": Part("Tokenizer", (15,), 118, _HOST, 86),
    "scheduler": Part("Scheduler", (8, 9), 218, _HOST, 94),
    "batch": Part("Batch", (1,), 330, _HOST, 82),
    "loop": Part("Engine loop", (8, 13), 452, _HOST, 114),
    "detokenizer": Part("Detokenizer", (15,), 624, _HOST, 108),
    "prefix": Part("Prefix cache", (6, 7), 92, _MEMORY, 112),
    "kvcache": Part("KV pages", (4, 9), 218, _MEMORY, 94),
    "weights": Part("Weights", (3, 19), 176, _DEVICE, 108),
    "engine": Part("Model runner", (4, 5), 310, _DEVICE, 122),
    "model": Part("Transformer", (2,), 452, _DEVICE, 150),
    "sampler": Part("Sampler", (5,), 624, _DEVICE, 108),
    "ranks": Part("Other ranks", (14,), 176, _INSIDE, 108),
    "graphs": Part("CUDA graphs", (11,), 310, _INSIDE, 122),
    "attention": Part("Attention", (10,), 444, _INSIDE, 84),
    "kernels": Part("Kernels", (12,), 536, _INSIDE, 74),
    "drafter": Part("Speculation", (18,), 624, _INSIDE, 108),
    "server": Part("HTTP server", (16, 20), 26, _SERVER, 130),
    "processes": Part("Processes, messages", (15,), 168, _SERVER, 184),
    "measuring": Part("Measuring", (17,), 364, _SERVER, 110),
}
"""Parts of the engine by name."""
_CHAINS = ("request tokenizer scheduler batch", "loop detokenizer", "weights engine model sampler", "prefix kvcache")


def architecture(*here: str) -> Picture:
    """Draw the engine: the host's lane above the device's, and the parts named ``here`` filled.

    Raises `ConfigError` for a part that is not one of `PARTS`.
    """
    if unknown := [name for name in here if name not in PARTS]:
        raise ConfigError(f"architecture: no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    labels = ", ".join(PARTS[name].label for name in here)
    canvas = Canvas(f"You are here: {labels}" if here else "From a request to its tokens, and back to text")
    canvas.box(MARGIN, 44, WIDTH - 2 * MARGIN, 380)
    for rule, name in ((110, "host: Python and NumPy"), (272, "device: PyTorch and Triton")):
        canvas.path(f"M{MARGIN} {rule}H{WIDTH - MARGIN}", "rule dashed")
        canvas.text(26, rule + 22, name, "muted small", "start")
    for left, right in ((PARTS[a], PARTS[b]) for chain in _CHAINS for a, b in pairwise(chain.split())):
        canvas.arrow((left.x + left.width, left.y + _HEIGHT / 2), (right.x, right.y + _HEIGHT / 2))
    canvas.arrow((258, _HOST + _HEIGHT), (258, _MEMORY))
    canvas.arrow((272, _MEMORY), (272, _HOST + _HEIGHT))
    canvas.arrow((371, _HOST + _HEIGHT), (371, _DEVICE))
    canvas.text(379, 266, "one copy a step", "muted small", "start")
    canvas.path(f"M678 {_DEVICE}V240H509V{_HOST + _HEIGHT + 4}")
    canvas.arrow((509, 210), (509, _HOST + _HEIGHT))
    canvas.text(670, 258, "its tokens", "muted small", "end")
    canvas.path(f"M509 {_HOST}V128H265V{_HOST - 4}")
    canvas.arrow((265, 130), (265, _HOST))
    canvas.text(388, 123, "tokens of the last step", "muted small")
    for name, part in PARTS.items():
        label = part.label, "text strong" if name in here else "text"
        chapters = f"chapter{'s' * (len(part.chapters) > 1)} {', '.join(map(str, part.chapters))}", "text small"
        color = 1 if name in here else None
        canvas.cell(part.x, part.y, part.width, _HEIGHT, label, chapters, color=color, kind="shared")
    says = (
        "On the host, a request passes the tokenizer, the scheduler with KV pages and a prefix cache beside it, and "
        "the batch; on the device, the model runner, the transformer and the sampler. The tokens go back through the "
        "engine loop to the scheduler, and through the detokenizer to the client. A server is around it."
    )
    return canvas.picture(436, f"{says} You are here: {labels}." if here else says)


def you_are_here(chapter: int) -> Picture:
    """Draw the engine with the parts that a chapter builds; chapter 0 passes through all of them."""
    return architecture(*(name for name, part in PARTS.items() if chapter in part.chapters))


def scoreboard(chapter: int) -> Markdown:
    """Tokens a second after each chapter up to this one, on a CPU and on a GPU, and where they were measured."""
    from minisgl.bench.workloads import STAGES

    headings, columns, origins = ["chapter", "what runs"], [], []
    for machine, name in (("CPU", "scoreboard"), ("GPU", "scoreboard-gpu")):
        if not (RESULTS / f"{name}.json").exists():
            headings.append(f"{machine}, output tokens/s")
            columns.append(["not measured yet"] * len(STAGES))
            continue
        results = kept(name)
        origins.append(f"*{results.origin}*")
        for each in results.tables:
            speeds = {row[1]: [three_digits(float(speed)) for speed in row[2:]] for row in each.rows}
            headings.append(f"{machine}: {each.title}")
            columns.append(["{} ({} to {})".format(*speeds[name]) if name in speeds else "–" for _, name, _ in STAGES])
    rows = [(at, name, *values) for (at, name, _), *values in zip(STAGES, *columns, strict=True) if at <= chapter]
    return Markdown("\n\n".join([table(headings, rows).text, *origins]))

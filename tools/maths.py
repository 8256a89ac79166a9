"""Formulas between dollar signs as MathML, which browsers draw themselves: mdBook's own way needs the network."""

from __future__ import annotations

import re

from latex2mathml.converter import convert

_SPAN = re.compile(
    r"(?P<code>^(?P<fence>~~~|```).*?^(?P=fence)|(?P<ticks>`+).+?(?<!`)(?P=ticks)(?!`))"
    r"|\$\$(?P<block>.+?)\$\$"
    r"|(?<![\\\w$])\$(?P<inline>[^\s$](?:(?:(?!\n\n)[^$])*[^\s$\\])?)\$(?![\w$])",
    re.DOTALL | re.MULTILINE,
)
_NOT_UNDERSTOOD = re.compile(r">[^<]*(?P<left>\\\w*|&(?!#?\w+;))")
_TEXT = re.compile(r"\\text\{[^{}]*\}")
_REFUSED = re.compile(r"(?P<left>\\operatorname\*|\\mathtt|\\boldsymbol)")
"""What the converter takes and draws wrongly."""


def with_maths(text: str) -> str:
    """Markdown with each ``$formula$`` and ``$$formula$$`` replaced, but for those in code.

    Raises:
        ValueError: a formula uses something that cannot be converted.
    """
    return _SPAN.sub(_replaced, text)


def _replaced(match: re.Match[str]) -> str:
    if match["code"] is not None:
        return match[0]
    formula = match["block"] or match["inline"]
    # The converter knows the one environment and not the other, which is its like inside a formula.
    known = " ".join(formula.split()).replace("{aligned}", "{align*}").replace(r"\arg\m", r"\operatorname{arg}\m")
    known = _TEXT.sub(lambda text: text[0].replace("\\_", "_"), known)
    made = convert(known, display="block" if match["block"] else "inline")
    if left := _REFUSED.search(formula) or _NOT_UNDERSTOOD.search(made):
        raise ValueError(f"the formula {formula.strip()!r}: {left['left']!r} cannot be converted to MathML")
    return made

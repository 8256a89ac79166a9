from __future__ import annotations

import pytest

from tools.maths import with_maths


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("so $n^2$.", "<msup><mi>n</mi><mn>2</mn></msup>"),
        ("$a\nb$", "<mi>a</mi><mi>b</mi>"),
        ("$$\n\\frac{1}{n}\n$$", 'display="block"><mrow><mfrac><mrow><mn>1</mn></mrow><mrow><mi>n</mi></mrow></mfrac>'),
    ],
)
def test_a_formula_becomes_mathml(text: str, shown: str) -> None:
    made = with_maths(text)
    assert shown in made
    assert "$" not in made
    assert "\n" not in made, "a line of its own could be read as Markdown"


@pytest.mark.parametrize(
    "text",
    [
        "from $5 to $6",
        "from $5–$6",
        r"a \$n\$ b",
        "`$n$` and ``a ` $n$``",
        "~~~bash\necho $A $B\n~~~",
        "```\n$n$\n```\n",
        "one $n\n\nand m$ end",
    ],
)
def test_prices_and_code_stay(text: str) -> None:
    assert with_maths(text) == text


def test_code_before_a_formula_does_not_hide_it() -> None:
    assert with_maths("`$` $n$ `$`").startswith("`$` <math")


@pytest.mark.parametrize("formula", [r"\nonsense x", r"\begin{aligned} a &= b \end{aligned}"])
def test_what_cannot_be_converted_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match="cannot be converted to MathML"):
        with_maths(f"${formula}$")

from __future__ import annotations

from xml.etree import ElementTree

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
    ("formula", "tags"),
    [
        (r"\operatorname{softmax}\left(\frac{QK^\top}{\sqrt{d}}\right)V", {"mfrac", "msqrt", "msup"}),
        (r"\frac{e^{x_i}}{\sum_{j=1}^{n} e^{x_j}}", {"mfrac", "msubsup"}),
        (
            r"\begin{pmatrix} \cos\theta & -\sin\theta \\ \sin\theta & \cos\theta \end{pmatrix}",
            {"mtable", "mtr", "mtd"},
        ),
        (r"\begin{cases} 1 & \text{if } x > 0 \\ 0 & \text{otherwise} \end{cases}", {"mtable", "mtext"}),
        (r"\begin{aligned} m' &= \max(m, s) \\ l' &= l\,e^{m-m'} \end{aligned}", {"mtable", "mtr", "mtd"}),
        (r"\text{page\_table}[\lfloor p / \text{page\_size} \rfloor] + p \bmod 2", {"mtext"}),
        (r"\arg\max_i \frac{z_i}{T} \;=\; \left( \tau_i \right)", {"mfrac", "msub"}),
        (r"\left\lceil \frac{n}{p} \right\rceil \approx \mathcal{O}(n)", {"mfrac"}),
    ],
)
def test_the_notation_of_the_chapters_is_understood(formula: str, tags: set[str]) -> None:
    root = ElementTree.fromstring(with_maths(f"$${formula}$$"))
    found = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= found
    assert "\\" not in "".join(root.itertext())


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


@pytest.mark.parametrize("formula", [r"\nonsense x", "a & b", r"\operatorname*{max}_v x", r"\mathtt{x}"])
def test_what_cannot_be_converted_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match="cannot be converted to MathML"):
        with_maths(f"${formula}$")

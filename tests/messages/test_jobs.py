from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.core.sampling_params import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.messages import Conversation, Submit
from minisgl.messages.jobs import TokenIds, encode, pack, submit

DECODER = msgspec.msgpack.Decoder(Submit)
GREEDY = SamplingParams(temperature=0)


def test_a_job_survives_the_way() -> None:
    params = SamplingParams(max_tokens=None, stop=["a", "b"], logit_bias={7: -3.0}, logprobs=2, seed=2**62)
    prompts = ["text 🦊", [1, 2, 299], Conversation([{"role": "user", "content": [{"type": "text", "text": "x"}]}])]
    received = DECODER.decode(encode(submit(3, prompts, params, True, "somebody")))
    assert (received.job, received.streaming, received.user) == (3, True, "somebody")
    assert received.prompts == ["text 🦊", TokenIds(np.array([1, 2, 299], np.int32).tobytes()), prompts[2]]
    assert SamplingParams(**received.params) == params


def test_only_what_is_not_default_travels() -> None:
    assert submit(0, ["x"], SamplingParams(), False, "").params == {}
    assert submit(0, ["x"], GREEDY, False, "").params == {"temperature": 0}


@pytest.mark.parametrize("token_id", [2**31, -(2**31) - 1, 10**5000], ids=["above", "below", "huge"])
def test_a_token_id_beyond_32_bits_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match="outside of every vocabulary") as caught:
        pack([1, token_id])
    assert caught.value.field == "prompt"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompts": ["half a \ud800"]}, "prompt"),
        ({"prompts": [Conversation([{"role": "user", "content": "\ud800"}])]}, "prompt"),
        ({"prompts": [Conversation([{"role": "user", "content": 2**70}])]}, "prompt"),
        ({"user": "\udfff"}, "user"),
        ({"params": SamplingParams(stop="\ud800")}, "stop"),
    ],
)
def test_what_no_socket_can_carry_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"prompts": ["x"], "params": GREEDY, "streaming": False, "user": "", **fields}
    with pytest.raises(InvalidRequest) as caught:
        encode(submit(0, **given))
    assert caught.value.field == field

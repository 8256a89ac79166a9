"""The toy engine: its parts against plain definitions, its model against transformers, and all against the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention

from minisgl.book import toy
from minisgl.book.toy import Cache, Engine, Model, PagedCache, PagePool, PrefixCache, Row

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 50,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


@pytest.fixture(scope="module")
def model() -> Model:
    generator = torch.Generator().manual_seed(7)
    heads, kv_heads = 4 * 8, 2 * 8
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (50, 32), "model.norm": (32,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm": (32,), at + "post_attention_layernorm": (32,)}
        shapes |= {at + "self_attn.q_proj": (heads, 32), at + "self_attn.o_proj": (32, heads)}
        shapes |= {at + "self_attn.k_proj": (kv_heads, 32), at + "self_attn.v_proj": (kv_heads, 32)}
        shapes |= {at + "mlp.gate_proj": (48, 32), at + "mlp.up_proj": (48, 32), at + "mlp.down_proj": (32, 48)}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    return Model(CONFIG, weights)


class CountingModel:
    """Says that the next token is the sum of all tokens of the row, modulo 50, and notes what it is fed."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    def __call__(self, tokens: list[int], lengths: list[int], caches: list[Cache]) -> torch.Tensor:
        self.fed.append(list(tokens))
        seen = vars(caches[0]).setdefault("seen", [])  # not by `Cache.extend`, which a reader writes later
        seen += tokens
        caches[0].length += len(tokens)
        return torch.nn.functional.one_hot(torch.tensor([sum(seen) % 50]), 50).float()


# -- chapter 1


def test_the_naive_loop_feeds_the_whole_text_for_each_token() -> None:
    model, prompt = CountingModel(), [3, 4]
    assert toy.generate_naively(model, prompt, 3) == [7, 14, 28]
    assert model.fed == [[3, 4], [3, 4, 7], [3, 4, 7, 14]]
    assert prompt == [3, 4], "the prompt belongs to the caller: copy it before you append"


def test_with_a_cache_each_token_is_fed_once() -> None:
    model, prompt = CountingModel(), [3, 4]
    assert toy.generate(model, prompt, 3) == [7, 14, 28]
    assert model.fed == [[3, 4], [7], [14]]
    assert prompt == [3, 4], "the prompt belongs to the caller"


def test_a_cache_returns_all_that_it_was_given_layer_by_layer() -> None:
    cache, k, v = Cache(), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    for layer in (0, 1):
        for start, stop in ((0, 3), (3, 5)):
            kept_k, kept_v = cache.extend(layer, k[start:stop] + layer, v[start:stop] + layer)
            assert torch.equal(kept_k, k[:stop] + layer), f"the keys of layer {layer} after {stop} tokens"
            assert torch.equal(kept_v, v[:stop] + layer), f"the values of layer {layer} after {stop} tokens"


def test_a_step_is_the_new_tokens_of_all_rows_in_a_row() -> None:
    rows = [Row([1, 2, 3], 9), Row([4, 5, 6, 7], 9), Row([8, 9], 9)]
    rows[1].cache.length, rows[2].cache.length = 3, 1
    assert toy.flatten(rows) == ([1, 2, 3, 7, 9], [3, 1, 1])
    assert [row.tokens for row in rows] == [[1, 2, 3], [4, 5, 6, 7], [8, 9]], "the rows stay as they are"


# -- chapter 2


def test_rms_norm_gives_each_token_a_mean_square_of_one() -> None:
    x = torch.randn(5, 64) * torch.tensor([1.0, 10.0, 0.1, 3.0, 100.0])[:, None]
    assert toy.rms_norm(x, torch.ones(64), 0.0).square().mean(-1) == pytest.approx([1.0] * 5)
    weight = torch.randn(64)
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)
    torch.testing.assert_close(toy.rms_norm(x, weight, 1e-5), expected)


def test_rotation_turns_pairs_by_the_position() -> None:
    x = torch.zeros(2, 1, 4)
    x[:, 0, 0] = 1.0  # the pair (0, 2), whose frequency is base^0 = 1
    turned = toy.rotate(x, torch.tensor([0, 2]), 100.0)
    angle = torch.tensor(2.0)
    torch.testing.assert_close(turned[0, 0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(
        turned[1, 0], torch.stack([angle.cos(), torch.tensor(0.0), angle.sin(), torch.tensor(0.0)])
    )
    x = torch.zeros(1, 1, 4)
    x[0, 0, 1] = 1.0  # the pair (1, 3), whose frequency is base^(-1/2) = 0.1
    torch.testing.assert_close(toy.rotate(x, torch.tensor([2]), 100.0)[0, 0, 3], torch.tensor(0.2).sin())


def test_scores_depend_on_distances_alone() -> None:
    q, k = torch.randn(1, 3, 16), torch.randn(1, 3, 16)
    near = toy.rotate(q, torch.tensor([7]), 10000.0) * toy.rotate(k, torch.tensor([4]), 10000.0)
    far = toy.rotate(q, torch.tensor([107]), 10000.0) * toy.rotate(k, torch.tensor([104]), 10000.0)
    torch.testing.assert_close(near.sum(-1), far.sum(-1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("new", [6, 2, 1])
def test_attention_is_causal_and_shares_key_heads(new: int) -> None:
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    shared = (each.repeat_interleave(2, dim=1).transpose(0, 1) for each in (k, v))
    expected = scaled_dot_product_attention(q.transpose(0, 1), *shared, is_causal=True).transpose(0, 1)
    torch.testing.assert_close(toy.attend(q[-new:], k, v), expected[-new:], msg=lambda text: f"{new} new of 6: {text}")


def test_the_model_is_that_of_transformers(model: Model) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=True, rms_norm_eps=1e-5)).eval()
    theirs.load_state_dict(model.weights, strict=False)
    tokens = [3, 1, 4, 1, 5, 9]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model(tokens, [6], [Cache()])[0], expected[-1], atol=1e-4, rtol=1e-4)


def test_rows_of_a_step_do_not_see_each_other(model: Model) -> None:
    texts = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    together = model([token for text in texts for token in text], [3, 2, 4], [Cache(), Cache(), Cache()])
    for row, text in zip(together, texts, strict=True):
        torch.testing.assert_close(row, model(text, [len(text)], [Cache()])[0], atol=1e-4, rtol=1e-4)


# -- chapter 3


def test_a_safetensors_file_is_read(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5).bfloat16(), "a": torch.randn(4).bfloat16(), "c": torch.randn(2, 2, 2).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = toy.read_safetensors(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys(), "the header's __metadata__ is no tensor"
    for name, tensor in tensors.items():
        told = partial("tensor {}: {}".format, name)
        torch.testing.assert_close(read[name], tensor.float(), atol=0, rtol=0, msg=told)


# -- chapter 4


def test_pages_are_taken_shared_and_given_back() -> None:
    pool = PagePool(CONFIG, num_pages=4)
    pages = pool.take(3)
    assert len(set(pages)) == 3
    assert not set(pages) & set(pool.free)
    with pytest.raises(MemoryError):
        pool.take(2)
    assert len(pool.free) == 1, "who does not get all pages gets none"
    pool.share(pages[:1])
    pool.give_back(pages)
    assert pages[0] not in pool.free, "a page that has another reader is not free"
    pool.give_back(pages[:1])
    assert sorted(pool.free) == [0, 1, 2, 3]
    assert pool.readers == [0, 0, 0, 0]


def test_a_paged_cache_returns_what_a_growing_one_does() -> None:
    pool, plain = PagePool(CONFIG, num_pages=8, page_size=4), Cache()
    pool.take(2)
    paged = PagedCache(pool, [])
    for new in (6, 1, 1, 5):
        paged.reserve(paged.length + new)
        for layer in (0, 1):
            k, v = torch.randn(new, 2, 8), torch.randn(new, 2, 8)
            for got, expected in zip(paged.extend(layer, k, v), plain.extend(layer, k, v), strict=True):
                assert torch.equal(got, expected), f"layer {layer}, {paged.length} tokens and {new} new ones"
        paged.length += new
    assert len(paged.pages) == 4
    assert len(pool.free) == 2


# -- chapter 5


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    logits, generator = torch.tensor([1.0, 3.0, 2.0]), torch.Generator().manual_seed(0)
    assert toy.sample(logits, 0.0, generator) == 1, "at temperature 0 the likeliest token is taken"
    drawn = [toy.sample(logits, 2.0, generator) for _ in range(4000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=3) / 4000
    torch.testing.assert_close(shares, (logits / 2).softmax(-1), atol=0.03, rtol=0)
    generator.manual_seed(0)
    again = [toy.sample(logits, 2.0, generator) for _ in range(100)]
    assert again == drawn[:100], "the same generator, started with the same seed, draws the same tokens"


# -- chapter 6


def test_the_longest_known_beginning_is_found_and_marked_as_used() -> None:
    cache = PrefixCache(PagePool(CONFIG, num_pages=8, page_size=2))
    cache.pages = {(1, 2): 7, (1, 2, 3, 4): 5, (8, 9): 3, (1, 2, 3, 4, 5, 6, 7, 8): 2}
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8]) == [7, 5], "what comes after an unknown prefix is of no use"
    order = [(8, 9), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4), (1, 2)]
    assert list(cache.pages) == order, "what was used last comes last, and a text's first page after those behind it"
    assert cache.match([8, 9, 1]) == [3], "a page that isn't full doesn't count"
    assert list(cache.pages)[-1] == (8, 9), "a match is a use"
    assert cache.match([3, 4]) == [], "the same tokens in another place are another text"


def test_full_pages_are_kept_and_have_a_reader_more() -> None:
    pool = PagePool(CONFIG, num_pages=8, page_size=2)
    cache, pages = PrefixCache(pool), pool.take(3)
    cache.insert([1, 2, 3, 4, 5], pages)
    assert cache.pages == {(1, 2): pages[0], (1, 2, 3, 4): pages[1]}, "only full pages are kept"
    assert [pool.readers[page] for page in pages] == [2, 2, 1]
    cache.insert([8, 9], pool.take(1))
    cache.insert([1, 2, 3, 4], pages[:2])
    assert list(cache.pages) == [(8, 9), (1, 2, 3, 4), (1, 2)], "inserting a known text is a use of it"
    assert [pool.readers[page] for page in pages] == [2, 2, 1], "one reader is enough"


def test_what_is_new_is_used_with_the_whole_text() -> None:
    pool = PagePool(CONFIG, num_pages=8, page_size=2)
    cache = PrefixCache(pool)
    cache.insert([1, 2, 3, 4], pool.take(2))
    assert list(cache.pages) == [(1, 2, 3, 4), (1, 2)], "the first page was used last: it goes after those behind it"


def test_a_beginning_that_is_known_keeps_its_page() -> None:
    pool = PagePool(CONFIG, num_pages=8, page_size=2)
    cache, pages, others = PrefixCache(pool), pool.take(2), pool.take(2)
    cache.insert([1, 2, 3, 4], pages)
    cache.insert([1, 2, 3, 7], others)
    assert cache.pages == {(1, 2): pages[0], (1, 2, 3, 4): pages[1], (1, 2, 3, 7): others[1]}
    assert pool.readers[others[0]] == 1, "a duplicate remains the caller's alone"


def test_the_page_that_was_used_longest_ago_goes_first() -> None:
    pool = PagePool(CONFIG, num_pages=8, page_size=2)
    cache, first, second = PrefixCache(pool), pool.take(2), pool.take(1)
    cache.insert([1, 2, 3, 4], first)
    cache.insert([5, 6], second)
    assert not cache.evict(), "pages that rows read stay"
    pool.give_back(first + second)
    cache.match([1, 2, 3, 4])
    assert cache.evict()
    assert second[0] in pool.free
    assert cache.evict()
    assert cache.match([1, 2, 3, 4]) == first[:1], "the end of a text goes before its beginning"
    assert cache.evict()
    assert not cache.evict()
    assert len(pool.free) == 8


def test_a_page_that_a_row_reads_is_passed_over() -> None:
    pool = PagePool(CONFIG, num_pages=8, page_size=2)
    cache, first, second = PrefixCache(pool), pool.take(1), pool.take(1)
    cache.insert([1, 2], first)
    cache.insert([5, 6], second)
    pool.give_back(second)
    assert cache.evict() is True, "a row reads the older page, and nobody the newer one"
    assert cache.pages == {(1, 2): first[0]}
    assert pool.readers[second[0]] == 0, "a page that's free has no readers"
    assert cache.evict() is False
    assert cache.pages == {(1, 2): first[0]}


# -- chapters 8 and 9

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2], [3, 8, 4, 6, 2, 6, 4], [3, 1, 4, 1, 5, 9]]


def run(engine: Engine, prompts: list[list[int]], count: int) -> tuple[list[Row], list[list[int]]]:
    """Rows for all prompts, and how many tokens each step fed them."""
    rows, steps = [engine.add(prompt, count) for prompt in prompts], []
    step = engine.model

    class Watching:
        config = engine.model.config

        def __call__(self, tokens: list[int], lengths: list[int], caches: list[Any]) -> torch.Tensor:
            steps.append(lengths)
            return step(tokens, lengths, caches)

    engine.model = Watching()
    while engine.waiting or engine.running:
        engine.step()
    return rows, steps


def check_outputs(model: Model, rows: list[Row], prompts: list[list[int]], count: int) -> None:
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.tokens[len(prompt) :] == toy.generate_naively(model, prompt, count), f"the answer to {prompt}"


def test_rows_join_as_soon_as_others_leave(model: Model) -> None:
    engine = Engine(model, set(), num_pages=32, max_rows=2)
    rows, steps = run(engine, PROMPTS[:3], 4)
    check_outputs(model, rows, PROMPTS[:3], 4)
    assert steps == [[5, 3], [1, 1], [1, 1], [1, 1], [9], [1], [1], [1]]
    assert len(engine.pool.free) + len(engine.prefixes.pages) == 32, "a row that leaves gives its pages back"


def test_a_stop_token_ends_a_row(model: Model) -> None:
    second = toy.generate_naively(model, PROMPTS[0], 2)[1]
    row = Engine(model, {second}).add(PROMPTS[0], 9)
    engine = Engine(model, {second})
    engine.waiting.append(row)
    while engine.waiting or engine.running:
        finished = engine.step()
    assert finished == [row]
    assert row.tokens[-1] == second
    assert second not in row.tokens[len(PROMPTS[0]) : -1]


def test_a_known_beginning_is_not_fed_again(model: Model) -> None:
    engine, prompt = Engine(model, set(), num_pages=32), list(range(1, 41))
    run(engine, [prompt], 2)
    rows, steps = run(engine, [[*prompt, 7]], 2)
    assert steps[0] == [41 - 32], "two pages of sixteen tokens were there"
    check_outputs(model, rows, [[*prompt, 7]], 2)


def test_of_a_beginning_that_is_known_whole_the_last_token_is_fed(model: Model) -> None:
    engine, prompt = Engine(model, set(), num_pages=32), list(range(1, 33))  # exactly two pages
    run(engine, [prompt], 1)
    rows, steps = run(engine, [prompt], 1)
    assert steps[0] == [16], "without its last token, the prompt begins with one known page"
    check_outputs(model, rows, [prompt], 1)


def test_a_page_is_offered_once_all_of_its_keys_are_there(model: Model) -> None:
    engine, prompt = Engine(model, set(), num_pages=32), list(range(1, 29))
    (row,), _ = run(engine, [prompt], 4)  # exactly two pages of tokens, the last of which was never fed
    assert list(engine.prefixes.pages) == [tuple(row.tokens[:16])], "the second page has no keys of its last token"
    longer = [*row.tokens, 5]
    rows, _ = run(engine, [longer], 4)
    check_outputs(model, rows, [longer], 4)


def test_a_row_that_finds_no_room_keeps_its_place_and_no_pages(model: Model) -> None:
    engine, known = Engine(model, set(), num_pages=3), list(range(1, 18))
    run(engine, [known], 1)
    (page,) = engine.prefixes.pages.values()
    old, large = engine.add([9] * 20, 6), engine.add(known + [7] * 20, 2)
    engine.step()
    assert engine.running == [old]
    assert list(engine.waiting) == [large], "it's the first in the queue and stays there"
    assert engine.pool.readers[page] == 1, "a row that isn't let in gives back what it has found, too"


def test_nobody_overtakes_the_first_of_the_queue(model: Model) -> None:
    engine = Engine(model, set(), num_pages=3)
    old = engine.add([9] * 20, 6)
    large, small = engine.add([7] * 40, 2), engine.add([5] * 3, 2)
    engine.step()
    assert engine.running == [old], "a page is free for the small one, but the large one came before it"
    assert list(engine.waiting) == [large, small]


def test_all_rows_that_finish_in_a_step_are_returned(model: Model) -> None:
    engine = Engine(model, set(), num_pages=32)
    first, long, second = engine.add([3, 1], 2), engine.add([9, 2], 5), engine.add([5, 3], 2)
    assert engine.step() == [], "none is finished"
    assert engine.step() == [first, second]
    assert engine.running == [long]


def test_a_row_with_a_temperature_draws_from_the_engines_generator(model: Model) -> None:
    engine, tokens, generator = Engine(model, set()), [3, 1, 4], torch.Generator().manual_seed(0)
    row = engine.add(tokens, 6, temperature=5.0)
    while engine.waiting or engine.running:
        engine.step()
    for _ in range(6):
        tokens.append(toy.sample(model(tokens, [len(tokens)], [Cache()])[0], 5.0, generator))
    assert row.tokens == tokens


def test_running_rows_grow_before_others_come_in(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = Engine(model, set()), list[str]()
    admit = engine.admit
    monkeypatch.setattr(engine, "grow", lambda: calls.append("grow"))
    monkeypatch.setattr(engine, "admit", lambda: [calls.append("admit"), admit()])
    engine.add([3, 1], 2)
    engine.step()
    assert calls == ["grow", "admit"], "whoever comes in may only have the pages that running rows leave"


def test_a_row_that_could_never_fit_is_refused(model: Model) -> None:
    engine = Engine(model, set(), num_pages=2)
    with pytest.raises(ValueError, match="shorter"):
        engine.add([1] * 30, 3)
    with pytest.raises(ValueError, match="0 tokens"):
        engine.add([], 3)
    assert not engine.waiting


@pytest.mark.parametrize("num_pages", [3, 4, 6])
def test_rows_that_lose_their_pages_end_with_the_same_tokens(model: Model, num_pages: int) -> None:
    engine = Engine(model, set(), num_pages=num_pages)
    rows, steps = run(engine, PROMPTS, 30)
    check_outputs(model, rows, PROMPTS, 30)
    assert max(map(len, steps)) >= 2, "rows run together as far as the pages go"
    assert len(engine.pool.free) + len(engine.prefixes.pages) == num_pages


def test_room_is_made_of_cached_pages_that_no_row_reads(model: Model) -> None:
    engine = Engine(model, set(), num_pages=3)
    engine.prefixes.insert([1] * 32, pages := engine.pool.take(2))
    engine.pool.give_back(pages)
    row = Row([2] * 20, 60, cache=PagedCache(engine.pool, []))
    assert engine.make_room(row), "one page is free, and the cache can spare another"
    assert (len(row.cache.pages), len(engine.prefixes.pages)) == (2, 1), "no more than the tokens need today"
    other = Row([3] * 40, 60, cache=PagedCache(engine.pool, []))
    assert not engine.make_room(other), "three pages are wanted, and a row reads two of the three"
    assert other.cache.pages == []


def test_the_youngest_row_goes_first(model: Model) -> None:
    engine = Engine(model, set(), num_pages=2)
    old, young, newcomer = (engine.add([token] * 15, 6) for token in (1, 2, 3))
    while not engine.running or len(old.tokens) < 18:
        engine.step()
    assert engine.running == [old]
    assert list(engine.waiting) == [young, newcomer], "the one that came first waits at the head"
    assert young.tokens[:15] == [2] * 15, "what it has computed is forgotten, its tokens are not"


def test_only_rows_that_run_have_pages_and_enough_of_them(model: Model) -> None:
    engine = Engine(model, set(), num_pages=3)
    rows = [engine.add([token] * 15, 20) for token in (1, 2, 3)]
    while engine.waiting or engine.running:
        engine.grow()
        for row in engine.running:
            assert len(row.cache.pages) * 16 >= len(row.tokens), "a row that runs has a place for its newest token"
        used = {page for row in engine.running for page in row.cache.pages} | set(engine.prefixes.pages.values())
        assert set(engine.pool.free) == {0, 1, 2} - used, "a row that has left takes no more pages"
        engine.step()
    check_outputs(model, rows, [[token] * 15 for token in (1, 2, 3)], 20)


# -- the whole


@pytest.mark.parametrize("loop", [toy.generate_naively, toy.generate])
def test_it_runs_the_default_model(loop: Callable[[Model, list[int], int], list[int]]) -> None:
    model, tokenizer = toy.load_default()
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France? Answer briefly."}])
    assert tokenizer.decode(loop(model, prompt, 7)) == "The capital of France is Paris."

"""Draft models and EAGLE heads: exact, with pages of their own, and refused where they do not fit."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.config import EngineConfig
from minisgl.drafters.eagle import OF_DEFAULT_MODEL, EagleCheckpoint, EagleDrafter
from minisgl.drafters.model import ModelDrafter
from minisgl.drafters.protocol import DraftRow
from minisgl.drafters.sequences import DraftSequences
from minisgl.engine.cuda_graph import CpuGraph, CudaGraphRunner
from minisgl.engine.prefill_graph import PrefillGraphRunner
from minisgl.errors import ConfigError, ModelLoadError
from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams
from tests.drafting import draft_always, drafts_of
from tests.model_zoo import tiny_checkpoint
from tests.tiny_text_model import assert_idle_and_clean, directed_llm, text_checkpoint
from tools.drafter_head import Head, HeadConfig, save
from tools.drafter_prompts import held_out_prompts
from tools.train_drafter import Text, read

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=15, seed=1, n=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=18, seed=2, logprobs=0),
    SamplingParams(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.9, max_tokens=26, seed=4),
    SamplingParams(temperature=1.0, max_tokens=1, seed=5),
    SamplingParams(temperature=1.0, max_tokens=24, seed=8, regex=r"[a-f]{4,9}-[0-9]{3,9}"),
    SamplingParams(temperature=0.0, max_tokens=20, num_draft_tokens=1),
    SamplingParams(temperature=0.0, max_tokens=20, num_draft_tokens=0),
    SamplingParams(temperature=1.0, max_tokens=20, seed=10, logit_bias={9: 100.0, 8: 99.0}),  # repeats itself
]
PROMPTS = [[7, 8, 9] * 3 + [i] * (1 + i % 4) for i in range(len(PARAMS))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says what depends on more than its last token, with three layers' inputs to read."""
    return text_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=4, initializer_range=0.2)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("smaller"), num_hidden_layers=1, initializer_range=0.2)


def random_head(path: Path, directory: Path, draft_vocab: int = 120, seed: int = 0) -> tuple[Head, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(path)
    head = Head(model.config, HeadConfig(draft_vocab, 40))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
            parameter.copy_(parameter.to(torch.bfloat16))
    tokens = torch.randperm(model.config.vocab_size)[:draft_vocab].sort().values
    save(head, tokens, directory)
    return head, tokens


@pytest.fixture(scope="module")
def head(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("head")
    random_head(path, directory)
    return directory


@pytest.fixture(params=["itself", "smaller", "eagle"])
def drafter(request: pytest.FixtureRequest, path: Path, smaller: Path, head: Path) -> dict[str, str]:
    models = {"itself": ("model", path), "smaller": ("model", smaller), "eagle": ("eagle", head)}
    name, model = models[request.param]
    return {"drafter": name, "draft_model": str(model)}


def make(path: Path, **options: Any) -> LLM:
    sizes = {"page_size": 4, "num_pages": 64, "dtype": "float64", "device": "cpu", "max_running_requests": 4}
    llm = directed_llm(path, **{**sizes, **options})
    return llm if llm.scheduler.speculation is None else draft_always(llm)


def sequences_of(llm: LLM) -> DraftSequences:
    assert llm.scheduler.speculation is not None
    drafter = llm.scheduler.speculation._drafter
    assert isinstance(drafter, ModelDrafter | EagleDrafter)
    return drafter.sequences


def assert_all_free(llm: LLM) -> None:
    assert_idle_and_clean(llm)
    sequences = sequences_of(llm)
    sequences.pool.check()
    assert not sequences.sequences
    assert sequences.pool.num_free == sequences.pool.num_pages


def answers(outputs: list[RequestOutput]) -> list[Any]:
    completions = [completion for output in outputs for completion in output.completions]
    return [(c.token_ids, c.text, c.finish_reason, c.error) for c in completions]


@pytest.fixture(scope="module")
def plain(path: Path) -> list[RequestOutput]:
    return make(path).generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True, "num_draft_tokens": 7},
        {"num_pages": 16, "max_prefill_tokens": 8, "batch_policy": "mixed", "overlap": True},
        {"page_size": 1, "num_pages": 60, "prefix_cache": "block-hash"},
    ],
)
def test_every_way_to_sample_gives_the_same_tokens(
    path: Path, plain: list[RequestOutput], drafter: dict[str, str], options: dict[str, Any]
) -> None:
    llm = make(path, **drafter, **options)
    for _ in range(2):  # what the first time has left in the prefix cache serves the second
        outputs = llm.generate(PROMPTS, PARAMS)
        assert answers(outputs) == answers(plain)
        assert_all_free(llm)
    assert drafts_of(llm)[0] > 100
    assert sum(output.metrics.preemptions for output in outputs) > 0 or "max_prefill_tokens" not in options


def test_a_model_that_drafts_for_itself_is_always_right(path: Path) -> None:
    llm = make(path, drafter="model", draft_model=str(path), num_draft_tokens=3)
    llm.generate(PROMPTS[:4], GREEDY)
    drafted, accepted = drafts_of(llm)
    assert drafted == accepted > 50
    speculation = llm.scheduler.speculation
    assert speculation is not None
    assert accepted / speculation.stats.verifications > 2.7, "three a step, but for the last one"


def test_what_was_wrong_is_computed_again_and_what_was_right_is_not(path: Path, smaller: Path) -> None:
    """Between two calls one draft was right and the other wrong: the same guess as of a drafter that knows nothing."""
    llm = make(path, drafter="model", draft_model=str(smaller))
    drafter = llm.scheduler.speculation._drafter
    fed: list[int] = []
    launch = drafter.sequences.engine.launch
    drafter.sequences.engine.launch = lambda batch: (fed.append(batch.num_tokens), launch(batch))[1]

    def drafts(uid: int, tokens: list[int], count: int = 3) -> list[int]:
        fed.clear()
        guess = drafter.propose([DraftRow(uid, 0, np.array(tokens, dtype=np.int32), count)])[0].tolist()
        assert len(guess) == count
        return guess

    tokens = list(range(20, 31))
    first = drafts(1, tokens)
    assert fed == [11, 1, 1]
    assert drafts(1, [*tokens, *first, 5]) == drafts(2, [*tokens, *first, 5])
    drafts(1, [*tokens, *first, 5, 6])
    assert fed == [1, 1, 1]
    right_and_wrong = [*tokens, *first, 5, 6, 70, 71]
    assert drafts(1, right_and_wrong) == drafts(3, right_and_wrong)
    drafter.finish(1, 3, np.array(tokens, dtype=np.int32))
    assert drafts(1, tokens) == first


def test_drafts_of_a_head_are_those_of_its_training(path: Path, tmp_path: Path) -> None:
    """The engine's head, fed in pieces over pages, guesses what the trainer's does in one pass."""
    from transformers import AutoModelForCausalLM

    head, tokens = random_head(path, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path).double()
    llm = make(path, drafter="eagle", draft_model=str(tmp_path), num_draft_tokens=3, max_running_requests=2)
    speculation = llm.scheduler.speculation
    assert speculation is not None
    seen: list[tuple[list[int], list[int]]] = []
    propose = speculation._drafter.propose

    def watched(rows: list[DraftRow]) -> Any:
        guesses = propose(rows)
        seen.extend((row.tokens.tolist(), guess.tolist()) for row, guess in zip(rows, guesses, strict=True))
        return guesses

    speculation._drafter.propose = watched
    llm.generate(PROMPTS[:5], GREEDY)
    llm.generate(PROMPTS[:2], PARAMS[1:3])  # behind cached prefixes
    assert len(seen) > 60
    table = model.get_output_embeddings().weight[tokens]
    head = head.double()
    for known, guess in seen:
        batch = read(model, [Text([*known, 0, 0, 0], 1)])
        with torch.no_grad():
            logits = head.unroll(batch.aux[:, : len(known) - 1], batch.embeds[:, : len(known)], table, 1)
        assert tokens[logits[0][0, -1].argmax()] == guess[0]
        extended = [*known, *guess]
        batch = read(model, [Text([*extended, 0], 1)])
        with torch.no_grad():
            logits = head.unroll(batch.aux[:, : len(known) - 1], batch.embeds, table, len(guess))
        assert [int(tokens[each[0, -1].argmax()]) for each in logits] == guess


def test_few_pages_and_slots_are_shared(path: Path, smaller: Path, plain: list[RequestOutput]) -> None:
    """Whoever was asked about longest ago gives way, and rows that do not fit have no drafts."""
    llm = make(path, drafter="model", draft_model=str(smaller), max_running_requests=3)
    sequences = sequences_of(llm)
    sequences.pool.alloc(sequences.pool.num_free - 14)
    assert answers(llm.generate(PROMPTS, PARAMS)) == answers(plain)
    assert sequences.pool.num_free == 14
    assert not sequences.sequences

    def drafts(*uids: int) -> list[int]:
        rows = [DraftRow(uid, 0, np.arange(12, dtype=np.int32), 4) for uid in uids]  # 4 pages each
        return [len(guess) for guess in sequences.draft(rows)]

    assert drafts(1, 2, 3) == [4, 4, 4]
    assert drafts(2, 4) == [4, 4]
    assert set(sequences.sequences) == {3, 2, 4}, "1 gave way"
    assert drafts(5, 6, 7, 8) == [4, 4, 4, 0]
    sequences.draft([DraftRow(9, 0, np.arange(53, dtype=np.int32), 4)])
    assert not sequences.sequences, "more than there are pages"


def test_a_long_prompt_is_read_in_several_calls(path: Path, smaller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.drafters.model._TOKENS_ON_CPU", 5)
    llm = make(path, drafter="model", draft_model=str(smaller))
    tokens = np.arange(30, 43, dtype=np.int32)
    rows = [DraftRow(1, 0, tokens, 2), DraftRow(2, 0, tokens[:3], 2)]
    lengths = [[len(guess) for guess in sequences_of(llm).draft(rows)] for _ in range(4)]
    assert lengths == [[0, 0], [0, 0], [2, 0], [2, 2]]


def test_an_abort_between_steps_spares_the_others(path: Path, plain: list[RequestOutput], head: Path) -> None:
    for overlap, steps in itertools.product((False, True), range(1, 6)):
        llm = make(path, drafter="eagle", draft_model=str(head), overlap=overlap)
        first, other = [llm.prepare(PROMPTS[i], PARAMS[i])[0] for i in (0, 3)]
        llm.submit(first)
        llm.submit(other)
        for _ in range(steps):
            llm.step()
        llm.abort(first)
        while llm.scheduler.has_work:
            llm.step()
        assert other.completion().token_ids == plain[3].token_ids
        assert_all_free(llm)


def test_an_engine_without_eagle_keeps_no_hidden_states(path: Path, smaller: Path) -> None:
    llm = make(path, drafter="model", draft_model=str(smaller))
    assert llm.engine.hidden_states is None
    assert not any(layer._forward_pre_hooks for layer in llm.engine.model.model.layers)


# -- what is refused ---------------------------------------------------------------------------------------------------


def edited(head: Path, directory: Path, edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> str:
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    edit(config, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda c, t: c.update(vocab_size=301), ConfigError, "'eagle' has a vocabulary of 301 and the model has one"),
        (lambda c, t: c.update(hidden_size=64), ConfigError, "'eagle' has a hidden size of 64 and the model has one"),
        (lambda c, t: c.update(architectures=["Qwen2ForCausalLM"]), ConfigError, "needs LlamaForCausalLMEagle3"),
        (
            lambda c, t: c.update(architectures=["LlamaForCausalLM"], draft_vocab_size=None),
            ConfigError,
            "needs LlamaForCausalLMEagle3, or LlamaForCausalLM with draft_vocab_size",
        ),
        (lambda c, t: c.update(num_hidden_layers=2), ConfigError, "has 2 layers, and only one"),
        (lambda c, t: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), ConfigError, "2, 3, 10"),
        (lambda c, t: t.pop("fc.weight"), ModelLoadError, "missing: fc.weight"),
        (lambda c, t: t.update(norm=torch.ones(32)), ModelLoadError, "unexpected: norm "),
        (lambda c, t: c.update(intermediate_size=48), ModelLoadError, "wrong shape: midlayer.mlp"),
        (lambda c, t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), ModelLoadError, "unsupported dtype"),
        (lambda c, t: t.pop("d2t"), ModelLoadError, "'d2t' must say"),
        (lambda c, t: t.update(d2t=t["d2t"] + 250), ModelLoadError, "not in the vocabulary of 300"),
        (lambda c, t: c.pop("architectures"), ModelLoadError, "not the config of an EAGLE-3 head"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    path: Path, head: Path, tmp_path: Path, edit: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(path, drafter="eagle", draft_model=edited(head, tmp_path, edit))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"])
def test_a_head_with_an_embedding_and_an_lm_head_of_its_own(
    path: Path, head: Path, tmp_path: Path, architecture: str
) -> None:
    """As published ones have them: the embedding is the model's, and the LM head is used."""

    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["architectures"] = [architecture]
        tensors["embed_tokens.weight"] = torch.zeros(300, 32)
        tensors["lm_head.weight"] = torch.zeros(120, 32)
        tensors["d2t"][0] = 0

    llm = make(path, drafter="eagle", draft_model=edited(head, tmp_path, edit))
    llm.generate(PROMPTS[0], GREEDY)
    assert drafts_of(llm)[0] > 0
    rows = sequences_of(llm).draft([DraftRow(9, 0, np.arange(5, dtype=np.int32), 3)])
    assert rows[0].tolist() == [0, 0, 0], "all of the head's logits are zero, and its first token is 0"


def test_the_error_about_a_head_in_another_format_converts_it(
    path: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copyfile(head / "config.json", tmp_path / "config.json")
    torch.save(load_file(head / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="no weights in safetensors, which are needed; convert") as raised:
        make(path, drafter="eagle", draft_model=str(tmp_path))
    (code,) = re.findall(r'python -c "(.*)"', str(raised.value))
    monkeypatch.chdir(tmp_path)
    exec(code)
    llm = make(path, drafter="eagle", draft_model=str(tmp_path))
    llm.generate(PROMPTS[0], GREEDY)
    assert drafts_of(llm)[0] > 0


def test_a_draft_model_that_does_not_fit_is_refused(path: Path, smaller: Path, tmp_path: Path) -> None:
    other, _ = tiny_checkpoint(tmp_path / "other", "LlamaForCausalLM", vocab_size=299)
    with pytest.raises(ConfigError, match="'model' has a vocabulary of 299 and the model has one of 300"):
        make(path, drafter="model", draft_model=str(other))
    with pytest.raises(ConfigError, match=r"^draft_model: drafter='model' needs a model to draft with"):
        make(path, drafter="model")
    with pytest.raises(ConfigError, match=r"^draft_model: drafter='eagle' needs a head"):
        make(path, drafter="eagle")
    with pytest.raises(ConfigError, match=r"^draft_model: must be a model's name or None"):
        make(path, drafter="model", draft_model=3)
    broken = tmp_path / "broken"
    shutil.copytree(smaller, broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match="truncated or corrupt"):
        make(path, drafter="model", draft_model=str(broken))


def test_a_draft_model_with_fewer_positions_stops_drafting_there(path: Path, tmp_path: Path) -> None:
    short = text_checkpoint(tmp_path, num_hidden_layers=1, max_position_embeddings=20)
    llm = make(path, drafter="model", draft_model=str(short))
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == make(path).generate(PROMPTS[0], GREEDY)[0].token_ids
    rows = [DraftRow(1, 0, np.arange(length, dtype=np.int32), 4) for length in (10, 18, 20, 21)]
    drafter = llm.scheduler.speculation._drafter
    assert [len(drafter.propose([row])[0]) for row in rows] == [4, 2, 0, 0]


def test_a_head_in_graphs_guesses_what_it_guesses_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded steps hand on the hidden states of their real rows, and touch no others."""
    replayed: list[CpuGraph] = []
    replay = CpuGraph.replay
    monkeypatch.setattr(CpuGraph, "replay", lambda graph: (replayed.append(graph), replay(graph)))
    path = text_checkpoint(tmp_path / "target", num_hidden_layers=4, initializer_range=0.2, head_dim=32)
    random_head(path, tmp_path / "head")
    options = {"drafter": "eagle", "draft_model": str(tmp_path / "head"), "dtype": "float32", "page_size": 4}
    attention = {"prefill_attention": "cascade", "decode_attention": "cascade"}  # they have steps with padding
    guesses: list[list[list[list[int]]]] = []
    for in_graphs in (False, True):
        llm = make(path, **options, **attention)
        sequences = sequences_of(llm)
        if in_graphs:
            runner = PrefillGraphRunner(sequences.engine.runner, (16,), CpuGraph)
            sequences.engine.runner = CudaGraphRunner(runner, (2, 4), CpuGraph)
            head: Any = sequences.engine.model
            head.states.fill_(torch.nan)
        llm.engine.hidden_states.values.normal_(generator=torch.Generator().manual_seed(0))
        rows = [DraftRow(uid, 0, np.arange(uid, 2 * uid + 4, dtype=np.int32), 2 + uid % 2) for uid in (1, 2, 3)]
        first = [guess.tolist() for guess in llm.scheduler.speculation._drafter.propose(rows)]
        rows = [replace(row, tokens=np.append(row.tokens, np.int32(9))) for row in rows]
        guesses.append([first, [guess.tolist() for guess in llm.scheduler.speculation._drafter.propose(rows)]])
    assert len(replayed) == 6, "all three steps of both calls"
    assert guesses[0] == guesses[1]
    assert len({tuple(guess) for guess in guesses[0][0]}) > 1


def test_the_default_models_head(default_model_dir: Path) -> None:
    """It is found without a name, and guesses well; or the error says how to train it."""
    if not OF_DEFAULT_MODEL.is_dir():
        with pytest.raises(ConfigError, match="train the head with 'make drafter'"):
            EagleCheckpoint(EngineConfig(drafter="eagle"))
        return
    llm = draft_always(LLM(drafter="eagle", device="cpu", max_running_requests=2, max_seq_len=512))
    prompts = [[{"role": "user", "content": prompt}] for prompt in held_out_prompts(2)]
    llm.chat(prompts, SamplingParams(temperature=0.0, max_tokens=60))
    speculation = llm.scheduler.speculation
    assert speculation is not None
    assert speculation.stats.accepted > 0.5 * speculation.stats.verifications

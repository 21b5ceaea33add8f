"""A model in a directory is asked as the evaluator's server would ask it, many games in one batch."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from core.models.tool_parsers import ParserName
from tests.trainer import odd_models, tiny
from trainer.environments import prompts
from trainer.environments.models import AnswerTimeout, ContextOverflow, LocalModel, _PendingAnswer
from trainer.environments.play import main
from trainer.environments.tool_calls import flat_tools, template_tools
from trainer.errors import BadModel

torch = pytest.importorskip("torch")
pytest.importorskip("pyspiel")

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = prompts.tools([1, 2])


def folder(path: Path, template: str = TEMPLATE, window: int = 8192) -> Path:
    tiny.save(path, "qwen", window=window)
    (path / "chat_template.jinja").write_text(template)
    return path


def talk(words: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "hello"}, {"role": "user", "content": words}]


def test_tools_are_rendered_as_the_server_shows_them(tmp_path: Path) -> None:
    model = LocalModel(folder(tmp_path))
    lines = model.prompt(talk("x"), TOOLS).splitlines()
    assert [json.dumps(tool) for tool in template_tools(TOOLS)] == lines[:5]


def test_a_template_that_wants_bare_functions_gets_them(tmp_path: Path) -> None:
    strict = (
        "{% for tool in tools %}{% if tool.function %}{{ raise_exception('bare') }}{% endif %}{% endfor %}"
    )
    model = LocalModel(folder(tmp_path, strict + TEMPLATE))
    assert json.loads(model.prompt(talk("x"), TOOLS).splitlines()[0]) == flat_tools(TOOLS)[0]


def test_a_template_without_tool_support_is_refused(tmp_path: Path) -> None:
    model = LocalModel(folder(tmp_path, "{{ raise_exception('no tools here') }}"))
    with pytest.raises(BadModel, match="no tools here"):
        model.answer(talk("x"), TOOLS, max_tokens=4, seed=1)


def test_answers_in_a_batch_are_those_of_each_alone(tmp_path: Path) -> None:
    model = LocalModel(folder(tmp_path))
    questions = [talk(words) for words in ("fox", "the quick brown fox jumps", "red pears " * 9)]

    def ask(messages: list[dict[str, Any]]) -> str | None:
        return model.answer(messages, [], max_tokens=12, seed=1).text

    alone = [ask(one) for one in questions]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, questions)) == alone
    assert len(set(alone)) > 1


def test_a_context_that_is_too_short_forfeits(tmp_path: Path) -> None:
    model = LocalModel(folder(tmp_path, window=256))
    with pytest.raises(ContextOverflow, match="the context has 256"):
        model.answer(talk("x"), TOOLS, max_tokens=512, seed=1)


def test_an_unknown_family_needs_a_parser(tmp_path: Path) -> None:
    path = folder(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    with pytest.raises(BadModel):
        LocalModel(path)
    (path / "config.json").write_text(json.dumps(config))
    assert LocalModel(path, parser=ParserName.HERMES)


def test_an_adapter_is_played_on_its_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = folder(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(tiny.load(base), settings).save_pretrained(tmp_path / "adapter")
    # What the adapter brings is not what the server takes.
    (tmp_path / "adapter/chat_template.jinja").write_text("{{ raise_exception('not this one') }}")
    (tmp_path / "adapter/tokenizer_config.json").write_text("{}")
    model = LocalModel(tmp_path / "adapter", base=base)
    plain = LocalModel(base)
    asked = talk("the quick brown fox")
    assert model.answer(asked, [], max_tokens=6, seed=1) == plain.answer(asked, [], max_tokens=6, seed=1)


def test_a_model_that_cannot_play_forfeits_and_the_match_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "silly", window=256)
    options = ["--game", "leduc_poker", "--against", "random", "--at-once", "1", "--json"]
    assert main([str(path), *options]) == 0
    (match,) = json.loads(capsys.readouterr().out)["matches"]
    assert match["forfeits"] == [{"context": 10}, {}]
    assert match["ended"] == "silly forfeited 10 games"


def test_a_full_model_without_a_tokenizer_has_its_bases(tmp_path: Path) -> None:
    base, tuned = folder(tmp_path / "base"), folder(tmp_path / "tuned")
    for path in [*tuned.glob("token*"), *tuned.glob("*.jinja")]:
        path.unlink()
    assert LocalModel(tuned, base=base).answer(talk("fox"), [], max_tokens=2, seed=1)


def test_weights_that_are_cut_off_are_no_model(tmp_path: Path) -> None:
    weights = folder(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BadModel, match="cannot be loaded"):
        LocalModel(tmp_path)


def test_an_answer_that_takes_too_long_takes_none_of_its_batch_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LocalModel(folder(tmp_path), turn_seconds=0.1)
    end, word = model._tokenizer.eos_token_id, model._tokenizer.encode("fox")[0]

    def generate(input_ids: Any, **options: Any) -> Any:
        time.sleep(0.1)
        # As after `max_time`: the first has ended, the others have not.
        more = [[word, end]] + [[word, word]] * (len(input_ids) - 1)
        return torch.cat([input_ids, torch.tensor(more)], 1)

    model._model.generate = generate
    asked = [_PendingAnswer(model.prompt(talk(words), []), 9, Future()) for words in ("a", "b")]
    assert model._generate(asked) == [("fox", False), None]
    # The one that is late is a forfeit for who waits.
    monkeypatch.setattr(model, "_generate", lambda batch: [None] * len(batch))
    with pytest.raises(AnswerTimeout, match=r"within 0.1 s"):
        model.answer(talk("a"), [], max_tokens=9, seed=1)


#: 10^15 rounds; transformers' sandbox allows ranges up to 100,000.
ENDLESS = 3 * "{% for one in range(99999) %}" + 3 * "{% endfor %}"


def test_a_template_that_never_ends_forfeits_its_turns_and_the_next_question_is_answered(
    tmp_path: Path,
) -> None:
    template = "{% if messages[1].content == 'endless' %}" + ENDLESS + "{% endif %}" + TEMPLATE
    model = LocalModel(folder(tmp_path, template), turn_seconds=2.0)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(model.answer, talk("endless"), [], max_tokens=4, seed=1) for _ in range(4)]
        for question in asked:
            with pytest.raises(AnswerTimeout):
                question.result()
    model._turn_seconds = 120.0
    assert model.answer(talk("fox"), [], max_tokens=4, seed=1).text


def test_a_match_with_a_template_that_never_ends_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tester ended it after 90 s."""
    endless = folder(tmp_path / "endless", ENDLESS + TEMPLATE)
    limits = ["--turn-seconds", "0.5", "--seconds", "5"]
    assert main([str(endless), "--against", "random", "--game", "othello", *limits, "--json"]) == 0
    [match] = json.loads(capsys.readouterr().out)["matches"]
    assert match["forfeits"][0]["timeout"] >= 2
    assert match["wins"] == 0


def test_a_tokenizer_that_panics_is_a_bad_model(tmp_path: Path) -> None:
    # Not Qwen: transformers splits its words by a pattern of its own.
    path = tiny.save(tmp_path, "llama", window=8192)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    odd_models.with_endless_pattern(path)
    model = LocalModel(path, parser=ParserName.HERMES)
    with pytest.raises(BadModel, match="PanicException"):
        model.answer(talk("a" * 80), [], max_tokens=4, seed=1)

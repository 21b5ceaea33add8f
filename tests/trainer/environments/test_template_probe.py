"""What a template does with calls, and the form that is taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("axolotl")

from tests.trainer.environments import models
from trainer.environments.memory import Memory
from trainer.environments.prompts import memory_tools, tools
from trainer.environments.rows import CallForm
from trainer.environments.template_probe import fitting_encoder
from trainer.environments.tool_calls import ToolCall, assistant_message, game_action, template_tools
from trainer.errors import BadModel

NOTE = ToolCall("working_memory_append", {"slot": 1, "content": 'Bid "2-5" –\nthen 3-5.'})
#: Of a template by hand: how it writes a message, and what it does with calls.
TURN = "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
CALL = "{{ '<tool_call>\n' }}{{ c.function | tojson }}{{ '\n</tool_call>' }}"
CALLS = f"{{% for c in m.tool_calls %}}{CALL}{{% endfor %}}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TOOLS = "{{ tools | tojson if tools else '' }}"


def by_hand(calls: str = "", shown: str = TOOLS) -> str:
    return f"{shown}{{% for m in messages %}}{TURN}{calls}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}{ASKS}"


def rows() -> list[dict[str, Any]]:
    """A move, a note with a move, a reflection, and an answer without any call."""
    asked = [{"role": "system", "content": Memory().block()}, {"role": "user", "content": "Legal: 3 -> Bid"}]

    def row(environment: str, offered: Any, answer: dict[str, Any]) -> dict[str, Any]:
        return {"environment": environment, "messages": [*asked, answer], "tools": offered}

    turn, after = template_tools(tools([3, 7])), template_tools(memory_tools())
    return [
        row("liars_dice", turn, assistant_message([game_action(3)], "")),
        row("liars_dice", turn, assistant_message([NOTE, game_action(7)], "")),
        row("leduc_poker", after, assistant_message([NOTE], "")),
        row("swe_infinite", None, assistant_message([], "THOUGHT: look\n```bash\nls\n```")),
    ]


@pytest.mark.parametrize(
    ("template", "family", "form", "said"),
    [
        ("qwen_25", "qwen2", CallForm.NATIVE, ""),
        ("qwen3", "qwen3", CallForm.NATIVE, ""),
        ("llama3_2_vision", "llama", CallForm.ONE_CALL, "single tool-calls"),
        # Those that lose calls, or write them as nobody reads them.
        ("llama3", "llama", CallForm.WRITTEN, "does not show tools"),
        ("chatml", "qwen2", CallForm.WRITTEN, "does not show tools"),
        ("falcon_h1", "qwen2", CallForm.WRITTEN, "0 are read"),
        (by_hand(), "qwen2", CallForm.WRITTEN, "0 are read"),
        (by_hand(CALLS), "qwen2", CallForm.NATIVE, ""),
        # Dies where a message has calls, or an empty list of them, which no row has.
        (
            by_hand("{{ raise_exception('no calls here') if m.tool_calls }}"),
            "qwen2",
            CallForm.WRITTEN,
            "no calls",
        ),
        (
            by_hand(CALLS + "{{ raise_exception('empty') if m.tool_calls == [] }}"),
            "qwen2",
            CallForm.NATIVE,
            "",
        ),
    ],
)
def test_the_first_form_that_loses_nothing_is_taken(
    tmp_path: Path, template: str, family: str, form: CallForm, said: str
) -> None:
    words = models.tokenizer()
    words.chat_template = template if "{" in template else models.template(template)
    encoder, notes, _ = fitting_encoder(words, rows(), str(models.config_only(tmp_path, family)))
    assert encoder.form is form
    assert said in " ".join(notes)
    assert bool(notes) is bool(said)
    assert all(encoded is not None for encoded in encoder.encode(rows()))


def test_a_template_that_wants_functions_gets_them_as_the_server_tries_next(tmp_path: Path) -> None:
    words = models.tokenizer()
    shown = "{% for t in tools or [] %}{{ t.name + ': ' }}{{ t | tojson }}{% endfor %}"
    words.chat_template = by_hand(CALLS, shown)
    encoder, notes, _ = fitting_encoder(words, rows(), str(models.config_only(tmp_path, "qwen2")))
    assert (encoder.flat, encoder.form, notes) == (True, CallForm.NATIVE, ())


def test_a_family_without_a_parser_is_said_aloud(tmp_path: Path) -> None:
    _, notes, _ = fitting_encoder(models.tokenizer(), rows(), str(models.config_only(tmp_path, "olmo3")))
    assert "no parser" in notes[0]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "no chat template"),
        (by_hand().replace("(m.content or '')", "''"), "a text of system is lost"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% for m in messages %}", "cannot carry"),
    ],
)
def test_a_template_that_carries_no_row_ends_the_run(tmp_path: Path, template: str | None, why: str) -> None:
    words = models.tokenizer()
    words.chat_template = template
    with pytest.raises(BadModel, match=why):
        fitting_encoder(words, rows(), str(models.config_only(tmp_path, "qwen2")))


def test_rows_of_an_environment_that_the_template_does_not_carry_are_left_out(tmp_path: Path) -> None:
    words = models.tokenizer()
    words.chat_template = by_hand(
        CALLS + "{{ raise_exception('no thoughts') if 'THOUGHT' in (m.content or '') }}"
    )
    encoder, notes, left_out = fitting_encoder(words, rows(), str(models.config_only(tmp_path, "qwen2")))
    assert left_out == {"swe_infinite"}
    assert encoder.form is CallForm.NATIVE
    assert "left out, for the template does not carry it: swe_infinite: no thoughts" in notes[-1]


def test_a_turn_may_end_with_another_token_than_the_tokenizer_s(tmp_path: Path) -> None:
    """Then every turn ends as the next request shows it, and only the last with both."""
    words = models.tokenizer()
    words.chat_template, words.eos_token = by_hand(CALLS), "</s>"
    answers = [assistant_message([], text) for text in ("first", "second")]
    talk = [{"role": "user", "content": "a"}, answers[0], {"role": "user", "content": "b"}, answers[1]]
    several = {"environment": "swe_infinite", "messages": talk, "tools": None}
    encoder, _, left_out = fitting_encoder(
        words, [*rows(), several], str(models.config_only(tmp_path, "qwen2"))
    )
    assert not left_out
    turns = encoder.turns(several)
    assert [learned for _, learned in turns] == ["first<|im_end|>", "second<|im_end|></s>"]
    whole = encoder.render(talk, None, asks=False)
    assert "".join(text for turn in turns for text in turn).removesuffix("</s>") == whole.rstrip()

"""Notes are kept in slots, cut and cleared."""

from __future__ import annotations

from core.domain.tournament_rules import MATCH
from tests.doubles.each import each
from trainer.environments.memory import Area, Memory, cut_tokens

LONG = " ".join(str(number) for number in range(200))


def test_too_long_a_text_loses_its_end_and_too_long_an_addition_its_start() -> None:
    memory = Memory()
    memory.rewrite(Area.WORKING, 1, LONG)
    assert memory.slots[Area.WORKING][0].split() == [str(number) for number in range(MATCH.slot_tokens)]
    memory.append(Area.WORKING, 1, "last")
    assert memory.slots[Area.WORKING][0].split() == [*map(str, range(1, MATCH.slot_tokens)), "last"]


def test_an_addition_is_a_line_of_its_own() -> None:
    memory = Memory()
    memory.append(Area.LONG_TERM, 8, "one")
    memory.append(Area.LONG_TERM, 8, "two")
    assert memory.slots[Area.LONG_TERM][7] == "one\ntwo"
    assert memory.block().endswith("  [7] (empty)\n  [8] one\ntwo")


def test_a_new_game_keeps_what_belongs_to_the_match() -> None:
    memory = Memory()
    memory.rewrite(Area.WORKING, 4, "this game")
    memory.rewrite(Area.LONG_TERM, 1, "this opponent")
    memory.new_game()
    assert not any(memory.slots[Area.WORKING])
    assert memory.slots[Area.LONG_TERM][0] == "this opponent"


@each(
    "tool, arguments, done",
    [
        ("working_memory_rewrite", {"slot": 4, "content": "x"}, True),
        ("working_memory_rewrite", {"slot": "2", "content": 5}, True),
        ("working_memory_rewrite", {"slot": 1}, True),
        ("working_memory_rewrite", {"slot": 5, "content": "x"}, False),
        ("working_memory_append", {"slot": 0, "content": "x"}, False),
        ("long_term_memory_append", {"slot": 8, "content": "x"}, True),
        ("long_term_memory_append", {"slot": True, "content": "x"}, False),
        ("long_term_memory_append", {"content": "x"}, False),
        ("long_term_memory_clear", {"slot": 1}, False),
    ],
)
def test_a_call_that_cannot_be_done_changes_nothing(
    tool: str, arguments: dict[str, object], done: bool
) -> None:
    memory = Memory()
    before = memory.block()
    assert memory.apply(tool, arguments) is done
    assert (memory.block() == before) is (not done or arguments.get("content") is None)


class Letters:
    def encode(self, text: str, add_special_tokens: bool) -> list[str]:
        assert not add_special_tokens
        return list(text)

    def decode(self, ids: list[str], skip_special_tokens: bool) -> str:
        return "".join(ids)


def test_the_models_own_tokens_are_counted() -> None:
    cut = cut_tokens(Letters())
    assert cut("abc", 2, True) == "ab"
    assert cut("abc", 2, False) == "bc"
    assert cut("abc", 3, False) == "abc"

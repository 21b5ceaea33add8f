"""Rewards of shell tasks, worked out by hand after the evaluator's formula."""

from __future__ import annotations

import pytest

from trainer.environments.intercode.machine import PathState, State, changed_paths, likeness, shell_reward

FOLDER: PathState = ("<DIR>", 0o40755)
BEFORE: State = {"/t/a": ("aa", 1), "/t/b": ("bb", 2), "/t/d": FOLDER}


def after(**changes: PathState | None) -> State:
    state = {**BEFORE, **{f"/t/{name}": value for name, value in changes.items()}}
    return {path: value for path, value in state.items() if value is not None}


NEW: PathState = ("cc", 3)


@pytest.mark.parametrize(
    ("agent", "gold", "outputs", "parts"),
    [
        pytest.param(
            after(), after(), ("two words", "two words"), (0.33, 0.33, 0.33), id="as the gold command"
        ),
        # erf(1) = 0.8427: 0.33 * 0.1573 = 0.0519
        pytest.param(after(), after(c=NEW), ("", ""), (0.05, 0.33, 0.33), id="a file is missed"),
        pytest.param(after(c=NEW), after(), ("", ""), (0.05, 0.33, 0.33), id="a file too many"),
        # erf(2) = 0.9953: 0.33 * 0.0047 = 0.0015
        pytest.param(
            after(a=None), after(c=NEW), ("", ""), (0.0, 0.33, 0.33), id="one missed and one too many"
        ),
        pytest.param(after(c=NEW), after(c=NEW), ("", ""), (0.33, 0.33, 0.33), id="the same new file"),
        pytest.param(after(c=NEW), after(c=("dd", 3)), ("", ""), (0.33, 0.0, 0.33), id="another content"),
        # 0.165, which as a float is a little more.
        pytest.param(
            after(c=NEW, a=None),
            after(c=("dd", 3), a=None),
            ("", ""),
            (0.33, 0.17, 0.33),
            id="half of the contents",
        ),
        pytest.param(
            after(d=("<DIR>", 0o40700)), after(), ("", ""), (0.05, 0.33, 0.33), id="a folder's mode"
        ),
        pytest.param(
            after(), after(), ("some words", ""), (0.33, 0.33, 0.0), id="output where there is none"
        ),
        # One-letter words do not count: nothing is left, and the texts differ.
        pytest.param(after(), after(), ("1", "2"), (0.33, 0.33, 0.0), id="one digit, another"),
        pytest.param(after(), after(), ("7\n", "7\n"), (0.33, 0.33, 0.33), id="one digit, the same"),
        # Of two words one is common. The other has weight ln(3/2) + 1 = 1.4055: 1 / (1 + 1.9754) = 0.3361.
        pytest.param(after(), after(), ("aa bb", "aa cc"), (0.33, 0.33, 0.11), id="half of the words"),
        pytest.param(
            after(), after(), ("bb AA", "aa  bb\n"), (0.33, 0.33, 0.33), id="order and case do not count"
        ),
    ],
)
def test_each_part_counts_as_in_the_evaluation(
    agent: State, gold: State, outputs: tuple[str, str], parts: tuple[float, float, float]
) -> None:
    reward = shell_reward(BEFORE, agent, gold, *outputs)
    assert tuple(reward) == pytest.approx(parts)
    assert reward.total == pytest.approx(0.01 + sum(parts))


def test_what_is_new_gone_or_different_has_changed() -> None:
    assert changed_paths(BEFORE, after(a=None, b=("xx", 2), e=NEW)) == {"/t/a", "/t/b", "/t/e"}


def test_texts_are_as_alike_as_scikit_learn_finds() -> None:
    text = pytest.importorskip("sklearn.feature_extraction.text")
    pairs = [
        ("a list of words words", "words of a kind"),
        ("x1 x2 x2 x3\n", "X2 x3 x4"),
        ("Größe und", "größe"),
    ]
    for one, other in pairs:
        weights = text.TfidfVectorizer().fit_transform([one, other])
        assert likeness(one, other) == pytest.approx(float((weights * weights.T).toarray()[0][1]))

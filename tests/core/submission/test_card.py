from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.submission.card import card, fault_of, licence_of
from core.submission.selection import SubmissionKind
from tests.doubles.each import each


def front(content: bytes) -> dict[str, object]:
    found = yaml.safe_load(content.decode().split("---\n")[1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("kind", SubmissionKind)
def test_our_card_names_the_real_base_and_has_no_fault(kind: SubmissionKind) -> None:
    made = card(kind, "owner/Model-1.5B", {"license": "apache-2.0"})
    assert front(made)["base_model"] == "owner/Model-1.5B"
    assert front(made)["license"] == "apache-2.0"
    assert fault_of(made, "owner/Model-1.5B") is None


def test_a_name_that_the_hub_could_not_have_stays_out_of_the_front_matter() -> None:
    made = card(SubmissionKind.FULL, "/cache/models/x")
    assert "base_model" not in front(made)


@each(
    ("text", "told"),
    [
        ("---\nbase_model: /cache/models/x\n---\n", "the hub's name of the base model"),
        ("---\nbase_model: other/model\n---\n", "must be a/b"),
        ("---\nbase_model: [a/b, ./x]\n---\n", "the hub's name"),
        ("---\nlicense: apache-2.0\n---\n", "must be a/b"),
        ("---\nbase_model: a/b\nlicense: [mit]\n---\n", "one of the hub's short names"),
        ("---\nbase_model: a: b\n---\n", "is no YAML"),
        ("---\n- a\n---\n", "keys and values"),
        ("---\na: &a [x]\nb: *a\n---\n", "aliases"),
        ("---\n" + "x: 1\n" * 10_000 + "---\n", "longer than"),
        ("---\n" + "[" * 5000 + "\n---\n", "is no YAML"),
        *(
            (f"---\na: {odd}\n---\n", "do not fit")
            for odd in ("!!timestamp x", "!!bool x", "!!int ''", "!!float ''")
        ),
        ("---\na: !!python/object/apply:os.system [id]\n---\n", "is no YAML"),
    ],
)
def test_a_card_that_the_hub_would_refuse_is_told(text: str, told: str) -> None:
    found = fault_of(text.encode(), "a/b")
    assert found is not None
    assert told in str(found)


def test_a_good_card_is_good_with_windows_line_ends_and_without_a_known_base_too() -> None:
    assert fault_of(b"---\r\nbase_model: a/b\r\nlicense: mit\r\n---\r\nText\r\n", "a/b") is None
    assert fault_of(b"# Just a title\n", None) is None


@given(st.text() | st.text().map(lambda text: f"---\n{text}\n---\n"))
def test_any_text_is_judged_and_never_breaks_the_judge(text: str) -> None:
    found = fault_of(text.encode("utf-8", "surrogatepass"), "a/b")
    assert found is None or str(found).isprintable()


def test_the_bases_licence_is_passed_on_as_far_as_it_is_one(tmp_path: Path) -> None:
    def licence(text: str) -> dict[str, str]:
        (tmp_path / "README.md").write_text(f"---\n{text}\n---\n")
        return licence_of(tmp_path)

    assert licence("license: other\nlicense_name: x-1\nlicense_link: https://example.org/l") == {
        "license": "other",
        "license_name": "x-1",
        "license_link": "https://example.org/l",
    }
    assert licence("license: llama3.1\nlicense_link: LICENSE") == {"license": "llama3.1"}
    assert licence("license: [a, b]") == {}
    assert licence("license: 'x\\ny: z'") == {}
    assert licence("license: mit\na: !!bool perhaps") == {}
    (tmp_path / "README.md").unlink()
    assert licence_of(tmp_path) == {}

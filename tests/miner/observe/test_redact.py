"""Secrets are found in every spelling that a text can hold them in."""

import base64
import json
from urllib.parse import quote, quote_plus

from hypothesis import given
from hypothesis import strategies as st

from miner.observe.redact import _PATTERN_MARKS, _SECRET_PATTERNS, HIDDEN, Redactor
from tests.doubles.each import each

SECRETS = [
    "plainsecret",
    "with space/and+slash",
    'quote"back\\slash',
    "naïve-ünïcode-☃",
    "line\nbreak\ttab",
    "a'b\"c",
]


def spellings(secret: str) -> dict[str, str]:
    return {
        "plain": secret,
        "repr": repr({"password": secret}),
        "bytes repr": repr(secret.encode()),
        "json": json.dumps({"password": secret}),
        "json with letters": json.dumps({"password": secret}, ensure_ascii=False),
        "url": f"https://host/?token={quote(secret)}",
        "url, all quoted": f"https://host/?token={quote(secret, safe='')}",
        "url, lower case": f"https://host/?token={quote(secret, safe='')}".lower()
        if secret.islower()
        else quote(secret),
        "form": f"password={quote_plus(secret)}",
        "base64": base64.b64encode(secret.encode()).decode(),
        "base64 for URLs": base64.urlsafe_b64encode(secret.encode()).decode(),
        "basic auth": base64.b64encode(f"user:{secret}".encode()).decode(),
        "basic auth, longer user": base64.b64encode(f"someuser:{secret}".encode()).decode(),
        "basic auth, then more": base64.b64encode(f"us:{secret}:more".encode()).decode(),
    }


@each("secret", SECRETS)
@each("spelling", list(spellings("x")))
def test_a_secret_is_hidden_in_every_spelling(secret: str, spelling: str) -> None:
    text = f"before {spellings(secret)[spelling]} after"
    hidden = Redactor([secret])(text)
    assert HIDDEN in hidden
    assert hidden.startswith("before ")
    assert hidden.endswith(" after")
    for found in (
        secret,
        repr(secret)[1:-1],
        json.dumps(secret)[1:-1],
        quote(secret, safe=""),
        quote_plus(secret),
    ):
        assert found not in hidden


@given(
    secret=st.text(st.characters(codec="utf-8", exclude_characters="*"), min_size=4, max_size=60),
    before=st.text(max_size=30),
    after=st.text(max_size=30),
)
def test_whatever_stands_around_a_secret_it_does_not_come_through(
    secret: str, before: str, after: str
) -> None:
    assert secret not in Redactor([secret])(before + secret + after).replace(HIDDEN, "\0")


@given(
    user=st.text(alphabet="abcdefgh", min_size=0, max_size=9),
    secret=st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789", min_size=16, max_size=40),
)
def test_base64_of_a_longer_text_gives_no_more_than_three_letters_of_the_secret(
    user: str, secret: str
) -> None:
    line = base64.b64encode(f"{user}:{secret}".encode()).decode()
    left = Redactor([secret])(line).split(HIDDEN)
    assert len(left) == 2
    assert len(left[1]) <= 4


def test_a_secret_inside_a_longer_one_does_not_leave_the_rest_standing() -> None:
    assert Redactor(["abcd", "abcdefgh"])("x abcdefgh y") == f"x {HIDDEN} y"


@each(
    ("text", "leak"),
    [
        ("token hf_AbCdEfGhIjKlMnOpQrSt is bad", "AbCdEfGhIj"),
        ("https://x-access-token:ghp_0123456789abcdefABCDEF@github.com/a/b", "0123456789"),
        ("github_pat_11ABCDEFG0123456789_abc", "11ABCDEFG"),
        (
            "GET https://s3/x.json?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=deadbeef00&X-Amz-Expires=3600",
            "deadbeef00",
        ),
        ("https://storage/x?X-Goog-Signature=deadbeef00&X-Goog-Expires=3600", "deadbeef00"),
        ("https://cdn/x?Expires=1&Signature=dead~beef-00_&Key-Pair-Id=K1", "dead~beef"),
        ("https://blob/x?sv=2024&sig=dead%2Bbeef%3D", "dead%2B"),
        ("clone https://me:hunter2@example.org/r.git", "hunter2"),
        ("Authorization: Bearer abcdefgh.ijkl", "abcdefgh"),
    ],
)
def test_what_looks_like_a_secret_is_hidden_even_if_nobody_named_it(text: str, leak: str) -> None:
    hidden = Redactor()(text)
    assert leak not in hidden
    assert HIDDEN in hidden


@each(
    "text",
    [
        "offer 7f3c accepted: 8.0 h of instruct",
        "http://127.0.0.1:7999/task_offer/",
        "commit 0123456789abcdef0123456789abcdef01234567",
        "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY",
        "X-Amz-Expires=3600",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert Redactor(["some-secret", "another one"])(text) == text


PIECES = (
    *_PATTERN_MARKS,
    "hf",
    "gh",
    "_",
    "?",
    "&",
    "X-Goog-",
    "Bearer ",
    "bearer ",
    "user:pw@host",
    "s3:",
    "A" * 20,
    " ",
)


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12).map("".join))
def test_no_shape_is_missed_by_what_is_looked_for_first(text: str) -> None:
    assert Redactor()(text) == _SECRET_PATTERNS.sub(HIDDEN, text)

import json
from pathlib import Path

from bittensor_core import Keypair
from hypothesis import given
from hypothesis import strategies as st

from miner.chain import fiber
from miner.support.addresses import public_key
from tests.doubles.each import each

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "fiber_vectors.json").read_text())
KEY = Keypair.create_from_seed(b"\x11" * 32)


@each("vector", VECTORS["requests"])
def test_reference_vectors_verify_or_not_as_they_say(vector: dict) -> None:
    headers = vector["headers"]
    key = public_key(headers[fiber.VALIDATOR_HOTKEY])
    signature = fiber.signature_bytes(headers[fiber.SIGNATURE])
    assert key is not None
    assert signature is not None
    nonce, miner = headers[fiber.NONCE], headers[fiber.MINER_HOTKEY]
    if vector["method"] == "GET":
        messages = fiber.signable_get_messages(nonce, miner)
    else:
        messages = (fiber.signable_post_message(nonce, miner, bytes.fromhex(vector["body_hex"])),)
    verified = any(fiber.is_signed(message, signature, key) for message in messages)
    addressed_to_us = miner == VECTORS["miner"]
    assert (verified and addressed_to_us) is vector["valid"]


def test_what_we_sign_verifies_for_post_and_get() -> None:
    post = fiber.sign_headers(KEY, "5Miner", b"{}")
    message = fiber.signable_post_message(post[fiber.NONCE], "5Miner", b"{}")
    signature = fiber.signature_bytes(post[fiber.SIGNATURE])
    assert signature is not None
    assert fiber.is_signed(message, signature, KEY.public_key)
    get = fiber.sign_headers(KEY, "5Miner", None)
    signature = fiber.signature_bytes(get[fiber.SIGNATURE])
    assert signature is not None
    as_fiber_signs = f"{get[fiber.NONCE]}:5Miner".encode()
    assert fiber.signable_get_messages(get[fiber.NONCE], "5Miner")[0] == as_fiber_signs
    assert fiber.is_signed(as_fiber_signs, signature, KEY.public_key)


def test_a_wallets_wrapped_signature_is_refused() -> None:
    assert not fiber.is_signed(b"text", KEY.sign(b"<Bytes>text</Bytes>"), KEY.public_key)


@each(
    "nonce",
    [
        "",
        "_",
        "abc",
        "-1_x",
        "1.5_x",
        "١٢٣_x",
        "9" * 22,
        str(10**20 + 1),
        "1" * 200,
        "0x12_a",
        " 12_a",
        "1e9_a",
    ],
)
def test_a_nonce_of_another_shape_has_no_time(nonce: str) -> None:
    assert fiber.nonce_time_ns(nonce) is None


def test_a_nonce_shows_when_it_was_made() -> None:
    assert fiber.nonce_time_ns(fiber.new_nonce(1764000000000000000)) == 1764000000000000000
    assert fiber.nonce_time_ns("1764000000000000000") == 1764000000000000000


@given(st.text(max_size=200))
def test_any_text_is_a_key_nonce_or_signature_or_none_never_a_crash(text: str) -> None:
    key = public_key(text)
    assert key is None or len(key) == 32
    stamp = fiber.nonce_time_ns(text)
    assert stamp is None or 0 <= stamp <= fiber.MAX_NONCE_NS
    signature = fiber.signature_bytes(text)
    assert signature is None or len(signature) == 64


@given(st.binary(max_size=100), st.binary(max_size=40))
def test_any_bytes_as_signature_or_key_are_not_signed(signature: bytes, key: bytes) -> None:
    assert fiber.is_signed(b"message", signature, key) is False

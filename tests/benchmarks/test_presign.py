import json
import time
from typing import NamedTuple

import pytest
from bittensor_core import Keypair

from benchmarks.load_kind import LoadKind
from benchmarks.presign import EXPECTED, GARBAGE_KINDS, SHAPES, Presigner
from core.domain.tasks import OFFERED_TASKS
from core.domain.wire import MinerTaskOffer, TrainRequestText
from miner.chain import fiber
from miner.support.addresses import public_key

VALIDATOR = Keypair.from_seed(b"v" * 32)
MINER = Keypair.from_seed(b"m" * 32)


class Parsed(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def parsed(request: bytes) -> Parsed:
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    method, path, version = first.split(" ")
    assert version == "HTTP/1.1"
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(headers) == len(lines)
    if method == "POST":
        assert int(headers["content-length"]) == len(body)
    return Parsed(method, path, headers, body)


def presigned(kind: LoadKind, count: int = 8) -> list[Parsed]:
    presigner = Presigner("127.0.0.1:7999", VALIDATOR, MINER.ss58_address)
    return [parsed(request) for request in presigner.batch(kind, count)]


def is_signed(request: Parsed) -> bool:
    key = public_key(request.headers[fiber.VALIDATOR_HOTKEY])
    signature = fiber.signature_bytes(request.headers[fiber.SIGNATURE])
    assert key is not None
    assert signature is not None
    nonce, miner = request.headers[fiber.NONCE], request.headers[fiber.MINER_HOTKEY]
    if request.method == "GET":
        return fiber.is_signed(fiber.signable_get_messages(nonce, miner)[0], signature, key)
    return fiber.is_signed(fiber.signable_post_message(nonce, miner, request.body), signature, key)


@pytest.mark.parametrize("kind", [LoadKind.OFFER, LoadKind.IMAGE_OFFER, LoadKind.START, LoadKind.SUBMISSION])
def test_real_kinds_are_signed_and_no_two_share_a_nonce(kind: LoadKind) -> None:
    requests = presigned(kind)
    assert all(is_signed(request) for request in requests)
    assert len({request.headers[fiber.NONCE] for request in requests}) == len(requests)
    assert {request.headers["host"] for request in requests} == {"127.0.0.1:7999"}


def test_offers_go_round_the_text_types_and_each_is_another_task() -> None:
    offers = [MinerTaskOffer.model_validate_json(request.body) for request in presigned(LoadKind.OFFER)]
    assert [offer.task_type for offer in offers[:4]] == [kind for kind in OFFERED_TASKS if kind.is_text]
    assert len({offer.task_id for offer in offers}) == len(offers)
    assert not MinerTaskOffer.model_validate_json(presigned(LoadKind.IMAGE_OFFER)[0].body).task_type.is_text


def test_starts_go_to_the_path_of_their_type() -> None:
    for request in presigned(LoadKind.START):
        start = TrainRequestText.model_validate_json(request.body)
        grpo = start.dataset_type.kind == "grpo"
        assert request.path == ("/start_training_grpo/" if grpo else "/start_training/")


@pytest.mark.parametrize(
    ("kind", "own_key", "signed"),
    [(LoadKind.BAD_SIGNATURE, True, False), (LoadKind.UNKNOWN_HOTKEY, False, True)],
)
def test_a_bad_signature_is_by_another_key_and_an_unknown_hotkey_signs_truly_for_itself(
    kind: LoadKind, own_key: bool, signed: bool
) -> None:
    for request in presigned(kind):
        assert (request.headers[fiber.VALIDATOR_HOTKEY] == VALIDATOR.ss58_address) is own_key
        assert is_signed(request) is signed


def test_bad_nonces_have_no_time_and_old_ones_one_outside_the_window() -> None:
    for request in presigned(LoadKind.BAD_NONCE, 50):
        assert fiber.nonce_time_ns(request.headers[fiber.NONCE]) is None
    for request in presigned(LoadKind.OLD_NONCE):
        stamp = fiber.nonce_time_ns(request.headers[fiber.NONCE])
        assert stamp is not None
        assert time.time_ns() - stamp > fiber.NONCE_WINDOW_NS


def test_a_missing_header_leaves_the_rest_in_order() -> None:
    for request in presigned(LoadKind.MISSING_HEADER):
        assert fiber.SIGNATURE not in request.headers
        assert fiber.VALIDATOR_HOTKEY in request.headers
        json.loads(request.body)


def test_garbage_is_an_even_mix_of_every_kind_of_it() -> None:
    requests = presigned(LoadKind.GARBAGE, 2 * len(GARBAGE_KINDS))
    assert sum(fiber.SIGNATURE not in request.headers for request in requests) == 2
    strangers = {request.headers[fiber.VALIDATOR_HOTKEY] for request in requests} - {VALIDATOR.ss58_address}
    assert len(strangers) == 1


def test_every_kind_can_be_made_and_says_which_statuses_are_right() -> None:
    for kind in LoadKind:
        assert presigned(kind, 1)
        assert EXPECTED[kind]
    assert presigned(LoadKind.HEALTH)[0].path == "/healthz"


def test_unheard_of_offers_have_names_of_their_own_and_as_many_shapes_as_are_meant() -> None:
    for kind, most in ((LoadKind.SHAPED_OFFER, SHAPES), (LoadKind.NEW_OFFER, 600)):
        offers = [MinerTaskOffer.model_validate_json(request.body) for request in presigned(kind, 600)]
        assert len({offer.model for offer in offers}) == len(offers)
        shapes = {(offer.task_type, offer.hours_to_complete, offer.model_params_count) for offer in offers}
        assert most * 0.8 < len(shapes) <= most


def test_the_same_seed_asks_about_the_same_tasks_with_fresh_nonces() -> None:
    first, second = presigned(LoadKind.OFFER), presigned(LoadKind.OFFER)
    assert [request.body for request in first] == [request.body for request in second]
    assert first[0].headers[fiber.NONCE] != second[0].headers[fiber.NONCE]

from __future__ import annotations

import asyncio
import copy
import json
import logging
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bittensor_core import Keypair, serialized_keypair_to_keyfile_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from miner.chain import identity
from miner.chain.fiber import is_signed
from miner.chain.identity import (
    Identity,
    IdentityError,
    PasswordNeeded,
    address_without_password,
    create_temporary_hotkey,
    hotkey_file,
    open_hotkey,
    opened_hotkey,
    password_problem,
)
from tests.doubles.each import each

pytestmark = pytest.mark.process


PASSWORD = SecretStr("correct horse")
#: The seed `0x00 … 1f`, whose halves must not show up anywhere.
SEED = bytes(range(32))


@dataclass
class Wallets:
    wallet_path: Path
    wallet_name: str = "miner"
    hotkey_name: str = "default"
    wallet_password: SecretStr | None = field(default=None)


@pytest.fixture
def wallets(tmp_path: Path) -> Wallets:
    return Wallets(tmp_path / "wallets")


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Wallets, Identity]:
    """One encrypted wallet for all: encrypting takes seconds of CPU."""
    at = Wallets(tmp_path_factory.mktemp("encrypted"))
    return at, create_temporary_hotkey(at.wallet_path, at.wallet_name, password=PASSWORD)


def keyfile(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def unlock(at: Wallets) -> None:
    with opened_hotkey(at):
        pass


def test_a_throwaway_hotkey_lies_where_bittensors_tools_look_and_signs(wallets: Wallets) -> None:
    created = create_temporary_hotkey(wallets.wallet_path, wallets.wallet_name)
    with opened_hotkey(wallets) as loaded:
        assert (loaded.ss58_address, loaded.public_key) == (created.ss58_address, created.public_key)
        assert is_signed(b"offer", loaded.sign(b"offer"), created.public_key)
    folder = wallets.wallet_path / "miner" / "hotkeys"
    private, public = folder / "default", folder / "defaultpub.txt"
    assert [path.stat().st_mode & 0o777 for path in (private, public)] == [0o600, 0o600]
    assert json.loads(private.read_bytes())["ss58Address"] == created.ss58_address
    assert json.loads(public.read_bytes())["ss58Address"] == created.ss58_address
    assert not {"privateKey", "secretSeed", "secretPhrase"} & json.loads(public.read_bytes()).keys()


def test_an_existing_hotkey_is_never_overwritten(wallets: Wallets) -> None:
    created = create_temporary_hotkey(wallets.wallet_path, wallets.wallet_name)
    with pytest.raises(IdentityError, match=r"hotkeys/default exists: a hotkey is never overwritten"):
        create_temporary_hotkey(wallets.wallet_path, wallets.wallet_name)
    path = hotkey_file(wallets.wallet_path, wallets.wallet_name, wallets.hotkey_name)
    assert open_hotkey(path).ss58_address == created.ss58_address


async def test_an_encrypted_hotkey_opens_while_the_event_loop_goes_on(
    encrypted: tuple[Wallets, Identity],
) -> None:
    at, _ = encrypted
    opening = asyncio.create_task(
        asyncio.to_thread(password_problem, Wallets(at.wallet_path, wallet_password=PASSWORD))
    )
    turns = 0
    while not opening.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert opening.result() is None
    assert turns > 5  # in this process, even in another thread, it would keep the interpreter for itself


def test_a_wrong_password_is_distinguished_and_not_repeated(encrypted: tuple[Wallets, Identity]) -> None:
    at, _ = encrypted
    with pytest.raises(
        IdentityError, match=r"WALLET_PASSWORD does not open .*hotkeys/default \(NaCl"
    ) as caught:
        unlock(Wallets(at.wallet_path, wallet_password=SecretStr("incorrect horse")))
    assert caught.value.code == "wrong_password"
    assert "horse" not in str(caught.value)


def test_the_reason_why_an_encrypted_hotkey_stays_locked_is_given_and_a_plain_one_has_none(
    encrypted: tuple[Wallets, Identity], tmp_path: Path
) -> None:
    at, _ = encrypted
    assert "WALLET_PASSWORD" in (password_problem(Wallets(at.wallet_path)) or "")
    plain = Wallets(tmp_path)
    create_temporary_hotkey(plain.wallet_path, plain.wallet_name)
    assert password_problem(plain) is None


@pytest.mark.parametrize("password", [None, SecretStr("")])
def test_an_encrypted_hotkey_without_a_password_never_prompts(
    encrypted: tuple[Wallets, Identity], password: SecretStr | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompt(*_: object) -> str:
        raise AssertionError("nobody is there to be asked")

    monkeypatch.setattr("getpass.getpass", prompt)
    monkeypatch.setattr("builtins.input", prompt)
    at, _ = encrypted
    with pytest.raises(PasswordNeeded, match="encrypted: set WALLET_PASSWORD"):
        unlock(Wallets(at.wallet_path, wallet_password=password))


def test_the_address_of_an_encrypted_hotkey_is_known_without_opening_it(
    encrypted: tuple[Wallets, Identity], tmp_path: Path
) -> None:
    at, created = encrypted
    alone = Wallets(tmp_path)
    content = hotkey_file(at.wallet_path, "miner", "default").read_bytes()
    keyfile(hotkey_file(tmp_path, "miner", "default"), content)
    assert address_without_password(at) == created.ss58_address
    assert address_without_password(alone) is None


@pytest.mark.thorough
def test_a_damaged_encrypted_hotkey_says_how_to_restore_it(wallets: Wallets) -> None:
    path = keyfile(hotkey_file(wallets.wallet_path, "miner", "default"), b"$NACLshort")
    with pytest.raises(IdentityError, match=r"NaCl encryption cannot be undone.*regen-hotkey") as caught:
        open_hotkey(path, PASSWORD)
    assert caught.value.code == "bad_identity"


def test_an_unlocking_that_takes_too_long_is_given_up(
    encrypted: tuple[Wallets, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "UNLOCK_SECONDS", 0.01)
    at, _ = encrypted
    with pytest.raises(IdentityError, match="not be unlocked within 0 s"):
        unlock(Wallets(at.wallet_path, wallet_password=PASSWORD))


def test_a_missing_hotkey_names_the_settings_and_what_is_there(wallets: Wallets) -> None:
    for missing in (unlock, address_without_password):
        with pytest.raises(IdentityError, match="there is no hotkey at"):
            missing(wallets)
    create_temporary_hotkey(wallets.wallet_path, "other")
    with pytest.raises(IdentityError, match=r"\(wallets there: other\)"):
        unlock(wallets)
    create_temporary_hotkey(wallets.wallet_path, "miner", "first")
    with pytest.raises(IdentityError) as caught:
        unlock(wallets)
    for part in (
        "hotkeys/default",
        "btcli wallet new-hotkey",
        "HOTKEY_NAME",
        "(hotkeys of this wallet there: first)",
    ):
        assert part in str(caught.value)


@each("name", ["../other", "a/b", "", ".", ".."])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(IdentityError, match="WALLET_NAME has value"):
        hotkey_file(tmp_path, name, "default")
    with pytest.raises(IdentityError, match="HOTKEY_NAME has value"):
        hotkey_file(tmp_path, "miner", name)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=120)
    | st.dictionaries(
        st.sampled_from(["secretSeed", "privateKey", "secretPhrase", "ss58Address", "cryptoType"]),
        st.text(max_size=70) | st.integers() | st.none(),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_other_content_is_a_clear_error_that_does_not_quote_it(tmp_path: Path, content: bytes) -> None:
    path = keyfile(tmp_path / "hotkeys" / "default", content)
    with pytest.raises(IdentityError) as caught:
        open_hotkey(path)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert str(path) in str(caught.value)


def test_a_file_with_the_public_half_only_is_refused(tmp_path: Path) -> None:
    public = Keypair(ss58_address=Keypair.create_from_seed(SEED).ss58_address)
    path = keyfile(tmp_path / "hotkeys" / "default", bytes(serialized_keypair_to_keyfile_data(public)))
    with pytest.raises(IdentityError, match="public key only"):
        open_hotkey(path)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, True)])
def test_a_hotkey_that_others_can_read_is_warned_about(
    wallets: Wallets, mode: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    create_temporary_hotkey(wallets.wallet_path, wallets.wallet_name)
    path = hotkey_file(wallets.wallet_path, wallets.wallet_name, wallets.hotkey_name)
    path.chmod(mode)
    caplog.set_level(logging.DEBUG)
    unlock(wallets)
    assert any(f"chmod 600 {path}" in record.getMessage() for record in caplog.records) is warns
    assert len(caplog.records) == warns  # nothing else is logged


def test_no_text_form_shows_the_key() -> None:
    me = Identity(Keypair.create_from_seed(SEED))
    secret = json.loads(bytes(serialized_keypair_to_keyfile_data(Keypair.create_from_seed(SEED))))
    shown = [repr(me), str(me), f"{me}", "%s" % (me,), repr([me]), repr(vars_of(me))]  # noqa: UP031
    assert shown[0] == f"Identity({me.ss58_address})"
    for form in (secret["privateKey"], secret["secretSeed"]):
        assert form[2:] not in "".join(shown)


def vars_of(thing: object) -> dict[str, object]:
    return {name: getattr(thing, name) for name in type(thing).__slots__}  # type: ignore[attr-defined]


def test_a_key_cannot_be_pickled_or_copied() -> None:
    me = Identity(Keypair.create_from_seed(SEED))
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="private key"):
            attempt(me)  # type: ignore[operator]

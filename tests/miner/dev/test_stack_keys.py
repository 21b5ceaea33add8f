from pathlib import Path

import pytest
from bittensor_core import Keypair, serialized_keypair_to_keyfile_data

from miner.chain.identity import IdentityError
from miner.chain.nodes_file import read_nodes
from miner.dev import stack


def test_keys_are_made_once_and_found_again(tmp_path: Path) -> None:
    made, found = stack.throwaway_keys(tmp_path / "new"), stack.throwaway_keys(tmp_path / "new")
    assert made.miner.ss58_address == found.miner.ss58_address
    assert made.validator.ss58_address == found.validator.ss58_address
    assert made.miner.ss58_address != made.validator.ss58_address


def test_no_two_folders_share_a_key(tmp_path: Path) -> None:
    one, two = stack.throwaway_keys(tmp_path / "one"), stack.throwaway_keys(tmp_path / "two")
    assert one.miner.ss58_address != two.miner.ss58_address


def test_the_nodes_file_is_one_that_the_daemon_reads(tmp_path: Path) -> None:
    keys = stack.throwaway_keys(tmp_path)
    stack.write_nodes(keys, 77.0)
    nodes = read_nodes(keys.nodes_file, 56, at=0.0).nodes_by_key
    validator, miner = nodes[keys.validator.public_key], nodes[keys.miner.public_key]
    assert (validator.stake, validator.validator_permit) == (77.0, True)
    assert (miner.stake, miner.validator_permit) == (0.0, False)


def test_an_edited_nodes_file_is_left_alone(tmp_path: Path) -> None:
    keys = stack.throwaway_keys(tmp_path)
    keys.nodes_file.write_text("[]")
    stack.throwaway_keys(tmp_path)
    assert keys.nodes_file.read_text() == "[]"


def test_private_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    keys = stack.throwaway_keys(tmp_path)
    files = [path for path in keys.wallet_path.rglob("*") if path.is_file()]
    assert files
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_a_key_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    pair = Keypair.from_seed(b"o" * 32)
    path = tmp_path / "hotkey"
    path.write_bytes(serialized_keypair_to_keyfile_data(pair))
    path.chmod(0o600)
    assert stack.read_key(path).ss58_address == pair.ss58_address
    with pytest.raises(IdentityError):
        stack.read_key(tmp_path / "none")

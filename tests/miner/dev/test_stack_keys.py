from pathlib import Path

from miner.chain.sources import read_nodes
from miner.dev import stack


def test_a_folder_has_its_own_keys_made_once_for_their_owner_only(tmp_path: Path) -> None:
    made, again, other = (stack.throwaway_keys(tmp_path / name) for name in ("new", "new", "other"))
    assert made.miner.ss58_address == again.miner.ss58_address
    assert made.validator.ss58_address == again.validator.ss58_address
    assert len({made.miner.ss58_address, made.validator.ss58_address, other.miner.ss58_address}) == 3
    files = [path for path in made.wallet_path.rglob("*") if path.is_file()]
    assert files
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_the_nodes_file_is_one_that_the_daemon_reads_and_an_edited_one_is_left_alone(tmp_path: Path) -> None:
    keys = stack.throwaway_keys(tmp_path)
    stack.write_nodes(keys, 77.0)
    nodes = read_nodes(keys.nodes_file, 56, at=0.0).nodes_by_key
    validator, miner = nodes[keys.validator.public_key], nodes[keys.miner.public_key]
    assert (validator.stake, validator.validator_permit) == (77.0, True)
    assert (miner.stake, miner.validator_permit) == (0.0, False)
    keys.nodes_file.write_text("[]")
    stack.throwaway_keys(tmp_path)
    assert keys.nodes_file.read_text() == "[]"

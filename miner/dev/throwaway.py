"""Keys and a nodes file that are worth nothing: for trying things on, never for a chain."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from bittensor_core import Keypair, deserialize_keypair_from_keyfile_data, serialized_keypair_to_keyfile_data

MINER = "miner"
VALIDATOR = "validator"
HOTKEY = "default"
VALIDATOR_STAKE = 10_000.0


@dataclass(frozen=True)
class Throwaway:
    """The two identities of a trial, and where their files are."""

    wallet_path: Path
    nodes_file: Path
    miner: Keypair
    validator: Keypair

    def settings(self) -> dict[str, str]:
        """What makes a miner use them."""
        return {
            "CHAIN": "file",
            "NODES_FILE": str(self.nodes_file),
            "WALLET_PATH": str(self.wallet_path),
            "WALLET_NAME": MINER,
            "HOTKEY_NAME": HOTKEY,
        }


def keys_of(folder: Path) -> Throwaway:
    """The folder's keys and nodes file; made when it has none."""
    wallets = folder.absolute() / "wallets"
    keys = Throwaway(
        wallets, folder.absolute() / "nodes.json", _hotkey(wallets, MINER), _hotkey(wallets, VALIDATOR)
    )
    if not keys.nodes_file.exists():
        write_nodes(keys, VALIDATOR_STAKE)
    return keys


def write_nodes(keys: Throwaway, stake: float) -> None:
    keys.nodes_file.write_text(json.dumps([keys.validator.ss58_address, stake]), encoding="utf-8")


def read_key(path: Path) -> Keypair:
    return deserialize_keypair_from_keyfile_data(path.read_bytes())


def _hotkey(wallets: Path, name: str) -> Keypair:
    path = wallets / name / "hotkeys" / HOTKEY
    if path.exists():
        return read_key(path)
    pair = Keypair.from_seed(secrets.token_bytes(32))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(serialized_keypair_to_keyfile_data(pair))
    path.chmod(0o600)
    return pair

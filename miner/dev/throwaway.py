"""Keys and a nodes file that are worth nothing: for trying things on, never for a chain."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from miner.identity import Identity, create_throwaway, hotkey_file, open_hotkey

MINER = "miner"
VALIDATOR = "validator"
HOTKEY = "default"
VALIDATOR_STAKE = 10_000.0


@dataclass(frozen=True)
class Throwaway:
    """The two identities of a trial, and where their files are."""

    wallet_path: Path
    nodes_file: Path
    miner: Identity
    validator: Identity

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
    """The folder's keys and nodes file; made when it has none, so that a trial can be taken up again."""
    folder = folder.absolute()
    wallets = folder / "wallets"
    keys = Throwaway(
        wallets, folder / "nodes.json", _kept_or_made(wallets, MINER), _kept_or_made(wallets, VALIDATOR)
    )
    if not keys.nodes_file.exists():
        write_nodes(keys, VALIDATOR_STAKE)
    return keys


def write_nodes(keys: Throwaway, stake: float) -> None:
    """A subnet of two: a validator with that stake, and the miner."""
    nodes = [
        {"uid": 0, "hotkey": keys.validator.ss58_address, "stake": stake, "validator_permit": True},
        {"uid": 1, "hotkey": keys.miner.ss58_address},
    ]
    keys.nodes_file.write_text(json.dumps(nodes, indent=2) + "\n", encoding="utf-8")


def read_key(path: Path) -> Identity:
    """A key of the user's own; an encrypted one is opened with WALLET_PASSWORD."""
    password = os.environ.get("WALLET_PASSWORD")
    return open_hotkey(path.expanduser(), SecretStr(password) if password else None)


def _kept_or_made(wallets: Path, name: str) -> Identity:
    path = hotkey_file(wallets, name, HOTKEY)
    return open_hotkey(path) if path.exists() else create_throwaway(wallets, name, HOTKEY)

"""A Subtensor node on loopback: real JSON-RPC, real SCALE bytes, real signatures, a hand-made chain.

`Subtensor` is the chain (who is registered, what a submitted call does), `ChainDouble` the node that serves
it over a websocket, in a thread of its own so that synchronous tests can use it too. Scores, registration
and the rate limit are modelled by hand; the codec is bittensor_core's on both ends, so this cannot show a
bug in it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bittensor_core import Keypair, ss58_encode

from tests.doubles.chain_spec import ChainSpec, SignedCall

RAO = 10**9
NO_HOTKEY, RATE_LIMITED = 10, 12


@dataclass
class Neuron:
    hotkey: str
    coldkey: str
    stake: float = 0.0
    validator_permit: bool = False
    incentive: float = 0.0
    emission: float = 0.0
    last_update: int = 0
    ip: str | None = None
    port: int = 0
    axon_block: int | None = None


def neurons(count: int) -> list[Neuron]:
    """A subnet as it looks in the wild: some validators, miners with falling incentive and their axons."""
    made = []
    for uid in range(count):
        hotkey, coldkey = (Keypair.create_from_uri(f"//{role}{uid}").ss58_address for role in ("hot", "cold"))
        validator = uid < count // 16
        made.append(
            Neuron(
                hotkey=hotkey,
                coldkey=coldkey,
                stake=1000.0 * (count - uid) if validator else 0.5,
                validator_permit=validator,
                incentive=0.0 if validator else round((count - uid) / count, 4),
                emission=0.25 * uid,
                last_update=uid,
                ip=None if validator else f"198.51.100.{uid % 256}",
                port=0 if validator else 7000 + uid,
            )
        )
    return made


class RpcError(Exception):
    def __init__(self, code: int, message: str, data: str | None = None) -> None:
        super().__init__(message)
        self.payload: dict[str, Any] = {"code": code, "message": message}
        if data is not None:
            self.payload["data"] = data


def refused(reason: str) -> RpcError:
    return RpcError(1010, "Invalid Transaction", reason)


@dataclass
class Subtensor:
    """One chain: its subnets, its blocks and what a submitted call does to them."""

    spec: ChainSpec
    #: Tells one test's chain from another's: the SDK keeps metadata on disk by genesis hash.
    name: str = "double"
    subnets: dict[int, list[Neuron]] = field(default_factory=dict)
    block: int = 100
    serving_rate_limit: int = 50
    #: Called before a submitted call is judged, to change the world between a client's look and its leap.
    before_submit: Callable[[], None] = lambda: None
    submitted: list[SignedCall] = field(default_factory=list)
    _nonces: dict[str, int] = field(default_factory=dict)
    _bodies: dict[int, str] = field(default_factory=dict)
    _events: dict[int, bytes] = field(default_factory=dict)

    @property
    def genesis(self) -> str:
        return self.block_hash(0)

    def block_hash(self, number: int) -> str:
        return "0x" + hashlib.blake2b(f"{self.name}/{number}".encode(), digest_size=32).hexdigest()

    def neuron(self, netuid: int, hotkey: str) -> Neuron | None:
        return next((n for n in self.subnets.get(netuid, []) if n.hotkey == hotkey), None)

    def answer(self, method: str, params: list[Any]) -> Any:
        """One JSON-RPC call that changes nothing."""
        match method, params:
            case "state_getRuntimeVersion", _:
                return self._runtime_version()
            case "chain_getBlockHash", [int(number), *_]:
                return self.block_hash(number) if 0 <= number <= self.block else None
            case (("chain_getHead" | "chain_getFinalizedHead" | "chain_getBlockHash"), _):
                return self.block_hash(self.block)
            case "chain_getHeader", _:
                return self._header(self._number(params))
            case "chain_getBlock", _:
                number = self._number(params)
                body = [self._bodies[number]] if number in self._bodies else []
                return {"block": {"header": self._header(number), "extrinsics": body}, "justifications": None}
            case "account_nextIndex", [str(account)]:
                return self._nonces.get(account, 0)
            case "state_getStorageAt", [str(key), *at]:
                return self._stored(bytes.fromhex(key[2:]), self._number(at))
            case "state_call", [str(function), str(args), *_]:
                return self._runtime_call(function, bytes.fromhex(args.removeprefix("0x")))
        raise RpcError(-32601, f"Method not found: {method}{params}")

    def submit(self, extrinsic: str) -> str:
        """Judge and apply a signed call; answers with the hash of the block that holds it."""
        self.before_submit()
        call = self.spec.decode_extrinsic(bytes.fromhex(extrinsic[2:]))
        self._check_signature(call)
        if call.call != ("SubtensorModule", "serve_axon"):
            raise refused("Custom error: 255")
        neuron = self.neuron(call.args["netuid"], call.signer)
        if neuron is None:
            raise refused(f"Custom error: {NO_HOTKEY}")
        if neuron.axon_block is not None and self.block - neuron.axon_block < self.serving_rate_limit:
            raise refused(f"Custom error: {RATE_LIMITED}")
        self.submitted.append(call)
        return self._include(extrinsic, call, neuron)

    def _include(self, extrinsic: str, call: SignedCall, neuron: Neuron) -> str:
        self.block += 1
        self._nonces[call.signer] = call.nonce + 1
        version = ipaddress.IPv6Address if call.args["ip_type"] == 6 else ipaddress.IPv4Address
        neuron.ip, neuron.port = str(version(int(call.args["ip"]))), call.args["port"]
        neuron.axon_block = self.block
        self._bodies[self.block] = extrinsic
        info = {"weight": {"ref_time": 1, "proof_size": 0}, "class": "Normal", "pays_fee": "No"}
        self._events[self.block] = self.spec.encode_events(
            0,
            [
                {"SubtensorModule": {"AxonServed": [call.args["netuid"], call.signer]}},
                {"System": {"ExtrinsicSuccess": {"dispatch_info": info}}},
            ],
        )
        return self.block_hash(self.block)

    def _check_signature(self, call: SignedCall) -> None:
        born = 0
        if not isinstance(call.era, str):
            period, phase = call.era
            born = (max(self.block, phase) - phase) // period * period + phase
        hashes = [bytes.fromhex(self.block_hash(number)[2:]) for number in (0, born)]
        if not self.spec.is_signed(call, *hashes):
            raise refused("Transaction has a bad signature")
        expected = self._nonces.get(call.signer, 0)
        if call.nonce != expected:
            raise refused(
                "Transaction is outdated" if call.nonce < expected else "Transaction is from the future"
            )

    def _runtime_version(self) -> dict[str, Any]:
        return {
            "specName": "node-subtensor",
            "implName": "node-subtensor",
            "authoringVersion": 1,
            "implVersion": 1,
            "specVersion": self.spec.version,
            "transactionVersion": self.spec.transaction_version,
            "stateVersion": 1,
            "apis": [],
        }

    def _number(self, params: list[Any]) -> int:
        wanted = params[0] if params else None
        if wanted is None:
            return self.block
        for number in range(self.block, -1, -1):
            if self.block_hash(number) == wanted:
                return number
        raise RpcError(-32000, f"Unknown block {wanted}")

    def _header(self, number: int) -> dict[str, Any]:
        nothing = "0x" + bytes(32).hex()
        return {
            "number": hex(number),
            "parentHash": self.block_hash(number - 1) if number else nothing,
            "stateRoot": nothing,
            "extrinsicsRoot": nothing,
            "digest": {"logs": []},
        }

    def _stored(self, key: bytes, block: int) -> str | None:
        if key == self.spec.storage_key("System", "Events"):
            return "0x" + self._events.get(block, b"\x00").hex()
        if key == self.spec.storage_key("Timestamp", "Now"):
            return "0x" + int(time.time() * 1000).to_bytes(8, "little").hex()
        for netuid, members in self.subnets.items():
            for uid, member in enumerate(members):
                if key == self.spec.storage_key("SubtensorModule", "Uids", netuid, member.hotkey):
                    return "0x" + uid.to_bytes(2, "little").hex()
        return None

    def _runtime_call(self, function: str, args: bytes) -> str:
        match function:
            case "Metadata_metadata_at_version":
                return self.spec.metadata_v15
            case "SubnetInfoRuntimeApi_get_metagraph":
                netuid = int.from_bytes(args[:2], "little")
                return "0x" + self.spec.encode_metagraph(self._metagraph(netuid)).hex()
            case "TransactionPaymentApi_query_info":
                return "0x" + bytes(19).hex()
            case "AccountNonceApi_account_nonce":
                account = ss58_encode(args[:32], 42)
                return "0x" + self._nonces.get(account, 0).to_bytes(4, "little").hex()
        raise RpcError(-32601, f"Method not found: {function}")

    def _metagraph(self, netuid: int) -> dict[str, Any] | None:
        members = self.subnets.get(netuid)
        if members is None:
            return None
        none = [0] * len(members)
        stakes = [int(member.stake * RAO) for member in members]
        return {
            "netuid": netuid,
            "name": list(b"double"),
            "symbol": list("α".encode()),
            "block": self.block,
            "tempo": 360,
            "num_uids": len(members),
            "max_uids": 256,
            "hotkeys": [member.hotkey for member in members],
            "coldkeys": [member.coldkey for member in members],
            "identities": [None] * len(members),
            "axons": [_axon(member) for member in members],
            "active": [True] * len(members),
            "validator_permit": [member.validator_permit for member in members],
            "pruning_score": none,
            "last_update": [member.last_update for member in members],
            "emission": [int(member.emission * RAO) for member in members],
            "incentives": [round(member.incentive * 65535) for member in members],
            "dividends": none,
            "consensus": none,
            # The chain has not computed these two since spec 425 and answers with empty columns.
            "trust": [],
            "rank": [],
            "block_at_registration": none,
            "alpha_stake": stakes,
            "tao_stake": none,
            "total_stake": stakes,
            "collateral_locked": none,
            "collateral_min": none,
            "collateral_earned": none,
        }


def _axon(neuron: Neuron) -> dict[str, Any]:
    address = ipaddress.ip_address(neuron.ip) if neuron.ip else None
    return {
        "block": neuron.axon_block or 0,
        "version": 1 if address else 0,
        "ip": int(address) if address else 0,
        "port": neuron.port,
        "ip_type": address.version if address else 0,
        "protocol": 4 if address else 0,
        "placeholder1": 0,
        "placeholder2": 0,
    }

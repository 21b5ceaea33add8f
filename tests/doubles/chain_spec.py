"""The chain's own types: SCALE bytes made with the metadata that a real node served.

The metadata (runtime spec 461) sits in the source distribution of the bittensor SDK and not in its wheel,
so it is fetched once through pip and kept in `.cache/`. Nothing here knows what a subnet is for.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bittensor_core import Runtime, verify

SDK_VERSION = "11.3.0"
SDIST_SHA256 = "8ce05029a712866048c6cf3e3d5df1592ac896175f5b4227f63044b7e7b7edb3"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / f"bittensor-{SDK_VERSION}"
SR25519 = 1
TRIES = 3


def golden_file(cache: Path = CACHE) -> Path:
    """The recorded answers of a real node; downloads the source distribution when it is not cached yet.

    pip prepares the metadata of a source distribution while it downloads it, which needs the build backend;
    pip fetches that by itself. `--no-build-isolation` would only work where hatchling is installed already.
    """
    golden = cache / "golden.json"
    if golden.exists():
        return golden
    cache.mkdir(parents=True, exist_ok=True)
    _download(cache)
    sdist = cache / f"bittensor-{SDK_VERSION}.tar.gz"
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    assert digest == SDIST_SHA256, f"{sdist} has sha256 {digest}, expected {SDIST_SHA256}: delete it"
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"bittensor-{SDK_VERSION}/tests/fixtures/golden.json")
        partial = golden.with_suffix(".partial")
        partial.write_bytes(member.read())
    partial.replace(golden)
    return golden


def _download(cache: Path) -> None:
    """An index fails once in a while; all tries together take less than a test may."""
    wanted = ["--no-deps", "--no-binary", "bittensor", f"bittensor=={SDK_VERSION}"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--dest", str(cache), *wanted]
    for left in reversed(range(TRIES)):
        try:
            subprocess.run(command, check=True, timeout=180, capture_output=True, text=True)
        except subprocess.SubprocessError:
            if not left:
                raise
        else:
            return


@dataclass(frozen=True)
class SignedCall:
    """One extrinsic, taken apart."""

    signer: str
    nonce: int
    call: tuple[str, str]
    args: dict[str, Any]
    signature: bytes
    era: str | tuple[int, int]
    raw_call: bytes


class ChainSpec:
    """A runtime's types: encodes what a node would answer, decodes what a client submits."""

    def __init__(self, golden: Path) -> None:
        recorded = json.loads(golden.read_text())
        self.metadata_v15: str = recorded["metadata"]["v15_hex"]
        self.version: int = recorded["network"]["spec_version"]
        self.transaction_version: int = recorded["network"]["transaction_version"]
        opaque = bytes.fromhex(self.metadata_v15[2:])
        # Option<OpaqueMetadata>: one byte for "some", then a four-byte compact length.
        assert opaque[0] == 1
        assert opaque[1] & 3 == 2
        self.runtime = Runtime(opaque[5:], self.version, self.transaction_version, 42)
        registry = json.loads(self.runtime.registry_json())
        self._types: dict[int, dict[str, Any]] = {entry["id"]: entry["type"] for entry in registry["types"]}

    def encode_metagraph(self, values: dict[str, Any] | None) -> bytes:
        """The answer of `get_metagraph`; what `values` leaves out is zero. None: there is no such subnet."""
        output = self.runtime.runtime_api_map()["SubnetInfoRuntimeApi"]["get_metagraph"]["output"]
        if values is None:
            return bytes(self.runtime.encode(output, None))
        full = self._zero(self._option_content(_type_id(output)))
        unknown = values.keys() - full.keys()
        assert not unknown, f"the metagraph of spec {self.version} has no {unknown}"
        return bytes(self.runtime.encode(output, full | values))

    def encode_events(self, extrinsic: int, events: list[dict[str, Any]]) -> bytes:
        records = [{"phase": {"ApplyExtrinsic": extrinsic}, "event": event, "topics": []} for event in events]
        return bytes(self.runtime.encode(self.runtime.storage_entry("System", "Events").value_type, records))

    def storage_key(self, pallet: str, item: str, *params: Any) -> bytes:
        return bytes(self.runtime.storage_key(pallet, item, list(params)))

    def decode_extrinsic(self, raw: bytes) -> SignedCall:
        decoded = self.runtime.decode_extrinsic(raw)
        call = decoded["call"]
        name = (call["call_module"], call["call_function"])
        args = {arg["name"]: arg["value"] for arg in call["call_args"]}
        return SignedCall(
            signer=decoded["address"],
            nonce=decoded["nonce"],
            call=name,
            args=args,
            signature=bytes.fromhex(decoded["signature"]["Sr25519"][2:]),
            era=decoded["era"],
            raw_call=bytes(self.runtime.compose_call(*name, args)),
        )

    def is_signed(self, call: SignedCall, genesis: bytes, era_block: bytes) -> bool:
        """Whether the signer signed exactly this call, for this chain, this era and this nonce."""
        era = call.era if isinstance(call.era, str) else {"period": call.era[0], "phase": call.era[1]}
        payload = self.runtime.signature_payload(
            call.raw_call,
            era=era,
            nonce=call.nonce,
            tip=0,
            tip_asset_id=None,
            genesis_hash=genesis,
            era_block_hash=era_block,
        )
        return bool(verify(bytes(payload), call.signature, call.signer, SR25519))

    def _option_content(self, type_id: int) -> int:
        some = self._types[type_id]["def"]["variant"]["variants"][1]
        return int(some["fields"][0]["type"])

    def _zero(self, type_id: int) -> Any:
        """A value of a type with nothing in it, so that a caller names only the fields that matter to it."""
        ((kind, shape),) = self._types[type_id]["def"].items()
        match kind:
            case "composite":
                return self._zero_composite(type_id, shape.get("fields", []))
            case "variant":
                return self._zero_variant(type_id, shape["variants"])
            case "compact":
                return self._zero(shape["type"])
            case "sequence":
                return []
            case "array":
                return [self._zero(shape["type"])] * shape["len"]
            case "tuple":
                return [self._zero(part) for part in shape] or None
            case "primitive":
                return {"bool": False, "str": ""}.get(shape, 0)
        raise AssertionError(f"type {type_id} is a {kind}, which nothing needed so far")

    def _zero_composite(self, type_id: int, fields: list[dict[str, Any]]) -> Any:
        if self._types[type_id].get("path", [])[-1:] == ["AccountId32"]:
            return "0x" + bytes(32).hex()
        if fields and all("name" in field for field in fields):
            return {field["name"]: self._zero(field["type"]) for field in fields}
        values = [self._zero(field["type"]) for field in fields]
        return values[0] if len(values) == 1 else values

    def _zero_variant(self, type_id: int, variants: list[dict[str, Any]]) -> Any:
        if self._types[type_id].get("path") == ["Option"]:
            return None
        fields = variants[0].get("fields", [])
        name = variants[0]["name"]
        return {name: [self._zero(field["type"]) for field in fields]} if fields else name


def _type_id(name: str) -> int:
    return int(name.rpartition("::")[2])
